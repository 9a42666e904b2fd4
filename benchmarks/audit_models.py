"""What an audit of a whole model from files costs: wall time and peak memory of `qknorm audit`.

    python benchmarks/audit_models.py [--gguf FILE] [--json]

One model is made for it: a checkpoint with the published configuration of Qwen3-0.6B (28 layers, 16
query and 8 key heads of 128, bf16) and RANDOM weights, gains unequal in 0.5 to 1.5. What is read back,
and what that costs, does not depend on training. With `--gguf` a GGUF file is audited besides: it is
dequantized and run.

The command runs in a process of its own, whose peak is the largest resident set, pages of files that are
mapped into memory included. No figure is printed unless every layer was read back as the configuration
says. Exit code 1 if a limit is missed. GGUF files need an extra: pip install 'qknorm[gguf]'.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_GB = 300.0, 3.0
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
READ_BACK = {
    "q_norm": "rms",
    "k_norm": "rms",
    "statistic": "head",
    "gain": "shared",
    "k_gain": "shared",
    "eps": 1e-6,
    "eps_place": "inside",
    "order": "before",
    "rope": "half",
    "rotary_width": 128,
    "v_norm": False,
    "scale": 128**-0.5,
    "softcap": None,
    "window": None,
    "sink": None,
    "causal": True,
    "q_heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
}


def make(folder: Path) -> None:
    """Write the checkpoint, and beside it the extremes of the gains of each layer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16)
    ranges: dict[str, dict[str, list[float]]] = {}
    with torch.no_grad():
        for name, gain in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                gain.uniform_(0.5, 1.5)
                layer, side, _ = name.rsplit(".", 2)
                ends = [float(gain.min()), float(gain.max())]
                ranges.setdefault(layer, {})[f"{side[0]}_gain_range"] = ends
    model.save_pretrained(folder)
    folder.with_suffix(".gains.json").write_text(json.dumps(ranges))


def audited(target: Path) -> dict[str, Any]:
    """One run of the command: its report, exit code, wall time and peak memory."""
    command = [sys.executable, "-m", "qknorm", "audit", str(target), "--json"]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints)
        assert child.stdout is not None
        text = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        complaints.seek(0)
        said = complaints.read().strip().splitlines()
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "said": said[-1] if said else "",
        "report": json.loads(text) if text else None,
        "exit_code": child.returncode,
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_gb": used.ru_maxrss * 1024 / 1e9,
    }


def summary(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Figures and verdict, without the report itself."""
    report, said = run.pop("report"), run.pop("said")
    if report is None:
        return {"name": name, "wrong": f"exit code {run['exit_code']} and no report: {said}"}
    codes: dict[str, int] = {}
    for one in report["findings"]:
        codes[one["code"]] = codes.get(one["code"], 0) + 1
    return (
        {"name": name, "passed": report["passed"], "layers": len(report["formulas"])}
        | run
        | {
            "findings": codes,
            "not_probed": report["not_probed"],
            "exercised": report["exercised"],
            "limits_hold": run["wall_s"] < LIMIT_S and run["peak_gb"] < LIMIT_GB,
        }
    )


def misread(report: dict[str, Any] | None, ranges: dict[str, dict[str, list[float]]]) -> list[str]:
    """Fields of layers that were not read back as they were written."""
    if report is None:
        return []

    def is_same(found: Any, wanted: Any) -> bool:
        if isinstance(wanted, list):
            return found is not None and all(map(is_same, found, wanted))
        if isinstance(wanted, float):
            return found is not None and math.isclose(found, wanted, rel_tol=1e-2)
        return found == wanted

    formulas = report["formulas"]
    wrong = [f"{layer} is not there" for layer in ranges.keys() - formulas.keys()]
    for layer in ranges.keys() & formulas.keys():
        for field, wanted in (READ_BACK | ranges[layer]).items():
            if not is_same(formulas[layer][field], wanted):
                wrong.append(f"{layer}: {field} is {formulas[layer][field]}, not {wanted}")
    return sorted(wrong)


def of_qwen3() -> dict[str, Any]:
    """Make the checkpoint in another process, so that this one stays small, and audit it."""
    with tempfile.TemporaryDirectory(prefix="qknorm-audit-") as temporary:
        folder = Path(temporary) / "qwen3-0.6b-random"
        subprocess.run([sys.executable, __file__, "--make", str(folder)], check=True)
        ranges = json.loads(folder.with_suffix(".gains.json").read_text())
        run = audited(folder)
        wrong = misread(run["report"], ranges)
        name = "Qwen3-0.6B, random weights"
        return {"name": name, "wrong": "; ".join(wrong[:3])} if wrong else summary(name, run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gguf", type=Path, help="a GGUF file to audit besides")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make is not None:
        make(args.make)
        return 0
    rows = [of_qwen3()]
    if args.gguf is not None:
        rows.append(summary(args.gguf.name, audited(args.gguf)))
    from qknorm.lab.environment import describe  # torch, which would count as memory of the children

    if args.json:
        limits = {"wall_s": LIMIT_S, "peak_gb": LIMIT_GB}
        print(json.dumps({"environment": describe(), "limits": limits, "rows": rows}, indent=2))
    for row in rows if not args.json else ():
        if "wrong" in row:
            print(f"{row['name']}: no figure: {row['wrong']}")
            continue
        found = ", ".join(f"{code} x {count}" for code, count in row["findings"].items()) or "none"
        print(
            f"{row['name']}: {row['wall_s']:.0f} s (limit {LIMIT_S:.0f}), {row['peak_gb']:.2f} GB "
            f"(limit {LIMIT_GB:g}); {row['layers']} layers, exit code {row['exit_code']}, found: {found}"
        )
    return 0 if all(row.get("limits_hold", False) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

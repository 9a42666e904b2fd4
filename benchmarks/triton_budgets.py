"""What the Triton kernels cost a GPU, without a GPU: compiled ahead of time, read by ptxas and nvdisasm.

Registers, spills, stack, shared memory, tensor-core and exp2 instructions of every shipped configuration
on sm_80, sm_90 and sm_100, held against the committed budget `triton_budgets.json`.

    python benchmarks/triton_budgets.py            # compare; exit code 1 if anything grew
    python benchmarks/triton_budgets.py --write    # accept the figures of now
    python benchmarks/triton_budgets.py --only forward --target 90
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qknorm.ops.backends.triton.kernels import (
    backward,
    decode,
    documents,
    forward,
    logit_stats,
    prep,
)
from qknorm.ops.backends.triton.tiles import ID_CHUNK, Tiles, block, tiles

BUDGETS = Path(__file__).with_name("triton_budgets.json")
TARGETS = (80, 90, 100)
WIDTHS = (64, 128, 256)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MAX_REGISTERS = 255
TENSOR_CORE = {80: ("HMMA",), 90: ("HGMMA", "HMMA"), 100: ("UTCHMMA", "UTCOMMA", "HGMMA", "HMMA")}
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"

PLAIN = {"CAUSAL": True, "WINDOW": False, "IDS": False}
FULL = {"CAUSAL": True, "WINDOW": True, "IDS": True}
POINTERS = {
    "i64": ("query_ids_ptr", "key_ids_ptr", "tokens_ptr", "own_ids_ptr", "other_ids_ptr"),
    "i32": ("ranges_ptr", "counts_ptr"),
    "fp32": (
        "gain_ptr", "q_gain_ptr", "k_gain_ptr", "cos_ptr", "sin_ptr", "sink_ptr", "lse_ptr",
        "delta_ptr", "heads_ptr", "rows_ptr", "acc_ptr", "mlt_ptr", "d_sink_ptr", "dq_gain_ptr",
        "dk_gain_ptr",
    ),
}  # fmt: skip
FLOATS = ("eps", "scale", "c")
TENSORS = ("q", "k", "v", "d_out")


@dataclass(frozen=True)
class Configuration:
    """One compilation: a kernel, its constants, its tile sizes, the dtype of its tensors."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    tiles: Tiles
    dtype: str
    multiplies: bool = True


def _blocks(one: Tiles, D: int) -> dict[str, int]:
    return {"BLOCK_M": one.rows, "BLOCK_N": one.keys, "BLOCK_D": block(D), "BLOCK_V": block(D)}


def _of_width(D: int, dtype: str, target: int) -> Iterator[Configuration]:
    def sizes_of(kernel: str) -> Tiles:
        return tiles(kernel, D, is_fp32=dtype == "fp32", architecture=target)

    def make(
        kernel: str, variant: str, fn: Any, constants: dict[str, Any], **more: Any
    ) -> Configuration:
        name = f"{kernel} {variant} D={D} {dtype}"
        return Configuration(name, fn, constants, sizes_of(kernel), dtype, **more)

    sizes = {"D": D, "V": D}
    one = sizes_of("forward")
    hat = {"R": D, "NEGATIVE": False, **sizes, **_blocks(one, D)}
    for variant, constants in (
        ("bare", {"NORM": False, "ROPE": 0, **PLAIN, "SINK": False, "STATS": 0}),
        ("norm", {"NORM": True, "ROPE": 1, **PLAIN, "SINK": False, "STATS": 0}),
        ("norm, statistics", {"NORM": True, "ROPE": 1, **PLAIN, "SINK": False, "STATS": 1}),
        (
            "norm, window, sink",
            {"NORM": True, "ROPE": 1, **PLAIN, "WINDOW": True, "SINK": True, "STATS": 0},
        ),
        ("all", {"NORM": True, "ROPE": 2, **FULL, "SINK": True, "STATS": 2}),
    ):
        yield make("forward", variant, forward.attention_forward, hat | constants)
    for kernel, fn in (("dq", backward.attention_dq), ("dkdv", backward.attention_dkdv)):
        one = sizes_of(kernel)
        for variant, mask in (("causal", PLAIN), ("all", FULL)):
            full_loop = {"FULL_LOOP": one.full_loop and not mask["IDS"]}
            yield make(kernel, variant, fn, sizes | mask | _blocks(one, D) | full_loop)
    one = sizes_of("decode")
    for variant, entropy in (("plain", False), ("statistics", True)):
        constants = sizes | PLAIN | _blocks(one, D) | {"NEGATIVE": False, "ENTROPY": entropy}
        yield make("decode", variant, decode.decode_split, constants)
    merge = {"V": D, **PLAIN, "SINK": True, "STATS": 2, "BLOCK_T": 1, "SPLIT_M": one.rows}
    yield make("decode", "merge", decode.decode_merge, merge | {"BLOCK_V": block(D)}, multiplies=False)
    one = sizes_of("dq")
    delta = {"V": D, "SINK": True, "BLOCK_M": one.rows, "BLOCK_V": block(D)}
    yield make("dq", "delta and sink", backward.delta_and_sink, delta, multiplies=False)
    if D == 64:
        ranges = {"BLOCK": 128, "CHUNK": ID_CHUNK}
        yield make("prep", "ranges of ids", documents.tile_ranges, ranges, multiplies=False)
        count = {"SAMPLED": False, "CAUSAL": True, "WINDOW": True, "BLOCK_M": 64, "BLOCK_N": 64}
        yield make("prep", "visible keys", documents.visible_keys, count, multiplies=False)
    one = sizes_of("logit_stats")
    constants = {"D": D, "NEGATIVE": False, "SAMPLED": True, **PLAIN, **_blocks(one, D)}
    del constants["BLOCK_V"]
    yield make("logit_stats", "sampled", logit_stats.logit_stats_rows, constants)
    one = sizes_of("prep")
    constants = {
        "D": D, "R": D, "Q_NORM": True, "K_NORM": True, "ROPE": 1, "BLOCK_T": one.rows,
        "BLOCK_D": block(D),
    }  # fmt: skip
    for variant, fn in (("forward", prep.prep_forward), ("backward", prep.prep_backward)):
        yield make("prep", variant, fn, constants, multiplies=False)


def configurations(target: int) -> list[Configuration]:
    """Every shipped one of an architecture: bf16 (fp16 has the same sizes) and fp32."""
    return [c for dtype in ("bf16", "fp32") for D in WIDTHS for c in _of_width(D, dtype, target)]


def _signature(c: Configuration) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    signature: dict[str, str] = {}
    constants, attributes = {}, {}
    by_pointer = {name: dtype for dtype, names in POINTERS.items() for name in names}
    for i, name in enumerate(c.kernel.arg_names):
        if name in c.constants:
            signature[name] = "constexpr"
            constants[(i,)] = c.constants[name]
            continue
        if name in FLOATS:
            signature[name] = "fp32"
            continue
        if name in TENSORS or name.endswith("_ptr"):
            signature[name] = "*" + by_pointer.get(name, c.dtype)
        else:
            signature[name] = "i32"
        if not signature[name].startswith("i") or re.search(r"_s[bht]$", name):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def measure(c: Configuration, target: int) -> dict[str, int]:
    """Compile and read the figures."""
    signature, constants, attributes = _signature(c)
    source = ASTSource(c.kernel, signature, constants, attributes)
    options = {"num_warps": c.tiles.warps, "num_stages": c.tiles.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        assembly = _run("nvdisasm", "-c", file.name)
    used = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", assembly, re.M))
    return {
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "spill_bytes": used["LOCAL"],
        "spill_instructions": counts["LDL"] + counts["STL"],
        "shared_bytes": int(compiled.metadata.shared),
        "tensor_core": sum(counts[name] for name in TENSOR_CORE[target]),
        "exp2": counts["MUFU"],
    }


def _run(tool: str, *arguments: str) -> str:
    ended = subprocess.run(
        [str(BINARIES / tool), *arguments], capture_output=True, text=True, check=True
    )
    return ended.stdout


def faults(name: str, target: int, multiplies: bool, figure: dict[str, int]) -> list[str]:
    """What no configuration may have, whatever the budget says."""
    found = []
    if figure["registers"] > MAX_REGISTERS:
        found.append(f"{figure['registers']} registers")
    if figure["spill_bytes"] or figure["spill_instructions"] or figure["stack_bytes"]:
        found.append(
            f"spills: {figure['spill_instructions']} instructions, stack {figure['stack_bytes']}"
        )
    if figure["shared_bytes"] > SHARED_LIMIT[target]:
        found.append(f"{figure['shared_bytes']} bytes of shared memory")
    if multiplies and not name.endswith("fp32") and figure["tensor_core"] == 0:
        found.append("no tensor-core instruction")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="accept the figures of now as the budget")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--target", type=int, action="append", help="80, 90 or 100; repeatable")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    options = parser.parse_args()
    stored = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    measured: dict[str, dict[str, int]] = {}
    bad = 0
    for target in options.target or TARGETS:
        for c in configurations(target):
            key = f"sm_{target} {c.name}"
            if options.only not in key:
                continue
            figure = measured[key] = measure(c, target)
            told = faults(c.name, target, c.multiplies, figure)
            budget = stored.get(key)
            if budget is None and not options.write:
                told.append("no budget is committed")
            elif budget is not None and triton.__version__ == stored["triton"]:
                told += [
                    f"{name} {budget[name]} -> {figure[name]}"
                    for name in ("registers", "shared_bytes")
                    if figure[name] > budget[name]
                ]
                if figure["tensor_core"] < budget["tensor_core"]:
                    told.append(f"tensor_core {budget['tensor_core']} -> {figure['tensor_core']}")
            bad += bool(told)
            if not options.json:
                line = "  ".join(f"{k} {v}" for k, v in figure.items())
                print(f"{key:55s} {line}  {'; '.join(told)}", flush=True)
            elif told:
                print(f"{key}: {'; '.join(told)}", file=sys.stderr)
    if options.json:
        print(json.dumps(measured, indent=1))
    if options.write:
        BUDGETS.write_text(
            json.dumps({"triton": triton.__version__} | stored | measured, indent=1) + "\n"
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

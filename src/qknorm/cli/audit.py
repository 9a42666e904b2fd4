"""`qknorm audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import qknorm
from qknorm.audit import SEVERITIES, Finding, Report
from qknorm.audit import audit as run_audit
from qknorm.audit.findings import plain_formula
from qknorm.audit.sarif import to_sarif
from qknorm.audit.targets import load
from qknorm.audit.weights import audit_weights
from qknorm.cli import options as o
from qknorm.cli.console import complain, out, print_json

STYLES = {"info": "cyan", "warning": "yellow", "error": "bold red"}


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a Hugging Face checkpoint, .gguf file, package.module:factory, or "
            ".safetensors file, of which only names, shapes and gains are seen."
        ),
    ],
    fail_on: Annotated[str, typer.Option(help="Lowest severity that makes exit code 1.")] = "warning",
    suppress: Annotated[
        list[str] | None, typer.Option(help="CODE=REASON of a finding that is known; repeatable.")
    ] = None,
    trained: Annotated[
        bool | None, typer.Option("--trained/--untrained", help="The weights come from training.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Read the weights of a checkpoint.")
    ] = True,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Of a GGUF file: look at names and gains, run nothing."),
    ] = False,
    sarif: Annotated[Path | None, typer.Option(help="Also write SARIF to this file.")] = None,
    as_json: o.AsJson = False,
) -> int:
    """Find the invisible mistakes of QK-norm in a model, by probing it.

    Exit code 0 if nothing was found at --fail-on or above, 1 if something was, 2 if nothing could be
    audited.
    """
    if fail_on not in SEVERITIES:
        raise ValueError(f"fail-on must be {', '.join(SEVERITIES)}; got {fail_on!r}")
    declared = dict(_declared(text) for text in suppress or [])
    path = Path(target)
    is_file = path.is_file() and (path.suffix != ".gguf" or weights_only)
    if is_file:
        report = audit_weights(path)
    else:
        model, inputs = load(target, weights=weights)
        is_trained = (path.exists() and weights) if trained is None else trained
        report = run_audit(model, inputs, trained=is_trained, suppress=declared)
    if sarif is not None:
        sarif.write_text(json.dumps(to_sarif(report, target, qknorm.__version__), indent=2) + "\n")
    found = report.at_least(fail_on)
    if as_json:
        print_json({"target": target, "fail_on": fail_on, "passed": not found} | report.to_json())
    else:
        show(report, target, len(found))
    if not report.formulas and not is_file:
        complain(f"no attention of {target} could be read back: {'; '.join(report.not_probed)}")
        return 2
    return int(bool(found))


def _declared(text: str) -> tuple[str, str]:
    code, _, reason = text.partition("=")
    if not reason:
        raise ValueError(f"suppress takes CODE=REASON; got {text!r}")
    return code, reason


def show(report: Report, target: str, failing: int) -> None:
    """Verdict first, then findings, formulas, and what was and was not done."""
    style = "bold red" if failing else "bold green"
    verdict = f"{failing} findings" if failing else "nothing found"
    out.print(Text.assemble((f"{target}: {verdict}", style)), soft_wrap=True)
    for group in _grouped(report.findings):
        one = group[0]
        where = _places(group)
        head = Text.assemble(
            (f"{one.code} {one.severity}", STYLES[one.severity]), f"  {one.message}{where}"
        )
        out.print(head, soft_wrap=True)
        if one.severity != "info":
            out.print(Text(f"      {one.why} {one.mend}", style="dim"), soft_wrap=True)
    for one, reason in report.suppressed:
        out.print(Text(f"{one.code} suppressed: {reason}", style="dim"), soft_wrap=True)
    if report.formulas:
        out.print(_formulas(report))
    out.print(Text("probed: " + "; ".join(report.exercised), style="dim"), soft_wrap=True)
    for sentence in report.not_probed:
        out.print(Text(f"not probed: {sentence}", style="yellow"), soft_wrap=True)


def _grouped(findings: list[Finding]) -> list[list[Finding]]:
    """The same finding of many layers together."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        key = (one.code, one.message if one.layer is None or one.code != "QK022" else "")
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _places(group: list[Finding]) -> str:
    layers = [one.layer for one in group if one.layer is not None]
    if not layers:
        return ""
    return f" ({layers[0]}" + (f" and {len(layers) - 1} more layers)" if len(layers) > 1 else ")")


def _formulas(report: Report) -> Table:
    """One line per kind of layer."""
    kinds: dict[str, list[str]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for path, formula in report.formulas.items():
        plain = {k: v for k, v in plain_formula(formula).items() if not k.endswith("_range")}
        key = str(
            {
                k: round(v, 3) if isinstance(v, float) and k != "eps" else v
                for k, v in plain.items()
                if k != "eps"
            }
        )
        kinds.setdefault(key, []).append(path)
        rows.setdefault(key, plain)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("layers", "norm", "over", "gain", "eps", "order", "RoPE", "scale", "heads", "mask"):
        table.add_column(title)
    for key, paths in kinds.items():
        f = rows[key]
        norms = f["q_norm"] if f["q_norm"] == f["k_norm"] else f"q {f['q_norm']}, k {f['k_norm']}"
        gains = f["gain"] if f["gain"] == f["k_gain"] else f"q {f['gain']}, k {f['k_gain']}"
        mask = ["causal"] if f["causal"] else []
        if f["window"] is not None:
            mask.append(f"window {f['window']}")
        if f["sink"]:
            mask.append("sink")
        if f["softcap"] is not None:
            mask.append(f"cap {f['softcap']:.3g}")
        table.add_row(
            str(len(paths)),
            str(norms),
            str(f["statistic"]),
            str(gains),
            "-" if f["eps"] is None else f"{f['eps']:.1e} {f['eps_place']}",
            str(f["order"]),
            "-" if f["rope"] is None else f"{f['rope']} {f['rotary_width']}",
            "?" if f["scale"] is None else f"{f['scale']:.4g}",
            f"{f['q_heads']}/{f['kv_heads']} x {f['head_dim']}",
            ", ".join(mask) or "-",
        )
    return table

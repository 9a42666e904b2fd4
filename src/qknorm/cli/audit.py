"""`qknorm audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

import qknorm
from qknorm.auditor import SEVERITIES, Report
from qknorm.auditor import audit as run_audit
from qknorm.auditor.findings import Severity
from qknorm.auditor.sarif import to_sarif
from qknorm.auditor.summary import COLUMNS, grouped, layer_kinds, places, verdict
from qknorm.auditor.targets import load, looks_trained, with_loading
from qknorm.auditor.weights import audit_weights
from qknorm.cli import options as o
from qknorm.cli.audit_page import to_html
from qknorm.cli.console import complain, out, print_json, say
from qknorm.cli.foreign import foreign
from qknorm.lab.printable import printable

STYLES = {"info": "cyan", "warning": "yellow", "error": "bold red"}


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="The folder of a Hugging Face checkpoint, a .gguf file, package.module:factory, or a "
            ".safetensors file. In a .safetensors file only names, shapes and gains are checked."
        ),
    ],
    fail_on: Annotated[
        str,
        typer.Option(
            help="Give the exit code 1 for a finding of this severity or above: info, warning or error."
        ),
    ] = "warning",
    suppress: Annotated[
        list[str] | None,
        typer.Option(help="Accept a finding, as in CODE=REASON. The option can be repeated."),
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            help="Report attention that differs from this, such as causal, window=32, norm=head or "
            "eps=1e-6. The option can be repeated."
        ),
    ] = None,
    trained: Annotated[
        bool | None,
        typer.Option(
            "--trained/--untrained",
            help="State whether the weights come from training. By default this is decided from the "
            "weights of a checkpoint.",
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights/--no-weights", help="Read the weights of a checkpoint, or use random ones."
        ),
    ] = True,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Check only names, shapes and gains of a GGUF file, and do not run it.",
        ),
    ] = False,
    sarif: Annotated[
        Path | None, typer.Option(help="Write the findings as SARIF to this file too.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as one offline HTML page to this file too.")
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(min=0, help="End with the exit code 2 after this many seconds. 0 sets no limit."),
    ] = 1800.0,
    as_json: o.AsJson = False,
) -> int:
    """Find mistakes of QK-norm that raise no error, by running a model with chosen values.

    The exit code is 0 if nothing of the severity --fail-on or above was found, 1 if something was, and 2
    if the model could not be audited.
    """
    if fail_on not in SEVERITIES:
        raise ValueError(f"fail-on must be {', '.join(SEVERITIES)}; got {fail_on!r}")
    declared = dict(_declared(text) for text in suppress or [])
    meant = {key: value or "yes" for key, _, value in (text.partition("=") for text in expect or [])}
    path = Path(target)
    is_file = path.is_file() and (path.suffix != ".gguf" or weights_only)
    with foreign(target, time_limit_s=time_limit):
        if is_file:
            report = audit_weights(path, expect=meant, suppress=declared)
        else:
            loaded = load(target, weights=weights)
            if trained is None:
                trained = path.exists() and weights and looks_trained(loaded.model)
            report = run_audit(
                loaded.model, loaded.inputs, trained=trained, expect=meant, suppress=declared
            )
            report = with_loading(report, loaded).suppressing(declared)
    found = report.at_least(fail_on)
    if as_json:
        print_json({"target": target, "fail_on": fail_on, "passed": not found} | report.to_json())
    else:
        show(report, target, fail_on)
    # The files are written after the report is printed, so that it is not lost if writing fails.
    if sarif is not None:
        sarif.write_text(json.dumps(to_sarif(report, target, qknorm.__version__), indent=2) + "\n")
    if html is not None:
        html.write_text(to_html(report, target, fail_on), encoding="utf-8")
    if not found and not report.formulas and not is_file:
        complain(
            f"the formula of no attention in {target} could be read: {'; '.join(report.not_probed)}"
        )
        return 2
    return int(bool(found))


def _declared(text: str) -> tuple[str, str]:
    code, _, reason = text.partition("=")
    if not reason:
        raise ValueError(f"suppress takes CODE=REASON; got {text!r}")
    return code, reason


def show(report: Report, target: str, fail_on: Severity) -> None:
    """Print the verdict, the findings, the formulas, what was probed and what was not.

    Args:
        report: the report.
        target: the name of the target.
        fail_on: the lowest severity of a finding that fails.
    """
    style = "bold red" if report.at_least(fail_on) else "bold green"
    say(verdict(report, target, fail_on), style)
    for group in grouped(report.findings):
        one = group[0]
        head = Text.assemble(
            (f"{one.code} {one.severity}", STYLES[one.severity]),
            printable(f"  {one.message}{places(group)}"),
        )
        out.print(head, soft_wrap=True)
        if one.severity != "info":
            say(f"      {one.why} {one.mend}", "dim")
    for one, reason in report.suppressed:
        say(f"{one.code} suppressed: {reason}", "dim")
    if report.formulas:
        # There are few kinds of layers, so with one column for each the table fits any terminal.
        kinds = layer_kinds(report)
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="dim")
        for _ in kinds:
            table.add_column(overflow="fold")
        for row in zip(COLUMNS, *kinds, strict=True):
            table.add_row(*row)
        out.print(table)
    say("probed: " + "; ".join(report.exercised), "dim")
    for sentence in report.not_probed:
        say(f"not probed: {sentence}", "yellow")

"""`qknorm report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qknorm.cli import options as o
from qknorm.cli.console import print_json, say
from qknorm.lab.files import REPORT_FILE
from qknorm.lab.report import words, write_report
from qknorm.lab.runs import find_runs, load_runs


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs or comparisons.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; report.html in the first folder.")
    ] = None,
    as_json: o.AsJson = False,
) -> int:
    """Write one offline HTML page about one or more runs: verdict, curves, heatmaps, environment."""
    runs = load_runs(find_runs(folders))
    path = write_report(runs, output or folders[0] / REPORT_FILE)
    summary = [run.final for run in runs if run.final is not None]
    if as_json:
        print_json({"report": str(path), "runs": summary})
    else:
        for sentence in words(summary):
            say(sentence)
        say(f"report: {path}")
    return 0

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
    fail_on: o.FailOn = None,
    as_json: o.AsJson = False,
) -> int:
    """Write one offline HTML page about one or more runs: verdict, curves, heatmaps, environment.

    A run is a folder or a log: of qknorm, or a trainer_state.json, a CSV or event files of TensorBoard.
    Exit code 0; with --fail-on 1 if a run has such an alert; 2 for bad input.
    """
    fails = o.failing(fail_on)
    runs = load_runs(find_runs(folders))
    where = folders[0] if folders[0].is_dir() else folders[0].parent
    path = write_report(runs, output or where / REPORT_FILE)
    summary = [run.final for run in runs if run.final is not None]
    if as_json:
        print_json({"report": str(path), "runs": summary})
    else:
        for sentence in words(summary):
            say(sentence)
        say(f"report: {path}")
    return fails([alert for run in runs for alert in run.findings])

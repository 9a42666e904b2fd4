"""`qknorm compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qknorm.cli import options as o
from qknorm.cli.console import RunProgress, err, number, out, print_json
from qknorm.lab.arms import ARMS
from qknorm.lab.compare import CompareConfig, sensitivities
from qknorm.lab.compare import compare as compare_runs
from qknorm.lab.files import REPORT_FILE
from qknorm.lab.report import words, write_report
from qknorm.lab.runs import load_runs
from qknorm.lab.trainer import TrainConfig
from qknorm.monitor.to.jsonl import Item

_ARMS_HELP = "Variant; repeat the option. " + " ".join(
    escape(f"{name}: {arm.help}.") for name, arm in ARMS.items()
)


@o.with_run_options
def compare(
    folder: Annotated[Path, typer.Argument(help="Folder of the comparison.")],
    arm: Annotated[list[str], typer.Option(help=_ARMS_HELP)] = ["none", "qk"],  # noqa: B006
    lr: Annotated[list[float], typer.Option(help="Peak learning rate; repeat.")] = [3e-2],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="Repeat for several.")] = [0],  # noqa: B006
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    *,
    base: TrainConfig,
) -> int:
    """Train twins that differ only in their attention, and say what happened.

    Writes a folder per run, `summary.json`, and `report.html`. Exit code 0 when all runs ended (a
    diverged one is a result), 1 if stopped, 2 for bad input.
    """
    config = CompareConfig(base=base, arms=tuple(arm), lrs=tuple(lr), seeds=tuple(seed))
    names = [name for name, _ in config.runs()]

    with RunProgress(quiet=as_json) as progress:

        def show(index: int, run: TrainConfig, item: Item) -> None:
            progress.update(index, names[index], run.steps, item)

        summary = compare_runs(config, folder, overwrite=overwrite, on_item=show)
    if summary is None:
        err.print("stopped; the runs so far are in the folder, without a summary", soft_wrap=True)
        if as_json:
            print_json({"stopped": True})
        return 1
    report = write_report(load_runs([folder / name for name in names]), folder / REPORT_FILE)
    if as_json:
        print_json({"runs": summary, "lr_sensitivity": sensitivities(summary), "report": str(report)})
        return 0
    out.print(_table(summary))
    for sentence in words(summary):
        out.print(sentence, soft_wrap=True)
    out.print(f"report: {report}", soft_wrap=True)
    return 0


def _table(summary: list[dict[str, Any]]) -> Table:
    table = Table(title="What became of the twins")
    for title in ("arm", "lr", "seed", "held-out loss", "max logit", "lowest layer entropy", "verdict"):
        table.add_column(title, justify="left" if title in ("arm", "verdict") else "right")
    for r in summary:
        table.add_row(
            r["arm"],
            f"{r['lr']:g}",
            str(r["seed"]),
            number(r["final_loss"]),
            number(r["max_logit"], 1),
            number(r["entropy_nats"]),
            Text("diverged", style="red") if r["diverged"] else "finished",
        )
    return table

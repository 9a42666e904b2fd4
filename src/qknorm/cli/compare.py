"""`qknorm compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qknorm.cli import options as o
from qknorm.cli.console import RunProgress, err, number, out, print_json, say
from qknorm.lab.arms import ARMS
from qknorm.lab.compare import CompareConfig, sensitivities
from qknorm.lab.compare import compare as compare_runs
from qknorm.lab.files import REPORT_FILE
from qknorm.lab.report import missing_extra, words, write_report
from qknorm.lab.runs import load_runs
from qknorm.lab.trainer import TrainConfig
from qknorm.monitor.to.jsonl import Item

_ARMS_HELP = "Train this variant of attention. The option can be repeated. " + " ".join(
    escape(f"{name}: {arm.help}.") for name, arm in ARMS.items()
)


@o.with_run_options
def compare(
    folder: Annotated[Path, typer.Argument(help="The folder of the comparison.")],
    arm: Annotated[list[str], typer.Option(help=_ARMS_HELP)] = ["none", "qk"],  # noqa: B006
    lr: Annotated[
        list[float], typer.Option(help="Train with this peak learning rate. The option can be repeated.")
    ] = [3e-2],  # noqa: B006
    seed: Annotated[
        list[int],
        typer.Option(help="Train with this seed of weights and batches. The option can be repeated."),
    ] = [0],  # noqa: B006
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    *,
    base: TrainConfig,
) -> int:
    """Train models that differ only in their attention, and compare the results.

    The command writes a folder for each run, `summary.json`, and the page `report.html` if the extra
    "report" of qknorm is installed. The exit code is 0 if all runs ended, even if some diverged, 1 if
    the command was stopped, and 2 for bad input.
    """
    config = CompareConfig(base=base, arms=tuple(arm), lrs=tuple(lr), seeds=tuple(seed))
    names = [name for name, _ in config.runs()]

    missing = missing_extra()
    if missing is not None:
        say(f"no page will be written, since {missing}", to=err)
    with RunProgress(quiet=as_json) as progress:

        def show(index: int, run: TrainConfig, item: Item) -> None:
            progress.update(index, names[index], run.steps, item)

        summary = compare_runs(config, folder, overwrite=overwrite, on_item=show)
    if summary is None:
        say("stopped; the folder holds the runs so far, without a summary", to=err)
        if as_json:
            print_json({"stopped": True})
        return 1
    report: Path | None = None
    failure: Exception | None = None
    if missing is None:
        try:
            report = write_report(load_runs([folder / name for name in names]), folder / REPORT_FILE)
        except (ValueError, OSError) as error:  # raised after the results are printed
            failure = error
    if as_json:
        page = None if report is None else str(report)
        print_json({"runs": summary, "lr_sensitivity": sensitivities(summary), "report": page})
    else:
        out.print(_table(summary))
        for sentence in words(summary):
            say(sentence)
        if report is not None:
            say(f"report: {report}")
    if failure is not None:
        raise failure
    return 0


def _table(summary: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("arm", overflow="fold")
    for title in ("lr", "seed", "held-out loss", "max logit", "lowest layer entropy"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for r in summary:
        table.add_row(
            r["arm"],
            f"{r['lr']:g}",
            str(r["seed"]),
            number(r["final_loss"]),
            number(r["max_logit"], 1),
            number(r["entropy_nats"]),
            Text(r["verdict"], style="" if r["verdict"] == "finished" else "red"),
        )
    return table

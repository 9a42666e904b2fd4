"""Where words, tables and progress go."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qknorm.lab.files import plain
from qknorm.monitor import Alert, Record
from qknorm.monitor.to.jsonl import Item

# Names and paths of users may hold brackets: no markup anywhere.
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    err.print(Text.assemble(("error: ", "bold red"), sentence), soft_wrap=True)


def print_json(value: Any) -> None:
    """Strict JSON on stdout."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: 3 decimals, or fewer when it is large."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


class _Reading(ProgressColumn):
    """The latest numbers of a run."""

    def render(self, task: Task) -> Text:
        return Text(_reading(task.fields))


def _reading(fields: dict[str, Any]) -> str:
    return (
        f"loss {number(fields.get('loss'))}  max logit {number(fields.get('max_logit'), 1)}  "
        f"entropy {number(fields.get('entropy_nats'))}  {fields.get('tokens_per_s', 0):.0f} tok/s"
    )


class RunProgress:
    """A live line per run: step, loss, max logit, lowest layer entropy, tokens/s, time left.

    On something that is not a terminal, prints a plain line every tenth of a run instead.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            _Reading(),
            TimeRemainingColumn(compact=True),
            console=err,
            disable=quiet or not err.is_terminal,
        )
        self._plain = not quiet and not err.is_terminal
        self._tasks: dict[int, Any] = {}
        self._fields: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, index: int, title: str, steps: int, item: Item) -> None:
        """Show what run number `index` has logged."""
        if index not in self._tasks:
            self._tasks[index] = self._progress.add_task(title, total=steps)
            self._fields[index] = {}
        fields = self._fields[index]
        if isinstance(item, Alert):
            self._say(title, item)
        elif isinstance(item, Record):
            fields |= {"max_logit": item.max_logit, "entropy_nats": item.entropy_nats}
        elif item["kind"] == "step":
            fields |= item
            self._step(index, title, steps, item["step"])

    def _step(self, index: int, title: str, steps: int, step: int) -> None:
        fields = self._fields[index]
        self._progress.update(self._tasks[index], completed=step, **fields)
        if self._plain and (step % max(1, steps // 10) == 0 or step == steps):
            err.print(f"{title}  step {step}/{steps}  {_reading(fields)}", soft_wrap=True)

    def _say(self, title: str, alert: Alert) -> None:
        """Alarms above the progress; the rest is in the log."""
        if alert.severity == "alarm" and (self._plain or not self._progress.disable):
            what = f"{title}  alarm {alert.code} at step {alert.step}: {alert.message}."
            what += f" {alert.advice}" if alert.is_first else ""
            err.print(Text(what, style="bold red"), soft_wrap=True)

"""Print sentences, tables, JSON and progress."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from qknorm.lab.files import plain
from qknorm.lab.printable import printable
from qknorm.monitor import Alert, Record
from qknorm.monitor.to.jsonl import Item


class _Console(Console):
    """A console that spells out characters that do not print, since names may come from others.

    A closed pipe raises BrokenPipeError, whereas rich would end the process.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render and spell out. Escapes of rich are control segments or are added later as styles."""
        for segment in super().render(renderable, options):
            if not segment.control:
                lines = map(printable, segment.text.split("\n"))
                segment = segment._replace(text="\n".join(lines))
            yield segment

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, and print nothing after that."""
        self.quiet = True
        raise BrokenPipeError


# Markup and emoji are off, because names and paths may hold brackets and colons.
out = _Console(highlight=False, markup=False, emoji=False)
err = _Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(sentence: str, style: str = "", *, to: Console = out) -> None:
    """Print a sentence in one line, without wrapping it.

    Args:
        sentence: the sentence.
        style: a style of rich.
        to: the console.
    """
    to.print(Text(printable(sentence), style=style), soft_wrap=True)


def complain(sentence: str) -> None:
    """Print a sentence about an error on stderr."""
    err.print(Text.assemble(("error: ", "bold red"), printable(sentence)), soft_wrap=True)


class _Warnings(logging.Handler):
    """Prints warnings that qknorm logs, such as one about a damaged line of a log."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}", "yellow", to=err)


@contextmanager
def only_our_words() -> Iterator[None]:
    """Print the warnings that qknorm logs, and hide Python warnings, which are meant for programmers.

    `python -W default -m qknorm` shows the Python warnings too.
    """
    logger, handler = logging.getLogger("qknorm"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)


def print_json(value: Any) -> None:
    """Print a value as strict JSON on stdout."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for reading: with `digits` decimals, or fewer if it is large; "-" for None."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


class _Reading(ProgressColumn):
    """A column with the newest numbers of a run."""

    def render(self, task: Task) -> Text:
        return Text(_reading(task.fields))


def _reading(fields: dict[str, Any]) -> str:
    return (
        f"loss {number(fields.get('loss'))}  max logit {number(fields.get('max_logit'), 1)}  "
        f"entropy {number(fields.get('entropy_nats'))}  {fields.get('tokens_per_s', 0):.0f} tok/s"
    )


class RunProgress:
    """A live line for each run with its step, loss, max logit, entropy, tokens per second and time left.

    If stderr is not a terminal, a line is printed after each tenth of a run instead.

    Args:
        quiet: whether to print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
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
        """Show an item that a run has logged.

        Args:
            index: number of the run.
            title: title of the run.
            steps: number of steps of the run.
            item: the item.
        """
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
            say(f"{title}  step {step}/{steps}  {_reading(fields)}", to=err)

    def _say(self, title: str, alert: Alert) -> None:
        """Print an alarm above the progress. Other alerts are only in the log."""
        if alert.severity == "alarm" and (self._plain or not self._progress.disable):
            what = f"{title}  alarm {alert.code} at step {alert.step}: {alert.message}."
            what += f" {alert.advice}" if alert.is_first else ""
            say(what, "bold red", to=err)

"""Where words, tables and progress go."""

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
    """A console for names that others chose: what does not print in them is spelled out.

    What a closed pipe means is left to the caller, where rich would end the process.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does. Its own escapes are control segments, or styles that it adds later."""
        for segment in super().render(renderable, options):
            if not segment.control:
                lines = map(printable, segment.text.split("\n"))
                segment = segment._replace(text="\n".join(lines))
            yield segment

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, and print nothing from here on."""
        self.quiet = True
        raise BrokenPipeError


# Names and paths may hold brackets and colons, which mean nothing: no markup and no emoji.
out = _Console(highlight=False, markup=False, emoji=False)
err = _Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(sentence: str, style: str = "", *, to: Console = out) -> None:
    """Print one line, however long it is and whatever the names in it hold."""
    to.print(Text(printable(sentence), style=style), soft_wrap=True)


def complain(sentence: str) -> None:
    """Print one sentence on stderr."""
    err.print(Text.assemble(("error: ", "bold red"), printable(sentence)), soft_wrap=True)


class _Warnings(logging.Handler):
    """Prints the warnings of this project, such as a damaged line of a log."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}", "yellow", to=err)


@contextmanager
def only_our_words() -> Iterator[None]:
    """Print what this project warns of, and none of the warnings that its libraries give to programmers.

    `python -W default -m qknorm` shows those too.
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
            say(f"{title}  step {step}/{steps}  {_reading(fields)}", to=err)

    def _say(self, title: str, alert: Alert) -> None:
        """Alarms above the progress; the rest is in the log."""
        if alert.severity == "alarm" and (self._plain or not self._progress.disable):
            what = f"{title}  alarm {alert.code} at step {alert.step}: {alert.message}."
            what += f" {alert.advice}" if alert.is_first else ""
            say(what, "bold red", to=err)

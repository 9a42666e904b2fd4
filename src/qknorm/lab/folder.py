"""Write the folder of a run: settings, log, checkpoints and TensorBoard. Only the first rank writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from qknorm.lab import checkpoint, environment, files
from qknorm.monitor.alerts import Alerts
from qknorm.monitor.record import Record
from qknorm.monitor.to.jsonl import Item, JsonLines, read_lines, to_record
from qknorm.monitor.to.trackers import TensorBoard

OnItem = Callable[[Item], None]


def is_first_rank() -> bool:
    """Whether this process is the first rank, or runs alone."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class RunFolder:
    """The folder of a run that is being trained.

    Args:
        folder: the folder, which is created if needed.
        config: the configuration of the run as plain values, which is saved.
        resume_after: the number of steps after which the run in the folder is continued; None deletes
            that run and starts a new one.
        tensorboard: whether to write event files too.
        on_item: called with each record, alert and line after it was written. After it raises a
            BrokenPipeError it is not called again, and `is_unheard` is true.

    Attributes:
        is_unheard: whether `on_item` has raised a BrokenPipeError.

    Raises:
        ValueError: a run is going on in the folder.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        resume_after: int | None,
        tensorboard: bool,
        on_item: OnItem,
    ) -> None:
        self.path = folder / files.CHECKPOINT_FILE
        self.writes = is_first_rank()
        self.is_unheard = False
        if not self.writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lock = folder, files.lock(folder)
        try:
            self._open(config, resume_after, tensorboard)
        except BaseException:
            files.unlock(folder, self.lock)
            raise
        self.on_item = on_item
        self.to.append(self._say)

    def _open(self, config: dict[str, Any], resume_after: int | None, tensorboard: bool) -> None:
        folder = self.folder
        if resume_after is None:
            files.remove_run(folder)
        files.replace_json(folder / files.CONFIG_FILE, config)
        files.replace_json(folder / files.ENVIRONMENT_FILE, environment.describe())
        self.log = JsonLines(folder / files.METRICS_FILE, resume_after=resume_after)
        self.alerts = Alerts(last_step=config["steps"])
        lines = read_lines(self.log.path)
        self.alerts.replay(to_record(line) for line in lines if line["kind"] == "record")
        self.to: list[OnItem] = [self.log]
        self.board = None
        if tensorboard:
            again = None if resume_after is None else resume_after + 1
            self.board = summary_writer()(str(folder / files.TENSORBOARD_FOLDER), purge_step=again)
            self.to.append(self._scalars)

    def put(self, item: Item) -> None:
        """Write an item. If it is a record, write the new alerts that follow from it too."""
        if not self.writes:
            return
        for send in self.to:
            send(item)
        if isinstance(item, Record):
            for alert in self.alerts(item):
                self.put(alert)

    def _say(self, item: Item) -> None:
        if self.is_unheard:
            return
        try:
            self.on_item(item)
        except BrokenPipeError:  # the process that read the output of the command has ended
            self.is_unheard = True

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint.

        Raises:
            checkpoint.NotFiniteError: a tensor is not finite. Every rank raises it.
        """
        if self.writes:
            checkpoint.save(state, self.path)
        else:
            checkpoint.check_finite(state)

    def close(self, *, ended: bool = False) -> None:
        """Close all files and release the lock.

        Args:
            ended: whether the run is over, which is then written to the log.
        """
        if self.writes and not self.lock.closed:
            self.log.close(ended=ended)
            if self.board is not None:
                self.board.close()
            files.unlock(self.folder, self.lock)

    def _scalars(self, item: Item) -> None:
        assert self.board is not None
        if not isinstance(item, dict):
            TensorBoard(self.board)(item)
        elif item["kind"] == "step":
            for name, value in item.items():
                if isinstance(value, float) and math.isfinite(value):
                    self.board.add_scalar(name, value, item["step"])


def summary_writer() -> Any:
    """Return the class of TensorBoard's writer.

    Raises:
        ValueError: the extra is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard needs an extra: pip install 'qknorm[tensorboard]'") from error
    return SummaryWriter

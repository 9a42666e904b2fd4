"""What every integration does: a monitor, its alerts, and a file per rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from qknorm.monitor import Monitor
from qknorm.monitor.alerts import Alert, Alerts, Thresholds
from qknorm.monitor.record import Record
from qknorm.monitor.scalars import scalars
from qknorm.monitor.to.jsonl import JsonLines, rank_path, read_lines, to_record
from qknorm.monitor.to.log_line import log_line

Destination = Callable[[Any], None]  # of records and alerts


class Session:
    """A watched training run.

    Args:
        model: or the parts of a pipelined model.
        folder: of the file `attention.rank*.jsonl`; None for no file.
        every, rows, tensor_parallel: see `Monitor.attach`.
        thresholds: when a rule speaks.
        to: called on rank 0 with each record and alert, such as `Wandb`.
        step: optimizer steps done already; what a file holds of later ones is dropped.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: str | os.PathLike[str] | None,
        *,
        every: int = 10,
        rows: int | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
        thresholds: Thresholds | None = None,
        to: Iterable[Destination] = (),
        step: int = 0,
    ) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.latest: dict[str, float] = {}
        self.alarm: Alert | None = None
        self.alerts = Alerts(thresholds=thresholds or Thresholds())
        self.file: JsonLines | None = None
        self.monitor = Monitor.attach(model, every=every, rows=rows, tensor_parallel=tensor_parallel)
        self.monitor.load_state_dict({"step_count": step})
        destinations: list[Destination] = []
        if folder is not None:
            self.file = JsonLines(rank_path(folder, rank), resume_after=step - 1 if step else None)
            lines = read_lines(self.file.path)
            self.alerts.replay(to_record(line) for line in lines if line["kind"] == "record")
            destinations.append(self.file)
        if rank == 0:
            destinations += to
        self.monitor.to += [*destinations, self.alerts]
        self.alerts.to += [self._note, *destinations] + ([log_line] if rank == 0 else [])

    def step(self) -> dict[str, float]:
        """End an optimizer step, on every rank; the newest capped scalars of training and evaluation."""
        for record in self.monitor.step():
            self._take(record)
        return self.latest

    def _take(self, record: Record) -> None:
        self.latest = self.latest | scalars(record)

    def _note(self, alert: Alert) -> None:
        if alert.severity == "alarm":
            self.alarm = self.alarm or alert

    def close(self, *, failed: bool = False) -> None:
        """Leave the model as it was found and finish the file; on every rank, unless one has failed."""
        if not failed:
            self.monitor.flush()
        self.monitor.detach()
        if self.file is not None:
            self.file.close()
            self.file = None

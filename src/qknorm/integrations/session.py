"""What every integration does: a monitor, its alerts, and a file per rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from qknorm.monitor import Monitor
from qknorm.monitor.alerts import Alert, Alerts
from qknorm.monitor.history import LENGTH
from qknorm.monitor.rules import Thresholds
from qknorm.monitor.scalars import scalars
from qknorm.monitor.to.delivery import Destination, destinations
from qknorm.monitor.to.jsonl import JsonLines, rank_path, read_lines, to_record
from qknorm.monitor.to.log_line import log_line

REPLAYED = 2 * LENGTH  # records from which alerts go on


class Session:
    """A watched training run.

    Args:
        model: or the parts of a pipelined model.
        folder: of the file `attention.rank*.jsonl`; None for no file.
        every, sample, tensor_parallel: see `Monitor.attach`.
        thresholds: when a rule speaks.
        to: called on rank 0 with each record and alert, such as `Wandb`.
        step: optimizer steps done already.
        last_step: at which the training ends; None if that is not known.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: str | os.PathLike[str] | None,
        *,
        every: int = 10,
        sample: int | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
        thresholds: Thresholds | None = None,
        to: Iterable[Destination] = (),
        step: int = 0,
        last_step: int | None = None,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.folder = folder
        self.latest: dict[str, float] = {}
        self.alarm: Alert | None = None
        self.alerts = Alerts(thresholds=thresholds or Thresholds(), last_step=last_step)
        self.file: JsonLines | None = None
        self.destinations = destinations(to) if self.rank == 0 else []
        self.has_begun = False
        self.monitor = Monitor.attach(model, every=every, sample=sample, tensor_parallel=tensor_parallel)
        self.monitor.load_state_dict({"step_count": step})

    def step(self) -> dict[str, float]:
        """End an optimizer step, on every rank; the newest capped scalars of training and evaluation."""
        if not self.has_begun:
            self._begin()
        for record in self.monitor.step():
            self.latest = self.latest | scalars(record)
        return self.latest

    def _begin(self) -> None:
        """Open the file: only now is it known for certain which step comes first."""
        self.has_begun = True
        if self.folder is not None:
            done = self.monitor.step_count
            self.file = JsonLines(
                rank_path(self.folder, self.rank), resume_after=done - 1 if done else None
            )
            lines = [line for line in read_lines(self.file.path) if line["kind"] == "record"]
            self.alerts.replay(map(to_record, lines[-REPLAYED:]))
            self.destinations.insert(0, self.file)
        self.monitor.to += self.destinations
        if self.rank == 0:
            self.monitor.to.append(self.alerts)
        self.alerts.to += [self._note, *self.destinations, log_line]

    def _note(self, alert: Alert) -> None:
        if alert.severity == "alarm":
            self.alarm = self.alarm or alert

    def has_alarm(self) -> bool:
        """Whether there was an alarm, which rank 0 knows; to be asked on every rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.alarm is not None
        found = [self.alarm is not None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def close(self, *, failed: bool = False, flush: bool = True) -> None:
        """Leave the model as it was found and finish the file.

        With `flush` what was seen since the last step is recorded, for which every rank has to come
        here. Where that is not certain, leave it out: nothing else waits for another rank.
        """
        if flush and not failed and self.has_begun:
            self.monitor.flush()
        self.monitor.detach(failed=failed)
        if self.file is not None:
            self.file.close(ended=not failed)


class Watcher:
    """What the callbacks of trainers share: their options, and one session at a time.

    Args:
        every: optimizer steps between observed ones.
        sample: queries looked at; None for all. See `Monitor.attach`.
        folder: of the JSON lines; None for where the trainer writes.
        thresholds: when a rule speaks.
        stop_on_alarm: end the training at the first alarm.
        to: called on rank 0 with each record and alert.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        sample: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        thresholds: Thresholds | None = None,
        stop_on_alarm: bool = False,
        to: Iterable[Destination] = (),
    ) -> None:
        self.every, self.sample, self.folder = every, sample, folder
        self.thresholds, self.stop_on_alarm, self.to = thresholds, stop_on_alarm, destinations(to)
        self.session: Session | None = None

    def begin(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str] | None,
        step: int,
        *,
        last_step: int | None = None,
    ) -> None:
        """Attach. A training before that failed may not have detached."""
        self.end(failed=True)
        self.session = Session(
            model,
            folder if self.folder is None else self.folder,
            every=self.every,
            sample=self.sample,
            thresholds=self.thresholds,
            to=self.to,
            step=step,
            last_step=last_step,
        )

    def must_stop(self) -> bool:
        """Whether an alarm ends the training; to be asked on every rank."""
        return self.stop_on_alarm and self.session is not None and self.session.has_alarm()

    def end(self, *, failed: bool = False) -> None:
        """Detach, if anything is attached."""
        if self.session is not None:
            self.session.close(failed=failed)
            self.session = None

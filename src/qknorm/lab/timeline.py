"""Read a log, of the lab or of any monitor, into losses, attention records and alerts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qknorm.lab.files import METRICS_FILE
from qknorm.lab.finished_logs import find_finished_log, is_finished_log, read_finished_log
from qknorm.lab.losses import loss_alerts
from qknorm.lab.verdict import SUMMARY_KEYS
from qknorm.monitor.alerts import Alert, Alerts
from qknorm.monitor.record import Record
from qknorm.monitor.to import jsonl


def log_file(run: Path) -> Path | None:
    """Find the log of a run.

    Our own logs come before those of other tools. Records are merged over ranks before they are written,
    so the file of any rank holds all of them.

    Args:
        run: the folder of a run, or a log.

    Returns:
        The log, or that of the first rank if there are several; None if there is none.
    """
    if run.is_file():
        return run
    if (run / METRICS_FILE).is_file():
        return run / METRICS_FILE
    return min(run.glob(jsonl.RANK_FILES), default=None) or find_finished_log(run)


@dataclass(kw_only=True)
class Timeline:
    """The lines that a run has logged so far.

    Attributes:
        steps: the lines of the trainer, one for each step. Only the lab writes them.
        records: the records of attention in training, oldest first.
        evaluation: the record of the newest evaluation; None without one.
        alerts: the alerts, oldest first.
        final: the line with the results of a run of the lab; None before it ends.
        has_ended: whether the log states that the run has ended.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    evaluation: Record | None = None
    alerts: list[Alert] = field(default_factory=list)
    final: dict[str, Any] | None = None
    has_ended: bool = False

    def read(self, path: Path) -> None:
        """Take in a whole log. Alerts of a log of another tool are made now, since it holds none.

        Raises ValueError for a log of another tool that cannot be read.
        """
        is_finished = is_finished_log(path)
        for line in read_finished_log(path) if is_finished else jsonl.read_lines(path):
            self.feed(line)
        if is_finished:
            alerts = Alerts(last_step=self.step)
            self.alerts += [alert for record in self.records for alert in alerts(record)]
            self.has_ended = True

    def feed(self, line: dict[str, Any]) -> None:
        """Add one line of the log. A line of an unknown kind is ignored."""
        kind = line["kind"]
        if kind == "step":
            self.steps.append(line)
        elif kind == "record":
            record = jsonl.to_record(line)
            if record.layers and record.phase == "train":
                self.records.append(record)
            elif record.layers:
                self.evaluation = record
        elif kind == "alert":
            self.alerts.append(jsonl.to_alert(line))
        elif kind == "final" and line.keys() >= set(SUMMARY_KEYS):
            self.final = line
        self.has_ended = kind in jsonl.CLOSING or (self.has_ended and kind != "start")

    @property
    def findings(self) -> list[Alert]:
        """The alerts, and what the losses say by themselves."""
        return self.alerts + loss_alerts(self.steps, self.final, has_ended=self.has_ended)

    @property
    def step(self) -> int:
        """The number of the newest step; -1 before the first."""
        newest = [line["step"] for line in self.steps[-1:]] + [r.step for r in self.records[-1:]]
        return max(newest, default=-1)

    @property
    def loss(self) -> float | None:
        """The loss of the newest step; None if it has none."""
        return self.steps[-1].get("loss") if self.steps else None

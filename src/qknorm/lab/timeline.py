"""A log, line by line, as losses, attention records and alerts: of the lab or of any monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qknorm.lab.files import METRICS_FILE
from qknorm.lab.verdict import SUMMARY_KEYS
from qknorm.monitor.alerts import Alert
from qknorm.monitor.record import Record
from qknorm.monitor.to import jsonl


def log_file(folder: Path) -> Path | None:
    """The log in a run folder, that of the first rank where there are several; None if there is none.

    Records are merged over ranks before they are written, so any one file has all of them.
    """
    if (folder / METRICS_FILE).is_file():
        return folder / METRICS_FILE
    return min(folder.glob(jsonl.RANK_FILES), default=None)


@dataclass(kw_only=True)
class Timeline:
    """What a run has logged so far.

    Attributes:
        steps: the lines of the trainer, one for each step; only the lab has them.
        records: attention in training, oldest first.
        evaluation: attention in the newest evaluation.
        alerts: as they were given.
        final: how a run of the lab came out.
        has_ended: whether the run said so.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    evaluation: Record | None = None
    alerts: list[Alert] = field(default_factory=list)
    final: dict[str, Any] | None = None
    has_ended: bool = False

    def feed(self, line: dict[str, Any]) -> None:
        """Take in one line; kinds that are not known are passed over."""
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
    def step(self) -> int:
        """The newest step, -1 before the first."""
        newest = [line["step"] for line in self.steps[-1:]] + [r.step for r in self.records[-1:]]
        return max(newest, default=-1)

    @property
    def loss(self) -> float | None:
        """The newest one."""
        return self.steps[-1].get("loss") if self.steps else None

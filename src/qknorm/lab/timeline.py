"""A log, line by line, as attention records, losses and alerts: of the lab or of any monitor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qknorm.lab.files import METRICS_FILE
from qknorm.monitor.alerts import Alert
from qknorm.monitor.record import LayerRecord, Record
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
        records: attention in training, oldest first.
        losses: (step, loss) of every step that has one.
        alerts: as they were given.
        final: the last line of a finished run of the lab.
        has_ended: whether the run said so.
    """

    records: list[Record] = field(default_factory=list)
    losses: list[tuple[int, float | None]] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    final: dict[str, Any] | None = None
    has_ended: bool = False

    def feed(self, line: dict[str, Any]) -> None:
        """Take in one line; kinds that are not known are passed over."""
        kind = line.get("kind")
        if kind == "step":
            self.losses.append((line["step"], line["loss"]))
            if "layers" in line:
                self.records.append(lab_record(line))
        elif kind == "record" and line["phase"] == "train":
            record = jsonl.to_record(line)
            if record.layers:
                self.records.append(record)
        elif kind == "end":
            self.has_ended = True
        elif kind == "alert":
            self.alerts.append(to_alert(line))
        elif kind == "final":
            self.final, self.has_ended = line, True

    @property
    def step(self) -> int:
        """The newest step, -1 before the first."""
        steps = [self.losses[-1][0]] if self.losses else []
        return max([*steps, *(record.step for record in self.records[-1:])], default=-1)


def lab_record(line: dict[str, Any], phase: str = "train") -> Record:
    """A line of the lab, whose layers are numbered and whose RMS was not taken."""
    table = line["layers"]
    layers = {}
    for i, tops in enumerate(table["max_logit"]):
        bound = None if table["bound"] is None else _worst(table["bound"][i])
        layers[str(i)] = LayerRecord(
            max_logit=_numbers(tops),
            entropy_nats=_numbers(table["entropy_nats"][i]),
            entropy_ratio=_numbers(table["entropy_ratio"][i]),
            sink_mass=_numbers(table["sink_mass"][i]),
            first_mass=None,
            q_rms=[],
            q_rms_cv=[],
            k_rms=[],
            k_rms_cv=[],
            gain_max=None,
            bound=bound,
            coverage="exact",
            rms_of="projection",
            rows=0,
        )
    return Record(step=line.get("step", line.get("steps", 0)), phase=phase, layers=layers)


def _numbers(values: Any) -> list[float]:
    """A tensor, or a list in which null stands for what is not finite."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [math.nan if v is None else float(v) for v in values]


def _worst(values: Any) -> float | None:
    if values is None:
        return None
    numbers = _numbers(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def to_alert(line: dict[str, Any]) -> Alert:
    """A line of kind "alert"."""
    names = ("code", "severity", "step", "layer", "head", "message", "evidence")
    return Alert(**{name: line[name] for name in names})

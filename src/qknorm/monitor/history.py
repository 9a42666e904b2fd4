"""The recent past of every layer, as the rules need it."""

from __future__ import annotations

from dataclasses import dataclass, field

from qknorm.monitor.record import LayerRecord, Record

LENGTH = 48  # records


@dataclass(kw_only=True)
class LayerHistory:
    """One layer: its steps and records, oldest first, at most LENGTH of each."""

    steps: list[int] = field(default_factory=list)
    records: list[LayerRecord] = field(default_factory=list)

    @property
    def last(self) -> LayerRecord:
        """The newest record."""
        return self.records[-1]


@dataclass(kw_only=True)
class History:
    """All layers, in training."""

    layers: dict[str, LayerHistory] = field(default_factory=dict)
    step: int = -1
    silent: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Take in a training record."""
        self.step, self.silent = record.step, record.silent
        for name, layer in record.layers.items():
            kept = self.layers.setdefault(name, LayerHistory())
            if kept.records and len(kept.last.max_logit) != len(layer.max_logit):
                kept.steps.clear()
                kept.records.clear()
            kept.steps.append(record.step)
            kept.records.append(layer)
            del kept.steps[:-LENGTH], kept.records[:-LENGTH]

"""The recent past of every layer, as the rules need it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from qknorm.monitor.record import LayerRecord, Record

LENGTH = 48  # records


class Growth(NamedTuple):
    """How much q and k of a layer have grown.

    Attributes:
        step: since when.
        head: the query head whose q and k these are; None for the gains of the layer's norm.
        q, k: the newest size divided by that at `step`.
    """

    step: int
    head: int | None
    q: float
    k: float


@dataclass(kw_only=True)
class LayerHistory:
    """One layer: its steps and records, oldest first, at most LENGTH of each."""

    steps: list[int] = field(default_factory=list)
    records: list[LayerRecord] = field(default_factory=list)

    @property
    def last(self) -> LayerRecord:
        """The newest record."""
        return self.records[-1]

    def growth(self) -> Growth | None:
        """How much q and k have grown since the oldest record that tells it; None if none does.

        The measure is the largest gain where the gains of a norm are known, and else the RMS of the head
        that now has the largest logit.
        """
        last = self.last
        head = None if last.gain_max is not None else last.worst_head
        now = _sizes(last, head)
        if now is None:
            return None
        for step, record in zip(self.steps[:-1], self.records[:-1], strict=True):
            then = _sizes(record, head)
            if then is not None and record.rms_of == last.rms_of:
                return Growth(step, head, now[0] / then[0], now[1] / then[1])
        return None


def _sizes(layer: LayerRecord, head: int | None) -> tuple[float, float] | None:
    """The largest gains of q and of k, or the RMS of a head; None where they do not tell the size."""
    if head is None:
        sizes = layer.gain_max
    elif not layer.q_rms or not layer.k_rms or (layer.is_normed and layer.rms_of == "projection"):
        sizes = None  # what a norm gets is not what is multiplied
    else:
        sizes = layer.q_rms[head], layer.k_rms[head * len(layer.k_rms) // len(layer.q_rms)]
    return sizes if sizes is not None and all(0 < size < math.inf for size in sizes) else None


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

"""A record as a few scalars and two heatmaps, whatever the size of the model.

A model of 64 layers with 64 heads has some 40 000 numbers a step; a tracker gets about twenty: the
extremes, quantiles over heads, and the worst heads by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from qknorm.monitor.record import Record, lowest

WORST = 4
QUANTILES = (0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class WorstHead:
    """One of the heads with the largest logits."""

    layer: str
    head: int
    max_logit: float
    entropy_ratio: float

    @property
    def name(self) -> str:
        """As alerts name it."""
        return f"{self.layer or 'the model itself'} head {self.head}"


def worst_heads(record: Record, count: int = WORST) -> list[WorstHead]:
    """The heads with the largest logits, NaN before all."""
    heads = [
        WorstHead(layer=name, head=head, max_logit=top, entropy_ratio=layer.entropy_ratio[head])
        for name, layer in record.layers.items()
        for head, top in enumerate(layer.max_logit)
    ]
    return sorted(heads, key=lambda h: -math.inf if math.isnan(h.max_logit) else -h.max_logit)[:count]


def scalars(record: Record, count: int = WORST) -> dict[str, float]:
    """Names are `attention/...`, those of an evaluation `attention_eval/...`."""
    layers = list(record.layers.values())
    if not layers:
        return {}
    group = _group(record)
    tops = [v for layer in layers for v in layer.seen("max_logit")]
    ratios = [v for layer in layers for v in layer.seen("entropy_ratio")]
    if not tops:
        return {}
    found = {
        "max_logit": record.max_logit,
        "entropy_nats_mean": fmean(v for layer in layers for v in layer.seen("entropy_nats")),
        "entropy_nats_lowest_layer": record.entropy_nats,
        "entropy_ratio_min": lowest(ratios),
    }
    for share in QUANTILES:
        found[f"max_logit_p{100 * share:.0f}"] = _quantile(tops, share)
        found[f"entropy_ratio_p{100 * (1 - share):.0f}"] = _quantile(ratios, 1 - share)
    masses = {
        "sink_mass": [v for layer in layers if layer.sink_mass for v in layer.seen("sink_mass")],
        "first_mass": [v for layer in layers if layer.first_mass for v in layer.seen("first_mass")],
    }
    for name, values in masses.items():
        if values:
            found |= {f"{name}_mean": fmean(values), f"{name}_max": max(values)}
    bounds = [layer.bound for layer in layers if layer.bound is not None]
    if bounds:
        found["bound"] = max(bounds)
    for place, head in enumerate(worst_heads(record, count), start=1):
        found[f"worst_{place}/max_logit"] = head.max_logit
        found[f"worst_{place}/entropy_ratio"] = head.entropy_ratio
    return {f"{group}/{name}": value for name, value in found.items()}


def names(record: Record, count: int = WORST) -> dict[str, str]:
    """Which heads the `worst_1`, ... of `scalars` are, for trackers that keep words."""
    group = _group(record)
    heads = worst_heads(record, count)
    return {f"{group}/worst_{place}/head": head.name for place, head in enumerate(heads, start=1)}


def _group(record: Record) -> str:
    return "attention" if record.phase == "train" else f"attention_{record.phase}"


def heatmap(record: Record, name: str) -> list[list[float]]:
    """`[layers][heads]` of "max_logit" or "entropy_ratio"; layers with fewer heads end in NaN."""
    rows: list[list[float]] = [getattr(layer, name) for layer in record.layers.values()]
    width = max(map(len, rows), default=0)
    return [row + [math.nan] * (width - len(row)) for row in rows]


def _quantile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed; NaN if any is NaN."""
    if any(math.isnan(v) for v in values):
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1 if share > 0 else 0)]

"""Records made by hand."""

from __future__ import annotations

from typing import Any

from qknorm.monitor import LayerRecord, Record


def layer(max_logit: list[float], ratio: list[float] | None = None, **other: Any) -> LayerRecord:
    """A layer with these maxima; the rest is unremarkable."""
    heads = len(max_logit)
    values: dict[str, Any] = {
        "max_logit": max_logit,
        "entropy_nats": [2.0] * heads,
        "entropy_ratio": ratio or [0.5] * heads,
        "sink_mass": None,
        "first_mass": [0.1] * heads,
        "q_rms": [1.0] * heads,
        "q_rms_cv": [0.1] * heads,
        "k_rms": [1.0] * heads,
        "k_rms_cv": [0.1] * heads,
        "gain_max": None,
        "bound": None,
        "coverage": "exact",
        "rms_of": "product",
        "rows": 100,
    }
    return LayerRecord(**values | other)


def record(step: int, layers: dict[str, LayerRecord], **other: Any) -> Record:
    """A training record."""
    return Record(**{"step": step, "phase": "train", "layers": layers} | other)

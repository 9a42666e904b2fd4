"""When will a growing max logit reach a level?

A line is laid through the logarithms of the newest POINTS values; its slope is the median of the slopes
between all pairs of points (Theil 1950; Sen 1968), which one or two outliers do not move. The constants
were chosen on the corpus of `benchmarks/early_warning.py`, which prints how many forecasts came true;
docs/monitor.md says how they were chosen and how far a forecast can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

POINTS = 6  # that the line goes through
# Below this share of the level nothing is forecast: healthy heads grow as fast there, and then stop.
FROM = 0.7
RISING = 0.8  # share of the pairs of points that have to rise
FURTHEST = 0.5  # how far a forecast looks ahead, as a share of the steps that the points span
# The interval: these multiples of the steps that the line itself takes to the level.
EARLY, LATE = 0.3, 2.5


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The level will be reached after step `early - 1` and not after step `late`."""

    level: float
    early: int
    late: int


def forecast(
    steps: Sequence[int],
    values: Sequence[float],
    level: float,
    *,
    bound: float | None = None,
    last_step: int | None = None,
) -> Forecast | None:
    """When the max logit that was `values` at `steps`, oldest first, will reach `level`.

    Args:
        steps: of a history longer than POINTS, the newest count.
        values: as many; NaN and infinities are allowed, and nothing is forecast from them.
        level: a max logit.
        bound: the largest logit that the layer's norm allows; None if there is no such norm.
        last_step: at which the run ends; None if that is not known.

    Returns None where no forecast would deserve trust: with fewer than POINTS values, below FROM times
    the level, at the level or above it, without steady growth, for a date further away than what was
    looked at, or later than the run's end, where the bound keeps logits below the level, and where the
    steps do not increase.
    """
    steps, values = steps[-POINTS:], values[-POINTS:]
    if len(values) < POINTS or not FROM * level <= values[-1] < level:
        return None
    if not all(0 < value < math.inf for value in values) or (bound is not None and bound < level):
        return None
    if any(after <= before for before, after in pairwise(steps)):
        return None
    logs = [math.log(value) for value in values]
    slopes = [
        (logs[j] - logs[i]) / (steps[j] - steps[i]) for i in range(POINTS) for j in range(i + 1, POINTS)
    ]
    if sum(slope > 0 for slope in slopes) < RISING * len(slopes):
        return None
    slope = median(slopes)
    line = median(log + slope * (steps[-1] - step) for log, step in zip(logs, steps, strict=True))
    seen = steps[-1] - steps[0]
    # What lies between two records is not known: no date is nearer than one of their distances.
    distance = max((math.log(level) - line) / slope, seen / (POINTS - 1))
    early = steps[-1] + max(1, round(EARLY * distance))
    late = steps[-1] + math.ceil(LATE * distance)
    if distance > FURTHEST * seen or (last_step is not None and late > last_step):
        return None
    return Forecast(level=level, early=early, late=late)

"""When will a growing quantity reach a level: a robust straight line through its logarithm.

The slope is the median of the slopes between all pairs of points (Theil 1950; Sen 1968), its interval
that of Sen (1968) from Kendall's statistic: it assumes of the noise only that it is alike at all points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

CONFIDENCE = 0.9
MIN_POINTS = 6
MAX_POINTS = 24  # the slopes between them grow with the square


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Exponential growth, value = exp(intercept + slope * step).

    Attributes:
        slope: per step, of the natural logarithm; `slope_low` to `slope_high` holds it with the
            confidence CONFIDENCE.
        last_step: of the newest point.
        last: the line's value there.
    """

    slope: float
    slope_low: float
    slope_high: float
    last_step: int
    last: float

    @property
    def doubling_steps(self) -> float:
        """Steps in which the value doubles; inf if it does not grow."""
        return math.log(2) / self.slope if self.slope > 0 else math.inf

    @property
    def is_growing(self) -> bool:
        """Whether the whole interval of the slope is above zero."""
        return self.slope_low > 0

    def reaches(self, level: float) -> tuple[float, float]:
        """Earliest and latest step at which the line is at `level`, by the interval of the slope; inf if
        it never is, the newest step if it is there already."""
        if self.last >= level:
            return float(self.last_step), float(self.last_step)
        distance = math.log(level / self.last)

        def at(slope: float) -> float:
            return self.last_step + distance / slope if slope > 0 else math.inf

        return at(self.slope_high), at(self.slope_low)


def fit(steps: Sequence[int], values: Sequence[float]) -> Growth | None:
    """The growth of positive values; None with fewer than MIN_POINTS of them. Of many, MAX_POINTS evenly
    spaced ones count, the last among them.

    Values that are not finite or not positive are left out: a logit below 0 says nothing of growth.
    """
    pairs = zip(steps, values, strict=True)
    points = [(step, math.log(v)) for step, v in pairs if math.isfinite(v) and v > 0]
    if len(points) < MIN_POINTS:
        return None
    points = points[::-1][:: -(-len(points) // MAX_POINTS)][::-1]
    n = len(points)
    slopes = sorted(
        (y2 - y1) / (x2 - x1)
        for i, (x1, y1) in enumerate(points)
        for x2, y2 in points[i + 1 :]
        if x2 != x1
    )
    if not slopes:
        return None
    slope = median(slopes)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    reach = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * deviation
    low = max(0, math.floor((len(slopes) - reach) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    intercept = median(y - slope * x for x, y in points)
    last_step = points[-1][0]
    return Growth(
        slope=slope,
        slope_low=slopes[low],
        slope_high=slopes[high],
        last_step=last_step,
        last=math.exp(intercept + slope * last_step),
    )

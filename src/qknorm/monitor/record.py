"""One record: the statistics of every layer at one step, in plain numbers. SCHEMA names its version."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from qknorm.monitor import table
from qknorm.monitor.fields import FIELDS
from qknorm.monitor.norms import ROUNDING
from qknorm.monitor.reduce import Part

SCHEMA = 1
# Vectors whose RMS spreads by less than this share of its mean, over tokens, were normed: without a norm
# even Gaussian ones of 512 entries spread by 0.03.
CONSTANT = 0.01
FEW = 8  # tokens, of which that says nothing

Coverage = Literal["exact", "sampled"]


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One layer. Lists hold one value per query head, those of k one per key head.

    Attributes:
        max_logit: the largest visible logit, as it enters the softmax (soft-cap and bias included).
        entropy_nats: mean over rows of the entropy of the softmax over the keys.
        entropy_ratio: the same divided by ln(visible keys), over rows with two keys or more.
        sink_mass: mean probability of the sink; None without one.
        first_mass: mean probability of the first token of the sequence or document, which is where a
            query sees nothing before its own token; None where the fused pass does not tell.
        q_rms, k_rms: mean over tokens of the root mean square of q and k; over padding too where the
            values are those of a fused pass.
        q_rms_cv, k_rms_cv: its standard deviation (of the population) divided by its mean.
        gain_max: largest |gain| of q and of k, where there is a norm that can be asked.
        bound: the largest |logit| that the gains allow, where there is a norm without a bias and nothing
            else was seen to take part.
        coverage: "exact": over all rows; "sampled": over evenly spaced ones.
        rms_of: "product": q and k as they are multiplied; "projection": before norm and RoPE.
        rows: rows counted, per head.
        is_normed: q and k went through a norm: one whose gains are known, or one that shows in their
            RMS, which is the same for all tokens.
        rank: the process that saw the largest logit, among all of torch.distributed; None if there is
            only one.
        note: why a call was left out or the gains are not known, where this rank knows.

    A head of which no row counted has a maximum of -inf and means of NaN.
    """

    max_logit: list[float]
    entropy_nats: list[float]
    entropy_ratio: list[float]
    sink_mass: list[float] | None
    first_mass: list[float] | None
    q_rms: list[float]
    q_rms_cv: list[float]
    k_rms: list[float]
    k_rms_cv: list[float]
    gain_max: tuple[float, float] | None
    bound: float | None
    coverage: Coverage
    rms_of: Literal["product", "projection"]
    rows: int
    is_normed: bool = False
    rank: int | None = None
    note: str | None = None

    @property
    def top(self) -> float:
        """The largest logit of the layer."""
        return worst(self.max_logit)

    @property
    def worst_head(self) -> int:
        """The head with the largest logit, or the first that is NaN."""
        tops = self.max_logit
        return max(range(len(tops)), key=lambda i: math.inf if math.isnan(tops[i]) else tops[i])

    def seen(self, name: str) -> list[float]:
        """One statistic of the heads of which a row counted."""
        values: list[float] = getattr(self, name)
        return [v for v, top in zip(values, self.max_logit, strict=True) if top != -math.inf]

    def mean(self, name: str) -> float:
        """Its mean over these heads; NaN if there is none."""
        values = self.seen(name)
        return fmean(values) if values else math.nan


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one step of one phase showed.

    Attributes:
        step: the optimizer step, from 0.
        phase: "train" or "eval".
        layers: by module path.
        silent: layers that sent nothing in this step, though they have a tap, and why if it is known.
    """

    step: int
    phase: str
    layers: dict[str, LayerRecord]
    silent: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def max_logit(self) -> float:
        """The largest logit of the model; -inf if nothing was seen."""
        return worst([layer.top for layer in self.layers.values()])

    @property
    def max_logits(self) -> dict[str, list[float]]:
        """The largest logit of each head by module path, as `qknorm.nn.qk_clip_` takes them."""
        return {path: layer.max_logit for path, layer in self.layers.items()}

    @property
    def entropy_nats(self) -> float:
        """Of the sharpest layer, mean over its heads; inf if nothing was seen, NaN if any is NaN."""
        return lowest(
            [layer.mean("entropy_nats") for layer in self.layers.values() if layer.seen("entropy_nats")]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values. NaN and infinities stay; the writer of the file encodes them."""
        return asdict(self)

    def __str__(self) -> str:
        return table.text(self)

    def _repr_html_(self) -> str:  # which notebooks ask for
        return table.as_html(self)


def worst(values: list[float]) -> float:
    """The maximum, NaN if any is NaN, -inf of none."""
    return math.nan if any(math.isnan(v) for v in values) else max(values, default=-math.inf)


def lowest(values: list[float]) -> float:
    """The minimum, NaN if any is NaN, inf of none."""
    return math.nan if any(math.isnan(v) for v in values) else min(values, default=math.inf)


def layer_record(part: Part, *, note: str | None = None) -> LayerRecord:
    """From sums over the whole model, see `measure.FIELDS`."""
    # Of a few heads Python's numbers are quicker than tensors.
    found = dict(zip(FIELDS, part.buffer.tolist(), strict=True))
    place, bound = part.place, part.bound

    def mean(name: str, count: str) -> list[float]:
        return [_divided(x, n) for x, n in zip(found[name], found[count], strict=True)]

    def spread(name: str, heads: int) -> tuple[list[float], list[float]]:
        means = mean(f"{name}_rms", f"{name}_rows")[:heads]
        squares = mean(f"{name}_rms_square", f"{name}_rows")[:heads]
        variances = [square - x * x for x, square in zip(means, squares, strict=True)]
        # Rounding may leave a variance of less than 0; a NaN has to stay.
        deviations = [math.sqrt(0.0 if v < 0 else v) for v in variances]
        return means, [_divided(d, x) for d, x in zip(deviations, means, strict=True)]

    q_rms, q_cv = spread("q", place.heads)
    k_rms, k_cv = spread("k", place.kv_heads)
    max_logit = found["max_logit"]
    if bound is not None and worst(max_logit) > bound * ROUNDING:
        bound = None  # something beside norm and scale takes part: a bias, or a RoPE that stretches
    is_constant = not place.is_fused and min(found["q_rows"]) >= FEW and max((*q_cv, *k_cv)) < CONSTANT
    if part.gain_max is None and is_constant and note is None:
        note = "q and k have a norm, but no module tells its gains, so their bound is not known"
    return LayerRecord(
        max_logit=max_logit,
        entropy_nats=mean("entropy", "rows"),
        entropy_ratio=mean("ratio", "ratio_rows"),
        sink_mass=mean("sink", "rows") if any(found["sink"]) else None,
        first_mass=None if place.is_fused else mean("first", "rows"),
        q_rms=q_rms,
        q_rms_cv=q_cv,
        k_rms=k_rms,
        k_rms_cv=k_cv,
        gain_max=part.gain_max,
        bound=bound,
        coverage="sampled" if part.is_sampled else "exact",
        rms_of="projection" if place.is_fused else "product",
        rows=int(max(found["rows"])),
        is_normed=part.gain_max is not None or is_constant,
        rank=part.rank,
        note=note,
    )


def _divided(x: float, count: float) -> float:
    """NaN for the mean of nothing."""
    return x / count if count else math.nan

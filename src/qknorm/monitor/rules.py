"""The rules: what the recent past of one layer says, each finding with a code, a severity and numbers.

Level alone is no alarm: healthy runs pass 50 and end well. An alarm is what the corpus of
`benchmarks/early_warning.py` supports, a layer with large logits and little entropy left (QM010), and
what is broken already (QM008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qknorm.monitor.forecast import FROM, POINTS, forecast
from qknorm.monitor.history import LayerHistory

GROWN = 1.1  # a factor below which neither q nor k is said to have grown

Severity = Literal["info", "warning", "alarm"]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a rule speaks.

    Attributes:
        level_info, level_warning: max logit; the figures that practitioners quote.
        collapsed: a head whose entropy is below this share of ln(visible keys) attends to few keys.
        frozen: below this it attends to one key.
        uniform: above this it attends to all keys alike.
        saturated: a layer whose mean entropy is below this share, with a logit at `level_warning`, is
            closing: the alarm.
        most: share of a layer's heads that makes it the layer.
        persistence: records in a row for "dead" and "frozen", and records without a finding after which
            it is told anew.
        loosening: growth of the bound, newest against oldest record kept, that is worth a word.
    """

    level_info: float = 30.0
    level_warning: float = 50.0
    collapsed: float = 0.05
    frozen: float = 1e-3
    uniform: float = 0.999
    saturated: float = 0.25
    most: float = 0.75
    persistence: int = 5
    loosening: float = 2.0


# Code, severity, heads (none: the layer as a whole), what is said of the layer, and its numbers.
Found = tuple[str, Severity, tuple[int, ...], str, dict[str, float]]


def findings(layer: LayerHistory, thresholds: Thresholds, last_step: int | None) -> Iterator[Found]:
    """What every rule finds in one layer; `last_step` is that of the run, where it is known."""
    for rule in (_not_finite, _saturation, _level, _entropy, _persistent, _bound):
        yield from rule(layer, thresholds)
    yield from _growth(layer, thresholds, last_step)


def _which(values: Sequence[float], holds: Callable[[float], bool]) -> tuple[int, ...]:
    """The heads whose value fulfils a condition."""
    return tuple(head for head, value in enumerate(values) if holds(value))


def _some(heads: tuple[int, ...], total: int) -> str:
    """The subject of a sentence and its verb: "head 3 has", "3 of 4 heads have"."""
    return f"head {heads[0]} has" if len(heads) == 1 else f"{len(heads)} of {total} heads have"


def _extreme(what: str, heads: tuple[int, ...], total: int, limit: str, worst: int, value: str) -> str:
    """A sentence about heads past a limit, with the value of the only head or of the worst one."""
    if len(heads) == 1:
        return f"{_some(heads, total)} {what.format(value)}"
    return f"{_some(heads, total)} {what.format(limit)}, the worst is head {worst} with {value}"


def _on(rank: int | None) -> tuple[str, dict[str, float]]:
    """Where the largest logit was seen, in words and as a number; nothing for one process."""
    return ("", {}) if rank is None else (f" on rank {rank}", {"rank": float(rank)})


def _grown(layer: LayerHistory) -> tuple[str, dict[str, float]]:
    """Which of q and k has grown more, as the end of a sentence, and both as numbers."""
    growth = layer.growth()
    if growth is None:
        return "", {}
    evidence = {"since": float(growth.step), "q_growth": growth.q, "k_growth": growth.k}
    (small, less), (large, more) = sorted([(growth.q, "q"), (growth.k, "k")])
    if large < GROWN:
        return "", evidence
    of = "the largest gain" if growth.head is None else "the RMS"
    where = "" if growth.head is None else f" in head {growth.head}"
    if f"{small:.1f}" == f"{large:.1f}":
        text = f"{of} of q and that of k{where} have each grown by a factor of {large:.1f}"
    else:
        text = (
            f"{of} of {more}{where} has grown by a factor of {large:.1f}, that of {less} by {small:.1f}"
        )
    return f"; since step {growth.step} {text}", evidence


def _not_finite(layer: LayerHistory, _: Thresholds) -> Iterator[Found]:
    tops, entropies = layer.last.max_logit, layer.last.entropy_nats
    is_known = layer.last.rows > 0  # in logs of other tools entropies may be missing
    heads = tuple(
        head
        for head, (top, entropy) in enumerate(zip(tops, entropies, strict=True))
        # A head of which no row counted has a maximum of -inf.
        if top != -math.inf and not (math.isfinite(top) and (math.isfinite(entropy) or not is_known))
    )
    if heads:
        worst = tops[heads[0]]
        text = f"{_some(heads, len(tops))} a max logit or an entropy that is not finite: {worst}"
        # Whose entropy it is, nobody tells.
        rank = None if all(math.isfinite(tops[head]) for head in heads) else layer.last.rank
        where, evidence = _on(rank)
        yield "QM008", "alarm", heads, f"{text}{where}", {"max_logit": worst} | evidence


def _saturation(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    """Large logits alone may be a few pairs, little entropy alone a task for specialists: together they
    went before trouble in nearly all runs that had it, and in no other."""
    top, ratio = layer.last.top, layer.last.mean("entropy_ratio")
    if top >= t.level_warning and ratio < t.saturated:
        where, evidence = _on(layer.last.rank)
        grown, factors = _grown(layer)
        text = (
            f"the softmax is saturating, with a max logit of {top:.1f}{where} and {100 * ratio:.0f} % "
            f"of the largest possible entropy left{grown}"
        )
        evidence = {"max_logit": top, "entropy_ratio": ratio} | evidence | factors
        yield "QM010", "alarm", (), text, evidence


def _level(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    tops = layer.last.max_logit
    worst = max(range(len(tops)), key=lambda head: -math.inf if math.isnan(tops[head]) else tops[head])
    if not tops[worst] >= t.level_info:
        return
    severity: Severity = "warning" if tops[worst] >= t.level_warning else "info"
    level = t.level_warning if severity == "warning" else t.level_info
    heads = _which(tops, lambda top: top >= level)
    text = _extreme(
        "a max logit of {}", heads, len(tops), f"{level:g} or more", worst, f"{tops[worst]:.1f}"
    )
    where, evidence = _on(layer.last.rank)
    yield "QM001", severity, heads, f"{text}{where}", {"max_logit": tops[worst]} | evidence


def _growth(layer: LayerHistory, t: Thresholds, last_step: int | None) -> Iterator[Found]:
    """The layer's max logit is growing towards the level, and a forecast of when deserves trust."""
    # Most layers are far below: no list is made of them.
    if not FROM * t.level_warning <= layer.last.top < t.level_warning:
        return
    tops = [record.top for record in layer.records[-POINTS:]]
    found = forecast(
        layer.steps[-POINTS:], tops, t.level_warning, bound=layer.last.bound, last_step=last_step
    )
    if found is not None:
        heads = _which(layer.last.max_logit, lambda top: top >= FROM * t.level_warning)
        grown, factors = _grown(layer)
        text = (
            f"the max logit has grown to {tops[-1]:.1f}; it is expected to reach {found.level:g} "
            f"between steps {found.early} and {found.late}{grown}"
        )
        evidence = {
            "max_logit": tops[-1],
            "level": found.level,
            "early": float(found.early),
            "late": float(found.late),
        }
        yield "QM002", "warning", heads, text, evidence | factors


def _entropy(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    ratios = layer.last.entropy_ratio
    heads = _which(ratios, lambda ratio: ratio < t.collapsed)
    if not heads:
        return
    sharpest = min(heads, key=ratios.__getitem__)
    text = _extreme(
        "{} of the largest possible entropy",
        heads,
        len(ratios),
        f"less than {100 * t.collapsed:g} %",
        sharpest,
        f"{100 * ratios[sharpest]:.1f} %",
    )
    evidence = {"entropy_ratio": ratios[sharpest], "share": len(heads) / len(ratios)}
    yield "QM003", "info", heads, text, evidence
    if len(heads) >= max(2, t.most * len(ratios)):
        yield "QM004", "warning", heads, text, evidence


def _persistent(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    """What counts only if it has lasted."""
    past = [record.entropy_ratio for record in layer.records[-t.persistence :]]
    if len(past) < t.persistence:
        return
    rules: list[tuple[str, Severity, str, Callable[[float], bool]]] = [
        ("QM005", "info", "attended to all keys alike", lambda r: r > t.uniform),
        ("QM006", "warning", "attended to single keys only", lambda r: r < t.frozen),
    ]
    for code, severity, what, holds in rules:
        heads = tuple(h for h in _which(past[-1], holds) if all(holds(ratios[h]) for ratios in past))
        if heads:
            text = f"{_some(heads, len(past[-1]))} {what} in the last {len(past)} records"
            yield code, severity, heads, text, {"entropy_ratio": past[-1][heads[0]]}


def _bound(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    newest = layer.last.bound
    if newest is None or newest < t.level_warning:
        return
    oldest = next(record.bound for record in layer.records if record.bound is not None)
    if oldest > 0 and newest >= t.loosening * oldest:
        text = f"the norm allows logits of {newest:.0f}, {newest / oldest:.1f} times as large as before"
        yield "QM007", "warning", (), text, {"bound": newest, "before": oldest}

"""What is worth a word: rules over the recent past, each with a stable code.

Level alone is no alarm: healthy runs pass 50 and end well. An alarm is what the corpus of
`benchmarks/early_warning.py` supports, a layer with large logits and little entropy left (QM010), and
what is broken already (QM008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from qknorm.monitor.forecast import MIN_POINTS, fit
from qknorm.monitor.history import History, LayerHistory
from qknorm.monitor.record import Record
from qknorm.monitor.to.delivery import Delivery, Destination, destinations

Severity = Literal["info", "warning", "alarm"]
MOST_ALIKE = 16  # alerts of one kind in one record
ORDER: tuple[Severity, ...] = ("info", "warning", "alarm")


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One finding.

    Attributes:
        code: stable, see ADVICE.
        severity: "info", "warning" or "alarm".
        step: at which it was found.
        layer, head: where; None for all.
        message: one sentence with the numbers.
        evidence: the numbers by name.
    """

    code: str
    severity: Severity
    step: int
    layer: str | None
    head: int | None
    message: str
    evidence: dict[str, float]

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.code]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"advice": self.advice}


ADVICE = {
    "QM001": "Watch whether it grows. Without a norm on q and k, add one before raising the rate.",
    "QM002": "Lower the peak rate, lengthen the warm-up, or train with QK-norm, which bounds logits.",
    "QM003": "One sharp head is often a specialist. Nothing to do unless its layer follows.",
    "QM004": "Most of the layer attends to single keys and learns little. Go back to a checkpoint "
    "before the collapse, and lower the rate or add QK-norm.",
    "QM005": "The head spreads evenly over all keys. If it stays so, its projections may have vanished.",
    "QM006": "The head has attended to single keys for many records: its softmax passes no gradient.",
    "QM007": "The gains are growing, and with them the bound that the norm gives. Decay them, or lower "
    "the rate of the gains.",
    "QM008": "Stop and go back: a NaN or an infinity in q or k reaches every weight within a step.",
    "QM009": "Look at why the layer was not called, or runs where its tap cannot see it.",
    "QM010": "The softmax of this layer is closing: what it attends to will soon be fixed. In runs like "
    "this one the loss falls behind or spikes. Lower the rate now, or go back and train with QK-norm.",
}


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


_Key = tuple[str, "str | None", "int | None", str]


def _key(alert: Alert) -> _Key:
    return alert.code, alert.layer, alert.head, alert.severity


@dataclass(kw_only=True)
class Alerts:
    """Applies the rules to each record, and says each thing once as long as it lasts.

    Args:
        thresholds: when a rule speaks.
        to: called with each new alert, each on its own. One that raises gets it again with the next
            record, as long as it holds.
        on_alarm: called with each new alarm, as a destination is: `on_alarm=alarms.append` in a loop of
            your own that stops `if alarms`. What it raises is logged and ends nothing.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    to: list[Destination] = field(default_factory=list)
    on_alarm: Callable[[Alert], object] | None = None
    history: History = field(default_factory=History)
    _standing: dict[_Key, int] = field(default_factory=dict)
    _records: int = 0
    _owed: dict[int, list[_Key]] = field(default_factory=dict)  # by the id of a destination that failed
    _deliver: Delivery = field(default_factory=Delivery)

    def __post_init__(self) -> None:
        self.to = destinations(self.to)
        if self.on_alarm is not None:
            (act,) = destinations(self.on_alarm)
            self.to.append(lambda alert: act(alert) if alert.severity == "alarm" else None)

    def __call__(self, record: Record) -> list[Alert]:
        """The alerts that are new with this record."""
        if record.phase != "train":
            return []
        found, new = self._take(record)
        for send in self.to:
            again = [found[key] for key in self._owed.get(id(send), ()) if key in found]
            due = again + [alert for alert in new if alert not in again]
            self._owed[id(send)] = [_key(alert) for alert in due if not self._deliver(send, alert)]
        return new

    def replay(self, records: Iterable[Record]) -> None:
        """Take in what an earlier session has recorded, without saying again what it said."""
        for record in records:
            if record.phase == "train":
                self._take(record)

    def flush(self) -> None:
        """Have every destination write what it keeps back."""
        self._deliver.flush(self.to)

    def _take(self, record: Record) -> tuple[dict[_Key, Alert], list[Alert]]:
        """What holds with this record, and what of it is to be said."""
        self.history.add(record)
        self._records += 1
        found = {_key(alert): alert for alert in self._all()}
        over = self._records - self.thresholds.persistence
        standing = {key: seen for key, seen in self._standing.items() if seen >= over}
        self._standing = standing | dict.fromkeys(found, self._records)
        return found, _few([alert for key, alert in found.items() if key not in standing])

    def _all(self) -> Iterator[Alert]:
        for name, why in self.history.silent.items():
            yield self._alert("QM009", "warning", name, None, f"{name} sent nothing: {why}", {})
        for name, layer in self.history.layers.items():
            if layer.steps[-1] == self.history.step:
                for rule in (_not_finite, _saturation, _level, _growth, _entropy, _bound):
                    for code, severity, head, text, evidence in rule(layer, self.thresholds):
                        where = name or "the model itself"
                        where = where if head is None else f"{where} head {head}"
                        yield self._alert(code, severity, name, head, f"{where} {text}", evidence)

    def _alert(
        self,
        code: str,
        severity: Severity,
        layer: str | None,
        head: int | None,
        message: str,
        evidence: dict[str, float],
    ) -> Alert:
        return Alert(
            code=code,
            severity=severity,
            step=self.history.step,
            layer=layer,
            head=head,
            message=message,
            evidence=evidence,
        )


def _few(alerts: list[Alert]) -> list[Alert]:
    """Many heads with the same finding at once become one alert, which names the first."""
    groups: dict[tuple[str, Severity], list[Alert]] = {}
    for alert in alerts:
        groups.setdefault((alert.code, alert.severity), []).append(alert)
    few: list[Alert] = []
    for group in groups.values():
        if len(group) <= MOST_ALIKE:
            few += group
            continue
        chief = max(group, key=lambda alert: alert.evidence.get("max_logit", 0.0))
        layers = len({alert.layer for alert in group})
        few.append(
            replace(
                chief,
                message=f"{len(group)} heads in {layers} layers: {chief.message}, among others",
                evidence=chief.evidence | {"heads": float(len(group)), "layers": float(layers)},
            )
        )
    return few


Found = tuple[str, Severity, int | None, str, dict[str, float]]


def _not_finite(layer: LayerHistory, _: Thresholds) -> Iterator[Found]:
    for head, value in enumerate(layer.last.max_logit):
        if value == -math.inf:
            continue  # no row of this head counted
        if not math.isfinite(value) or not math.isfinite(layer.last.entropy_nats[head]):
            yield "QM008", "alarm", head, f"is not finite: max logit {value}", {"max_logit": value}


def _saturation(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    """Large logits alone may be a few pairs, little entropy alone a task for specialists: together they
    went before trouble in nearly all runs that had it, and in no other."""
    top, ratio = layer.last.top, layer.last.mean("entropy_ratio")
    if top >= t.level_warning and ratio < t.saturated:
        text = f"is saturating: a max logit of {top:.1f} and {100 * ratio:.0f} % of its entropy left"
        yield "QM010", "alarm", None, text, {"max_logit": top, "entropy_ratio": ratio}


def _level(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    for head, value in enumerate(layer.last.max_logit):
        if value >= t.level_info:
            severity: Severity = "warning" if value >= t.level_warning else "info"
            yield "QM001", severity, head, f"has a max logit of {value:.1f}", {"max_logit": value}


def _growth(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    """A head below the level whose line reaches it within as many steps as were looked at, unless a norm
    forbids it."""
    steps = list(layer.steps)
    if len(steps) < MIN_POINTS or (layer.last.bound is not None and layer.last.bound < t.level_warning):
        return
    third = len(steps) // 3
    for head, value in enumerate(layer.last.max_logit):
        if not t.level_info / 3 <= value < t.level_warning:
            continue
        values = layer.head("max_logit", head)
        # A line takes a thousand slopes; most heads do not grow at all.
        if fmean(values[-third:]) <= 1.05 * fmean(values[:third]):
            continue
        growth = fit(steps, values)
        if growth is None or not growth.is_growing:
            continue
        early, late = growth.reaches(t.level_warning)
        if early - steps[-1] <= steps[-1] - steps[0]:
            yield (
                "QM002",
                "warning",
                head,
                f"doubles every {growth.doubling_steps:.0f} steps, reaches {t.level_warning:g} at step "
                f"{early:.0f} to {late:.0f}",
                {
                    "max_logit": value,
                    "doubling_steps": growth.doubling_steps,
                    "level": t.level_warning,
                    "early": early,
                    "late": late,
                },
            )


def _entropy(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    ratios = layer.last.entropy_ratio
    sharp = [head for head, ratio in enumerate(ratios) if ratio < t.collapsed]
    if len(sharp) >= max(2, t.most * len(ratios)):
        share = len(sharp) / len(ratios)
        evidence = {"heads": float(len(sharp)), "share": share}
        yield "QM004", "warning", None, f"has {len(sharp)} of {len(ratios)} heads collapsed", evidence
    for head in sharp:
        text = f"has {100 * ratios[head]:.1f} % of the largest entropy it could have"
        yield "QM003", "info", head, text, {"entropy_ratio": ratios[head]}
    for head in range(len(ratios)):
        past = layer.head("entropy_ratio", head)[-t.persistence :]
        if len(past) < t.persistence:
            continue
        if all(ratio > t.uniform for ratio in past):
            yield "QM005", "info", head, "spreads evenly over all keys", {"entropy_ratio": past[-1]}
        if all(ratio < t.frozen for ratio in past):
            yield "QM006", "warning", head, "attends to single keys only", {"entropy_ratio": past[-1]}


def _bound(layer: LayerHistory, t: Thresholds) -> Iterator[Found]:
    bounds = [record.bound for record in layer.records if record.bound is not None]
    if (
        len(bounds) >= 2
        and bounds[0] > 0
        and bounds[-1] >= max(t.loosening * bounds[0], t.level_warning)
    ):
        text = (
            f"allows logits of {bounds[-1]:.0f}, {bounds[-1] / bounds[0]:.1f} times as large as before"
        )
        yield "QM007", "warning", None, text, {"bound": bounds[-1], "before": bounds[0]}

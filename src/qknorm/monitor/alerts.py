"""Alerts: what the rules find, said once per layer and code as long as it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qknorm.monitor.history import History
from qknorm.monitor.record import Record
from qknorm.monitor.rules import Found, Severity, Thresholds, findings
from qknorm.monitor.to.delivery import Delivery, Destination, destinations

MOST_ALIKE = 16  # alerts of one kind in one record; more become one
ORDER: tuple[Severity, ...] = ("info", "warning", "alarm")


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One finding about one layer.

    Attributes:
        code: stable, see ADVICE.
        severity: "info", "warning" or "alarm".
        step: at which it was found.
        layer: its module path.
        heads: the query heads that it is about; empty where it is about the layer as a whole.
        message: one sentence with the numbers.
        evidence: the numbers by name.
        is_first: whether it is the first of its code in this run. A destination that people read line by
            line gives the advice only then.
        is_normed: whether the layer normalises q and k already, so that the advice is not to do so.
    """

    code: str
    severity: Severity
    step: int
    layer: str
    heads: tuple[int, ...]
    message: str
    evidence: dict[str, float]
    is_first: bool = False
    is_normed: bool = False

    @property
    def advice(self) -> str:
        """What to do about it."""
        usual = ADVICE[self.code]
        return ADVICE_WITH_NORM.get(self.code, usual) if self.is_normed else usual

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"heads": list(self.heads), "advice": self.advice}


ADVICE = {
    "QM001": "Watch whether it grows. Without a norm on q and k, add one before raising the rate.",
    "QM002": "Lower the peak rate, lengthen the warm-up, or train with QK-norm, which bounds logits.",
    "QM003": "One sharp head is often a specialist. Nothing to do unless its layer follows.",
    "QM004": "Most of the layer attends to single keys and learns little. Go back to a checkpoint "
    "before the collapse, and lower the rate or add QK-norm.",
    "QM005": "If a head goes on attending to all keys alike, its projections may have vanished.",
    "QM006": "The softmax of such a head passes no gradient: it can hardly learn anything else.",
    "QM007": "The gains are growing, and with them the bound that the norm gives. Decay them, or lower "
    "the rate of the gains.",
    "QM008": "Stop and go back: a NaN or an infinity in q or k reaches every weight within a step.",
    "QM009": "Look at why the layer was not called, or runs where its tap cannot see it.",
    "QM010": "The softmax of this layer is closing: what it attends to will soon be fixed. In runs like "
    "this one the loss falls behind or spikes. Lower the rate now, or go back and train with QK-norm.",
    "QM011": "Stop and go back to a checkpoint from before this step.",
    "QM012": "Go back to a checkpoint from before the loss rose, and lower the learning rate.",
}

# The advice for a layer whose q and k are normalised, where the usual one is to do that.
ADVICE_WITH_NORM = {
    "QM001": "The gains of the norm allow it. Watch whether they grow.",
    "QM002": "Lower the peak rate or that of the gains, or decay the gains: they set how far logits go.",
    "QM004": "Most of the layer attends to single keys and learns little. Go back to a checkpoint "
    "before the collapse, and lower the rate, above all that of the gains.",
    "QM010": "The softmax of this layer is closing although q and k are normalised: its gains are too "
    "large. Lower their rate now, or go back and decay them.",
}


# What a graver finding about the same layer says already.
SAID_BY = {
    "QM001": {"QM008", "QM010"},
    "QM002": {"QM008", "QM010"},
    "QM003": {"QM004", "QM006"},
}

_Key = tuple[str, str, str]


def _key(alert: Alert) -> _Key:
    return alert.code, alert.layer, alert.severity


@dataclass(kw_only=True)
class Alerts:
    """Applies the rules to each record, and says each thing once as long as it lasts.

    Args:
        thresholds: when a rule speaks.
        to: called with each new alert, each on its own. One that raises gets it again with the next
            record, as long as it holds.
        last_step: at which the run ends, so that nothing is forecast for later; None if it is not known.
        on_alarm: called with each new alarm, as a destination is: `on_alarm=alarms.append` in a loop of
            your own that stops `if alarms`. What it raises is logged and ends nothing.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    to: list[Destination] = field(default_factory=list)
    last_step: int | None = None
    on_alarm: Callable[[Alert], object] | None = None
    history: History = field(default_factory=History)
    _standing: dict[_Key, int] = field(default_factory=dict)
    _codes: set[str] = field(default_factory=set)  # that were given in this run
    _records: int = 0
    _owed: dict[int, list[Alert]] = field(default_factory=dict)  # by the id of a destination that failed
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
            again = [
                replace(found[_key(missed)], is_first=missed.is_first)
                for missed in self._owed.get(id(send), ())
                if _key(missed) in found
            ]
            known = {_key(alert) for alert in again}
            due = again + [alert for alert in new if _key(alert) not in known]
            self._owed[id(send)] = [alert for alert in due if not self._deliver(send, alert)]
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
        """What holds with this record, and what of it is to be said.

        What a graver finding says as well counts as said.
        """
        self.history.add(record)
        self._records += 1
        found = {_key(alert): alert for alert in self._all()}
        over = self._records - self.thresholds.persistence
        standing = {key: seen for key, seen in self._standing.items() if seen >= over}
        self._standing = standing | dict.fromkeys(found, self._records)
        holding = {(alert.layer, alert.code) for alert in found.values()}
        said = {
            key: alert
            for key, alert in found.items()
            if not any((alert.layer, graver) in holding for graver in SAID_BY.get(alert.code, ()))
        }
        new = []
        for alert in _few([alert for key, alert in said.items() if key not in standing]):
            new.append(replace(alert, is_first=alert.code not in self._codes))
            self._codes.add(alert.code)
        return said, new

    def _all(self) -> Iterator[Alert]:
        for name, why in self.history.silent.items():
            text = f"nothing was seen of this layer: {why}"
            yield self._alert(name, ("QM009", "warning", (), text, {}))
        for name, layer in self.history.layers.items():
            if layer.steps[-1] == self.history.step:
                for found in findings(layer, self.thresholds, self.last_step):
                    yield self._alert(name, found)

    def _alert(self, layer: str, found: Found) -> Alert:
        code, severity, heads, text, evidence = found
        where = f"layer {layer}" if layer.isdecimal() else layer or "the model itself"
        return Alert(
            code=code,
            severity=severity,
            step=self.history.step,
            layer=layer,
            heads=heads,
            message=f"{where}: {text}",
            evidence=evidence,
            is_normed=layer in self.history.layers and self.history.layers[layer].last.is_normed,
        )


def _few(alerts: list[Alert]) -> list[Alert]:
    """Many layers with the same finding at once become one alert, that of the largest logit."""
    groups: dict[tuple[str, Severity], list[Alert]] = {}
    for alert in alerts:
        groups.setdefault((alert.code, alert.severity), []).append(alert)
    few: list[Alert] = []
    for group in groups.values():
        if len(group) <= MOST_ALIKE:
            few += group
            continue
        chief = max(group, key=lambda alert: alert.evidence.get("max_logit", 0.0))
        few.append(
            replace(
                chief,
                message=f"{chief.message}; {len(group) - 1} other layers have the same finding",
                evidence=chief.evidence | {"layers": float(len(group))},
            )
        )
    return few

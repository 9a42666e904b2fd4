"""What the rules say, when, and that they say it once."""

from __future__ import annotations

import logging
import math
import random

import pytest
import torch
from torch import nn

from made import layer, record
from qknorm.monitor import Monitor, Record, log_line
from qknorm.monitor.alerts import ADVICE, Alert, Alerts
from qknorm.monitor.forecast import fit


def feed(alerts: Alerts, *values: float, step: int = 10, **other: list[float]) -> list[Alert]:
    """One head, one value a record."""
    found = []
    for i, value in enumerate(values):
        found += alerts(record(step * i, {"a": layer([value], **other)}))
    return found


def codes(found: list[Alert]) -> list[tuple[str, str]]:
    return [(alert.code, alert.severity) for alert in found]


def test_level_speaks_once_and_again_when_it_comes_back_after_a_while() -> None:
    """Not at each crossing of a level about which a head hovers."""
    found = feed(Alerts(), 10.0, 31.0, 29.0, 33.0, 51.0, 52.0, *[20.0] * 6, 40.0)
    level = [(a.code, a.severity, a.step) for a in found if a.code == "QM001"]
    assert level == [
        ("QM001", "info", 10),
        ("QM001", "warning", 40),
        ("QM001", "info", 120),
    ]


def test_growth_says_when_the_level_is_reached() -> None:
    # Doubles every 100 steps from 12: reaches 50 after 206.
    values = [12 * 2 ** (i / 10) for i in range(20)]
    first = next(a for a in feed(Alerts(), *values) if a.code == "QM002")
    assert first.evidence["doubling_steps"] == pytest.approx(100)
    assert first.evidence["early"] == pytest.approx(205.9, abs=0.2)
    assert "doubles every 100 steps, reaches 50 at step 206" in first.message
    assert "a head 0" in first.message


def test_a_flat_or_falling_head_is_not_growing() -> None:
    noise = random.Random(0)
    assert not codes(feed(Alerts(), *[20 + noise.gauss(0, 0.5) for _ in range(40)]))
    assert not codes(feed(Alerts(), *[29 * 0.98**i for i in range(40)]))


def test_entropy_of_heads_and_of_layers() -> None:
    alerts = Alerts()
    one = alerts(record(0, {"a": layer([5.0] * 4, ratio=[0.01, 0.5, 0.5, 0.5])}))
    assert codes(one) == [("QM003", "info")]
    assert one[0].head == 0
    most = alerts(record(10, {"a": layer([5.0] * 4, ratio=[0.01, 0.02, 0.03, 0.5])}))
    assert ("QM004", "warning") in codes(most)
    assert "3 of 4 heads" in next(a for a in most if a.code == "QM004").message


def test_dead_and_frozen_heads_need_several_records() -> None:
    alerts = Alerts()
    found = [codes(alerts(record(i, {"a": layer([0.1, 90.0], ratio=[0.9999, 1e-5])}))) for i in range(6)]
    assert ("QM005", "info") in found[4]
    assert ("QM006", "warning") in found[4]
    assert not any(code in ("QM005", "QM006") for step in (*found[:4], found[5]) for code, _ in step)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_is_an_alarm(bad: float) -> None:
    assert ("QM008", "alarm") in codes(feed(Alerts(), 5.0, bad))


def test_a_bound_that_loosens() -> None:
    alerts = Alerts()
    found = [alerts(record(i, {"a": layer([9.0], bound=b)})) for i, b in enumerate((33.0, 40.0, 210.0))]
    assert codes(found[0] + found[1]) == []
    assert codes(found[2]) == [("QM007", "warning")]
    assert found[2][0].evidence == {"bound": 210.0, "before": 33.0}


def test_a_silent_layer_is_named_with_the_reason() -> None:
    (alert,) = Alerts()(record(0, {}, silent={"layers.3": "its tap saw no call"}))
    assert (alert.code, alert.layer) == ("QM009", "layers.3")
    assert "its tap saw no call" in alert.message


def test_evaluation_raises_nothing_and_every_code_has_advice() -> None:
    assert Alerts()(record(0, {"a": layer([math.nan])}, phase="eval")) == []
    assert [f"QM{i:03}" for i in range(1, len(ADVICE) + 1)] == list(ADVICE)


def test_listeners_get_each_alert() -> None:
    heard: list[Alert] = []
    found = feed(Alerts(to=[heard.append]), 10.0, 60.0)
    assert heard == found != []


def test_the_fit_is_robust_and_its_interval_covers() -> None:
    noise, inside = random.Random(1), 0
    steps = list(range(0, 400, 10))
    for _ in range(200):
        values = [math.exp(1 + 0.004 * s + noise.gauss(0, 0.2)) for s in steps]
        growth = fit(steps, values)
        assert growth is not None
        inside += growth.slope_low <= 0.004 <= growth.slope_high
    assert 165 <= inside <= 197  # nine in ten
    values = [math.exp(0.004 * s) for s in steps]
    values[5], values[20] = 1e9, 1e-9
    growth = fit(steps, values)
    assert growth is not None
    assert growth.slope == pytest.approx(0.004, rel=1e-6)


def test_the_fit_of_little_or_nothing() -> None:
    assert fit([0, 1, 2], [1.0, 2.0, 3.0]) is None
    assert fit(list(range(9)), [-1.0] * 9) is None
    assert fit([3] * 9, [1.0] * 9) is None
    flat = fit(list(range(9)), [2.0] * 9)
    assert flat is not None
    assert not flat.is_growing
    assert flat.doubling_steps == math.inf
    assert flat.reaches(1.0) == (8.0, 8.0)
    assert flat.reaches(4.0) == (math.inf, math.inf)


def test_no_growth_warning_where_the_gains_do_not_allow_the_level() -> None:
    values = [12 * 2 ** (i / 10) for i in range(20)]
    for bound, expected in ((49.0, False), (51.0, True), (None, True)):
        alerts = Alerts()
        for step, value in enumerate(values):
            alerts(record(10 * step, {"a": layer([value], bound=bound)}))
        assert any(key[0] == "QM002" for key in alerts._standing) is expected


def test_replayed_records_are_not_told_again() -> None:
    records = [record(10 * i, {"a": layer([value])}) for i, value in enumerate([10.0, 31.0, 60.0, 61.0])]
    sent: list[Alert] = []
    alerts = Alerts(to=[sent.append])
    alerts.replay(records[:3])
    assert alerts(records[3]) == sent == []


class Broken:
    """A destination that fails the first `times` times."""

    def __init__(self, times: float = math.inf) -> None:
        self.times, self.heard = times, list[Alert]()

    def __call__(self, alert: Alert) -> None:
        self.times -= 1
        if self.times >= 0:
            raise OSError("no route to host\nand a second line")
        self.heard.append(alert)


def test_f23_a_destination_that_fails_silences_no_other(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Alert] = []
    saturating = record(0, {"a": layer([60.0, 61.0], ratio=[0.1, 0.1])})
    alerts = Alerts(to=[Broken(), heard.append, log_line])
    with caplog.at_level(logging.INFO, logger="qknorm"):
        assert alerts(saturating) == heard
    assert "QM010" in {alert.code for alert in heard}
    assert sum("QM010" in one.message for one in caplog.records) == 1
    said = [one.message for one in caplog.records if "Broken" in one.message]
    assert said == [
        "Broken failed at step 0, and is called again without a further word: OSError: no route to host"
    ]
    assert max(len(one.message) for one in caplog.records) < 500
    assert not any(one.exc_info for one in caplog.records)


def test_f23_an_alert_is_given_when_it_was_sent() -> None:
    """Who failed gets it again with the next record, in its present form, as long as it holds."""
    broken, heard = Broken(times=3), list[Alert]()
    alerts = Alerts(to=[broken, heard.append])
    for step, top in enumerate((60.0, 61.0, 62.0, 10.0)):  # QM001, and QM003 in the first record
        alerts(record(step, {"a": layer([top], ratio=[0.01 if step == 0 else 0.9])}))
    assert [(a.code, a.step) for a in heard] == [("QM010", 0), ("QM001", 0), ("QM003", 0)]
    assert [(a.code, a.step) for a in broken.heard] == [("QM001", 1)]
    assert broken.heard[0].evidence == {"max_logit": 61.0}


def test_f23_the_same_for_records(caplog: pytest.LogCaptureFixture) -> None:
    """Once per destination, in one line, however many records there are."""
    seen: list[Record] = []
    others = [Broken(), Broken()]
    module = nn.MultiheadAttention(8, 2)
    with Monitor.attach(module, every=1, to=[*others, Alerts(to=others), seen.append]) as monitor:
        for _ in range(4):
            module(*[torch.randn(5, 1, 8)] * 3)
            monitor.step()
    assert len(seen) == 4
    assert [one.message.split()[0] for one in caplog.records] == ["Broken", "Broken"]

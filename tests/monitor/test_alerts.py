"""What the rules say, when, and that they say it once."""

from __future__ import annotations

import json
import logging
import math
import random

import pytest
import torch
from torch import nn

from made import layer, record
from qknorm.monitor import Monitor, Record, log_line
from qknorm.monitor.alerts import ADVICE, Alert, Alerts
from qknorm.monitor.forecast import EARLY, LATE, forecast
from qknorm.monitor.to.jsonl import to_alert


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
    # Doubles every 100 steps from 12: reaches 50 after 205.9.
    values = [12 * 2 ** (i / 10) for i in range(20)]
    (growth,) = [a for a in feed(Alerts(), *values) if a.code == "QM002"]
    distance = 205.9 - growth.step
    assert growth.step == 190
    assert growth.evidence["early"] == pytest.approx(190 + EARLY * distance, abs=1)
    assert growth.evidence["late"] == pytest.approx(190 + LATE * distance, abs=1)
    assert growth.message == (
        "a: the max logit has grown to 44.8; it is expected to reach 50 between steps 195 and 230"
    )
    assert growth.heads == (0,)


def test_f72_a_forecast_is_made_only_where_it_deserves_trust() -> None:
    steps = list(range(0, 60, 10))
    values = [46.0 * 2 ** (i / 15) for i in range(-5, 1)]  # doubles in 150 steps: 18 to the level
    found = forecast(steps, values, 50.0)
    assert found is not None
    assert (found.early, found.late) == (50 + 5, 50 + 46)
    # Also on the longer history of a run, of which the newest points count.
    assert forecast([-20, -10, *steps], [1.0, 99.0, *values], 50.0) == found
    assert forecast(steps, values, 50.0, bound=50.0) == found
    assert forecast(steps, values, 50.0, last_step=found.late) == found
    for why, nothing in {
        "below the bound": forecast(steps, values, 50.0, bound=49.9),
        "past the end": forecast(steps, values, 50.0, last_step=found.late - 1),
        "at the end": forecast(steps, values, 50.0, last_step=50),
        "too few": forecast(steps[1:], values[1:], 50.0),
        "there already": forecast(steps, [*values[:-1], 50.0], 50.0),
        "far below": forecast(steps, [v / 2 for v in values], 50.0),
        "too far away": forecast(steps, [44.0 + i / 5 for i in range(6)], 50.0),
        "flat": forecast(steps, [45.0] * 6, 50.0),
        "falling": forecast(steps, values[::-1], 50.0),
        "restless": forecast(steps, [40.0, 46.0, 41.0, 47.0, 42.0, 48.0], 50.0),
        "not finite": forecast(steps, [*values[:-2], math.nan, 46.0], 50.0),
        "negative": forecast(steps, [-3.0, *values[1:]], 50.0),
        "one step": forecast([5] * 6, values, 50.0),
    }.items():
        assert nothing is None, why
    # One outlier does not move it.
    assert forecast(steps, [*values[:2], 30.0, *values[3:]], 50.0) == found
    near = forecast(steps, [20.0, 25.0, 30.0, 35.0, 42.0, 49.9], 50.0)
    assert near is not None
    assert (near.early, near.late) == (53, 75)  # no nearer than by one record, of ten steps


def test_a_flat_or_falling_head_is_not_growing() -> None:
    noise = random.Random(0)
    assert not codes(feed(Alerts(), *[20 + noise.gauss(0, 0.5) for _ in range(40)]))
    assert not codes(feed(Alerts(), *[29 * 0.98**i for i in range(40)]))


def test_entropy_of_heads_and_of_layers() -> None:
    alerts = Alerts()
    one = alerts(record(0, {"a": layer([5.0] * 4, ratio=[0.01, 0.5, 0.5, 0.5])}))
    assert codes(one) == [("QM003", "info")]
    assert one[0].heads == (0,)
    assert one[0].message == "a: head 0 has 1.0 % of the largest possible entropy"
    (most,) = alerts(record(10, {"a": layer([5.0] * 4, ratio=[0.01, 0.02, 0.03, 0.5])}))
    assert (most.code, most.severity, most.heads) == ("QM004", "warning", (0, 1, 2))
    assert most.message == (
        "a: 3 of 4 heads have less than 5 % of the largest possible entropy, "
        "the worst is head 0 with 1.0 %"
    )


def test_f32_one_alert_per_layer_and_code_with_its_heads() -> None:
    loud = layer([51.0, 60.0, 70.0, 88.0], ratio=[0.5] * 4)
    mixed = layer([31.0, 60.0, 4.0, 88.0], ratio=[0.5] * 4)
    found = Alerts()(record(7, {"0": loud, "h.1.attn": mixed, "": layer([33.0, math.nan])}))
    assert [(a.code, a.layer, a.heads) for a in found] == [
        ("QM001", "0", (0, 1, 2, 3)),
        ("QM001", "h.1.attn", (1, 3)),
        ("QM008", "", (1,)),
    ]
    assert [a.message for a in found] == [
        "layer 0: 4 of 4 heads have a max logit of 50 or more, the worst is head 3 with 88.0",
        "h.1.attn: 2 of 4 heads have a max logit of 50 or more, the worst is head 3 with 88.0",
        "the model itself: head 1 has a max logit or an entropy that is not finite: nan",
    ]
    (one,) = Alerts()(record(7, {"3": layer([31.0, 4.0])}))
    assert one.message == "layer 3: head 0 has a max logit of 31.0"
    assert to_alert(json.loads(json.dumps({"kind": "alert"} | one.to_json()))) == one


def test_f32_a_lesser_code_is_silent_where_a_graver_one_speaks() -> None:
    """And is not told when the graver one is over, if it held all the time."""
    alerts = Alerts()
    saturating = layer([60.0, 61.0], ratio=[0.001, 0.2])
    calmer = layer([60.0, 61.0], ratio=[0.6, 0.6])
    found = [alerts(record(i, {"a": saturating, "b": calmer})) for i in range(3)]
    found += [alerts(record(3 + i, {"a": calmer, "b": calmer})) for i in range(9)]
    told = [(a.code, a.layer) for one in found for a in one]
    assert told == [("QM010", "a"), ("QM003", "a"), ("QM001", "b")]
    frozen = [Alerts(), layer([5.0] * 4, ratio=[1e-5, 0.5, 0.5, 0.5])]
    told = [a.code for i in range(6) for a in frozen[0](record(i, {"a": frozen[1]}))]
    assert told == ["QM003", "QM006"]
    rising = [30.0, 33.0, 36.0, 39.0, 42.0, 46.0]
    told = [a.code for i, v in enumerate(rising) for a in alerts(record(20 + i, {"c": layer([v])}))]
    assert told == ["QM001", "QM002"]


def test_f32_advice_follows_the_first_alert_of_a_code(caplog: pytest.LogCaptureFixture) -> None:
    alerts = Alerts(to=[log_line])
    with caplog.at_level(logging.INFO, logger="qknorm"):
        alerts(record(0, {"0": layer([60.0]), "1": layer([61.0])}))
        alerts(record(1, {"2": layer([62.0]), "3": layer([63.0], ratio=[0.01])}))
    assert [(a.message.count(ADVICE["QM001"]), a.message[:18]) for a in caplog.records] == [
        (1, "step 0, QM001: lay"),
        (0, "step 0, QM001: lay"),
        (0, "step 1, QM001: lay"),
        (0, "step 1, QM010: lay"),
        (0, "step 1, QM003: lay"),
    ]


def test_the_rank_is_named_where_there_are_several() -> None:
    level, closing = layer([60.0, 4.0], rank=3), layer([60.0], ratio=[0.1], rank=0)
    broken = layer([4.0, math.nan], rank=12)
    of_entropy = layer([5.0], entropy_nats=[math.nan], rank=2)
    found = Alerts()(record(0, {"a": level, "b": closing, "c": broken, "d": of_entropy}))
    assert [(a.code, a.message, a.evidence.get("rank")) for a in found] == [
        ("QM001", "a: head 0 has a max logit of 60.0 on rank 3", 3.0),
        (
            "QM010",
            "b: the softmax is saturating, with a max logit of 60.0 on rank 0 and 10 % of the largest "
            "possible entropy left",
            0.0,
        ),
        ("QM008", "c: head 1 has a max logit or an entropy that is not finite: nan on rank 12", 12.0),
        ("QM008", "d: head 0 has a max logit or an entropy that is not finite: 5.0", None),
    ]


def _growing(**sizes: list[list[float]] | list[tuple[float, float]]) -> list[Alert]:
    """A layer that grows until QM002 speaks and then QM010, with these values in each record."""
    tops = [34.0, 36.0, 38.0, 40.0, 42.0, 45.0, 60.0]
    alerts, found = Alerts(), []
    for i, top in enumerate(tops):
        other = {name: values[min(i, len(values) - 1)] for name, values in sizes.items()}
        ratio = [0.1, 0.1] if top > 50 else [0.5, 0.5]
        found += alerts(record(10 * i, {"a": layer([3.0, top], ratio=ratio, **other)}))
    return [alert for alert in found if alert.code in ("QM002", "QM010")]


def test_growth_and_saturation_name_which_of_q_and_k_has_grown() -> None:
    rms = [1.0 + 0.5 * i for i in range(7)]  # of q in the loud head: 3.5 and 4 times at the end
    growth, closing = _growing(q_rms=[[9.0, r] for r in rms], k_rms=[[2.0 + 0.1 * i] for i in range(7)])
    assert growth.message.endswith(
        "; since step 0 the RMS of q in head 1 has grown by a factor of 3.5, that of k by 1.2"
    )
    assert closing.message.endswith(
        "entropy left; since step 0 the RMS of q in head 1 has grown by a factor of 4.0, that of k "
        "by 1.3"
    )
    factors = {name: closing.evidence[name] for name in ("since", "q_growth", "k_growth")}
    assert factors == pytest.approx({"since": 0.0, "q_growth": 4.0, "k_growth": 1.3})
    for clause, sizes in {
        "k in head 1 has grown by a factor of 4.0, that of q by 0.5": {
            "q_rms": [[1.0, 1.0]] * 6 + [[9.0, 0.5]],
            "k_rms": [[r, r] for r in rms],
        },
        "RMS of q and that of k in head 1 have each grown by a factor of 4.0": {
            "q_rms": [[r, r] for r in rms],
            "k_rms": [[r] for r in rms],
        },
        # Gains say more than an RMS, and count from the first record that has them.
        "since step 10 the largest gain of k has grown by a factor of 3.0, that of q by 2.0": {
            "gain_max": [None, (1.0, 2.0), *[(2.0, 6.0)] * 5],
            "is_normed": [True],
            "q_rms": [[r, r] for r in rms],
        },
    }.items():
        assert clause in _growing(**sizes)[-1].message
    for unknown in (
        {"q_rms": [[]]},
        {"k_rms": [[math.nan]]},
        {"q_rms": [[0.0, 0.0]] * 6 + [[2.0, 2.0]]},
        {"gain_max": [*[None] * 6, (1.0, 2.0)]},
        {"q_rms": [[r, r] for r in rms], "is_normed": [True], "rms_of": ["projection"]},
    ):
        closing = _growing(**unknown)[-1]
        assert closing.message.endswith("entropy left")
        assert "q_growth" not in closing.evidence
    # Logits may also grow because q and k turn towards each other.
    closing = _growing(q_rms=[[1.0, 1.0]])[-1]
    assert closing.message.endswith("entropy left")
    assert (closing.evidence["q_growth"], closing.evidence["k_growth"]) == (1.0, 1.0)


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


def test_no_growth_warning_where_the_gains_do_not_allow_the_level() -> None:
    values = [12 * 2 ** (i / 10) for i in range(20)]
    for bound, expected in ((49.0, False), (51.0, True), (None, True)):
        alerts = Alerts()
        for step, value in enumerate(values):
            alerts(record(10 * step, {"a": layer([value], bound=bound)}))
        assert any(key[0] == "QM002" for key in alerts._standing) is expected


def test_f72_no_growth_warning_past_the_end_of_the_run() -> None:
    values = [12 * 2 ** (i / 10) for i in range(20)]
    for last_step, expected in ((None, True), (231, True), (200, False)):
        found = feed(Alerts(last_step=last_step), *values)
        assert any(alert.code == "QM002" for alert in found) is expected


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
    broken, heard = Broken(times=2), list[Alert]()
    alerts = Alerts(to=[broken, heard.append])
    for step, top in enumerate((40.0, 41.0, 42.0, 10.0)):  # QM001, and QM003 in the first record
        alerts(record(step, {"a": layer([top], ratio=[0.01 if step == 0 else 0.9])}))
    assert [(a.code, a.step, a.is_first) for a in heard] == [("QM001", 0, True), ("QM003", 0, True)]
    assert [(a.code, a.step, a.is_first) for a in broken.heard] == [("QM001", 1, True)]
    assert broken.heard[0].evidence == {"max_logit": 41.0}


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


def test_f71_advice_for_a_normed_layer_is_never_to_add_a_norm() -> None:
    """Each rule that advises QK-norm says something else where q and k are normalised already."""
    closing = {"entropy_ratio": [0.01, 0.01], "entropy_nats": [0.01, 0.01]}
    rising = [[20 * 2 ** (i / 10)] * 2 for i in range(12)]
    for is_normed in (False, True):
        alerts, said = Alerts(), {}
        for i, tops in enumerate([*rising, [60.0] * 2]):
            other = closing if i == len(rising) else {}
            made = layer(tops, is_normed=is_normed, **other)
            said |= {a.code: a.advice for a in alerts(record(10 * i, {"a": made}))}
        assert said.keys() >= {"QM001", "QM002", "QM004", "QM010"}
        adds = [code for code, advice in said.items() if "QK-norm" in advice or "add one" in advice]
        assert adds == ([] if is_normed else adds)
        assert is_normed or set(adds) >= {"QM001", "QM002", "QM004", "QM010"}

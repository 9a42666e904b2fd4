"""Models that train well are left alone: a committed run, and what the rules say of it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from qknorm.lab.timeline import Timeline
from qknorm.monitor.alerts import Alerts
from qknorm.monitor.record import Record
from qknorm.monitor.to.jsonl import to_record

RUN = Path(__file__).with_name("healthy.jsonl.xz")  # by benchmarks/healthy_run.py


def records(name: str) -> list[Record]:
    with lzma.open(RUN, "rt") as file:
        lines = [json.loads(line) for line in file]
    return [to_record(line) for line in lines if line["run"] == name]


@pytest.mark.parametrize("name", ["plain", "normed"])
def test_a_healthy_run_is_silent(name: str) -> None:
    found = records(name)
    assert len(found) == 30
    assert all(len(record.layers) == 2 for record in found)
    alerts = Alerts()
    assert [alert for record in found for alert in alerts(record)] == []
    for layer in found[-1].layers.values():
        assert (layer.bound is not None) == layer.is_normed == (name == "normed")
    timeline = Timeline(records=found, has_ended=True)
    assert timeline.findings == []


def test_the_rules_would_speak_if_it_were_not() -> None:
    alerts, codes = Alerts(), set()
    for record in records("plain"):
        for layer in record.layers.values():
            layer.max_logit[:] = [40 * value for value in layer.max_logit]
        codes |= {alert.code for alert in alerts(record)}
    assert "QM001" in codes

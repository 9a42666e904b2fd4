"""Where records go: JSON lines come back as they went in; trackers get a bounded number of scalars."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from made import layer, record
from qknorm.lab.timeline import Timeline
from qknorm.monitor import Monitor, Record, read_frame
from qknorm.monitor.alerts import Alerts
from qknorm.monitor.frame import read_rows
from qknorm.monitor.scalars import heatmap, scalars, worst_heads
from qknorm.monitor.to.jsonl import JsonLines, rank_path, read_lines, to_record
from qknorm.monitor.to.trackers import Gauges
from test_taps import C, Plain

ODD = record(
    3,
    {
        "a": layer([1.5, math.nan], first_mass=None, gain_max=(1.0, 2.0), bound=math.inf),
        "b": layer([-math.inf]),
    },
    silent={"c": "why"},
)


def same(a: Any, b: Any) -> bool:
    """Equality under which NaN equals itself."""
    return repr(a) == repr(b)


def test_records_come_back(tmp_path: Path) -> None:
    log = JsonLines(rank_path(tmp_path / "new", 2))
    log(ODD)
    for alert in Alerts()(ODD):
        log(alert)
    log.close()
    lines = list(read_lines(tmp_path / "new" / "attention.rank00002.jsonl"))
    assert [line["kind"] for line in lines] == ["record", *["alert"] * (len(lines) - 1)]
    assert len(lines) > 2
    assert same(to_record(lines[0]), ODD)
    for text in log.path.read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)  # strict JSON


def test_a_crash_costs_damaged_lines_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    for step in range(3):
        log(record(step, {"a": layer([1.0])}))
    log.close()
    text = log.path.read_text()
    log.path.write_text(text[:-20])
    assert [line["step"] for line in read_lines(log.path)] == [0, 1]
    assert not caplog.records
    log.path.write_bytes(b"\x00\x00\x00{bro\xffken\n" + text.encode())
    assert [line["step"] for line in read_lines(log.path)] == [0, 1, 2]
    assert "line 1 is damaged" in caplog.text


def test_a_new_run_keeps_the_file_of_an_old_one_and_the_end_is_told_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        log = JsonLines(tmp_path / "log.jsonl")
        log(record(step, {"a": layer([1.0])}))
        log.close(ended=True)
        log.close(ended=True)
    names = ("log.jsonl.1", "log.jsonl.2", "log.jsonl")
    found = [[(line["kind"], line.get("step")) for line in read_lines(tmp_path / n)] for n in names]
    assert found == [[("record", step), ("end", None)] for step in (1, 2, 3)]
    resumed = JsonLines(tmp_path / "log.jsonl", resume_after=3)
    resumed.close()
    assert [line["kind"] for line in read_lines(tmp_path / "log.jsonl")] == ["record"]


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLines(path)
    for step in (0, 10, 20):
        log(record(step, {"a": layer([1.0])}))
    log.close()
    log = JsonLines(path, resume_after=10)
    log(record(20, {"a": layer([2.0])}))
    log.close()
    assert [(line["step"], line["layers"]["a"]["max_logit"]) for line in read_lines(path)] == [
        (0, [1.0]),
        (10, [1.0]),
        (20, [2.0]),
    ]


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "record", "schema": 99, "step": 0}\n')
    with pytest.raises(ValueError, match="schema 99, newer than"):
        list(read_lines(path))


def test_f84_the_log_of_a_watched_run_says_what_it_is_of_and_that_it_is_over(tmp_path: Path) -> None:
    for name, failing in (("whole", False), ("failed", True), ("again", False)):
        path = tmp_path / f"{name}.jsonl"
        log, model = JsonLines(path), Plain()
        for _ in range(2 if name == "again" else 1):
            try:
                with Monitor.attach(model, every=2, to=[log, Alerts(to=[log])]) as monitor:
                    for _ in range(3):
                        model(torch.randn(2, 4, C))
                        monitor.step()
                    if failing:
                        raise InterruptedError
            except InterruptedError:
                pass
        log.close()
        lines = list(read_lines(path))
        kinds = [line["kind"] for line in lines if line["kind"] != "alert"]
        once = ["start", "record", "record", *["end"] * (not failing)]
        assert kinds == once * (2 if name == "again" else 1)
        facts = lines[0]
        assert (facts["every"], facts["sample"], facts["ranks"]) == (2, None, 1)
        assert facts["layers"] == {"": "Plain"}
        assert facts["versions"]["torch"] == torch.__version__
        assert failing or lines[-1] == {"kind": "end", "schema": 1, "steps": 3}
        timeline = Timeline()
        for line in lines:
            timeline.feed(line)
        assert timeline.has_ended == (not failing)


def test_f78_what_cannot_be_called_with_a_record_is_refused_at_once(tmp_path: Path) -> None:
    model = Plain()
    for wrong in (str(tmp_path), [str(tmp_path)], JsonLines, [JsonLines], object(), [None]):
        with pytest.raises(TypeError, match=r"a destination is called with each record, .* cannot be"):
            Monitor.attach(model, to=wrong)
    with pytest.raises(TypeError, match="pass a function that makes a gauge of a name; got str"):
        Gauges("attention")
    Monitor.attach(model, to=print).detach()  # nothing was left behind


def test_f78_a_destination_that_fails_complains_once(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = Plain(), []

    def fails(item: object) -> None:
        raise OSError("no room\nat all")

    with Monitor.attach(model, every=1, to=[fails, seen.append]) as monitor:
        for _ in range(3):
            model(torch.randn(2, 4, C))
            monitor.step()
    assert len(seen) == 3
    (line,) = [r.getMessage() for r in caplog.records if "no room" in r.getMessage()]
    assert "\n" not in line
    assert "fails" in line


def test_f84_a_record_is_read_as_a_table() -> None:
    found = record(
        30,
        {
            "blocks.0.attn": layer([1.5, 88.25], bound=120.0, note="why <not>"),
            "blocks.1.attn": layer([2.0, 3.0]),
        },
        silent={"blocks.2.attn": "it was not called"},
    )
    title, head, *rows = str(found).splitlines()
    assert title == "step 30: largest logit 88.25, lowest layer entropy 2 nats"
    assert head.split("  ")[0].strip() == "layer"
    assert rows[0].split() == ["blocks.0.attn", "88.25", "1", "120", "2", "0.5", "1", "1"]
    assert rows[1].split() == ["blocks.1.attn", "3", "1", "-", "2", "0.5", "1", "1"]
    assert len({len(line) for line in (head, *rows[:2])}) == 1, "the columns are aligned"
    assert rows[2:] == ["blocks.0.attn: why <not>", "blocks.2.attn: nothing was seen, it was not called"]
    page = found._repr_html_()
    assert page.count("<tr>") == 3
    assert "why &lt;not&gt;" in page
    assert "nan" in str(ODD)
    assert str(record(0, {})) == "step 0: no attention was seen"


@pytest.fixture
def log_of_three(tmp_path: Path) -> Path:
    log = JsonLines(rank_path(tmp_path, 0))
    log.run_started({})
    log(record(0, {"a": layer([1.0, 2.0, 3.0, 4.0], k_rms=[0.5, 0.7], k_rms_cv=[0.0, 0.1], bound=8.0)}))
    log(ODD)
    log(record(3, {"a": layer([5.0])}, phase="eval"))
    log.close()
    return log.path


def test_f84_a_log_becomes_rows(log_of_three: Path, tmp_path: Path) -> None:
    rows = list(read_rows(tmp_path))
    assert same(rows, list(read_rows(log_of_three)))
    assert [(row["step"], row["phase"], row["layer"], row["head"]) for row in rows] == [
        *((0, "train", "a", head) for head in range(4)),
        *((3, "train", "a", head) for head in range(2)),
        (3, "train", "b", 0),
        (3, "eval", "a", 0),
    ]
    assert same([row["max_logit"] for row in rows[:6]], [1.0, 2.0, 3.0, 4.0, 1.5, math.nan])
    assert [row["k_rms"] for row in rows[:4]] == [0.5, 0.5, 0.7, 0.7]
    assert [row["bound"] for row in rows[:5]] == [8.0] * 4 + [math.inf]
    assert rows[4]["first_mass"] is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no log"):
        list(read_rows(tmp_path / "empty"))


def test_f84_a_log_becomes_a_data_frame(log_of_three: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs the extra qknorm[pandas]")
    frame = read_frame(log_of_three)
    assert frame.equals(pandas.DataFrame(list(read_rows(log_of_three))))
    assert list(frame.max_logit[:5]) == [1.0, 2.0, 3.0, 4.0, 1.5]
    assert frame.first_mass.isna()[4]
    assert frame.bound.dtype == float


def big() -> Record:
    return record(7, {f"l{i}": layer([float(i + j) for j in range(64)]) for i in range(64)})


def test_a_large_model_gives_few_scalars() -> None:
    found = scalars(big())
    assert len(found) < 30
    assert found["attention/max_logit"] == found["attention/worst_1/max_logit"] == 126.0
    assert found["attention/max_logit_p50"] == 63.0
    (first, *_) = worst_heads(big())
    assert (first.layer, first.head) == ("l63", 63)
    assert len(heatmap(big(), "max_logit")) == 64
    assert scalars(record(0, {})) == {}
    assert all(
        name.startswith("attention_eval/")
        for name in scalars(record(0, {"a": layer([1.0])}, phase="eval"))
    )


def test_nan_is_never_hidden() -> None:
    found = scalars(ODD)
    assert math.isnan(found["attention/max_logit"])
    assert math.isnan(found["attention/max_logit_p50"])
    assert math.isnan(worst_heads(ODD)[0].max_logit)

"""`qknorm watch`: what it shows of a run, finished, running, or written elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import made
from made import layer
from qknorm.cli.console import RunProgress
from qknorm.cli.watch import spark, view
from qknorm.lab.follow import Follower
from qknorm.lab.timeline import Timeline
from qknorm.monitor import LayerRecord, Record
from qknorm.monitor.alerts import ADVICE, Alerts
from qknorm.monitor.to.jsonl import JsonLines, rank_path

MODULE = [sys.executable, "-m", "qknorm", "watch"]


def growing(count: int, layers: int = 2) -> list[Record]:
    """Layer 1 doubles every 100 steps from 8."""

    def at(i: int, n: int) -> LayerRecord:
        tops = [8 * 2 ** (i / 10) if n == 1 else 3.0, 2.0]
        return layer(tops, [0.25, 0.25], entropy_nats=[1.0, 1.0])

    return [
        made.record(10 * i, {f"model.layers.{n}.attn": at(i, n) for n in range(layers)})
        for i in range(count)
    ]


def write(folder: Path, records: list[Record]) -> Path:
    log = JsonLines(rank_path(folder, 0))
    alerts = Alerts(to=[log])
    for record in records:
        log(record)
        alerts(record)
    log.close()
    return folder


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "100"},
    )


def shown(timeline: Timeline, height: int | None = None, path: Path = Path("runs/mine/log")) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(timeline, path, height))
    return console.export_text()


def timeline_of(records: list[Record]) -> Timeline:
    timeline = Timeline()
    alerts = Alerts()
    for record in records:
        timeline.records.append(record)
        timeline.alerts += alerts(record)
    return timeline


def test_a_finished_look_at_a_monitors_file(tmp_path: Path) -> None:
    ended = run(write(tmp_path / "mine", growing(25)), "--once")
    assert ended.returncode == 0, ended.stderr
    assert "step 240" in ended.stdout
    assert "max logit 42.2" in " ".join(ended.stdout.split())  # a long path breaks the line
    assert "sharpest heads  1.0 42.2 (0.250)" in ended.stdout
    # From 42.2 at step 240 to 50 it would take 24.4 steps at this pace.
    assert "50 at step 247 to 301" in ended.stdout
    said = " ".join(ended.stdout.split())
    assert "grown to 42.2; it is expected to reach 50 between steps 247 and 301" in said


def test_json_for_scripts(tmp_path: Path) -> None:
    ended = run(write(tmp_path, growing(25)), "--json")
    found = json.loads(ended.stdout)
    assert found["step"] == 240
    assert found["ended"] is False
    assert found["worst_heads"][0]["layer"] == "model.layers.1.attn"
    assert {alert["code"] for alert in found["alerts"]} >= {"QM001", "QM002"}


@pytest.mark.parametrize(
    "arguments", [["{}/nothing"], ["{}"], ["{}/attention.rank00000.jsonl", "--interval", "0"]]
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    if len(arguments) > 1:
        write(tmp_path, growing(2))
    ended = run(*(a.format(tmp_path) for a in arguments))
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stderr.startswith("error: ")


def test_many_layers_are_cut_to_the_height_of_the_terminal_by_the_largest_logits() -> None:
    text = shown(timeline_of(growing(25, layers=60)), height=30)
    assert len(text.splitlines()) <= 30
    assert "and 44 more" in text
    assert "42.2" in text


def test_nothing_recorded_yet_and_what_is_not_finite() -> None:
    timeline = Timeline()
    timeline.feed({"kind": "step", "step": 3, "loss": float("nan")})
    assert "no attention record yet" in shown(timeline)
    broken = Record(step=5, phase="train", layers={"a": layer([float("nan")])})
    text = shown(
        timeline_of(
            [*[Record(step=i, phase="train", layers={"a": layer([9.0])}) for i in range(3)], broken]
        )
    )
    assert "not finite" in text
    assert "QM008" in text


def test_f72_a_forecast_ends_with_the_run(tmp_path: Path) -> None:
    """At its planned end, which the lab writes beside its log, and when it is over."""
    timeline = timeline_of(growing(25))
    for planned, is_shown in (
        (None, True),
        ("{}", True),
        ('{"steps": 301}', True),
        ('{"steps": 300}', False),
    ):
        if planned is not None:
            (tmp_path / "config.json").write_text(planned)
        assert ("50 at step 247 to 301" in shown(timeline, path=tmp_path / "log")) is is_shown
    (tmp_path / "config.json").unlink()
    timeline.feed({"kind": "end"})
    assert "50 at" not in shown(timeline, path=tmp_path / "log")


def test_f32_the_terminal_says_what_to_do_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr("qknorm.cli.console.err", said)
    saturating = {str(n): layer([60.0 + n] * 4, [0.1] * 4) for n in range(4)}
    progress = RunProgress(quiet=False)
    for alert in Alerts()(made.record(20, saturating)):
        progress.update(0, "none, lr 0.1", 40, alert)
    lines = said.export_text().splitlines()
    assert [line.split(": ")[0] for line in lines] == ["none, lr 0.1  alarm QM010 at step 20"] * 4
    assert [f"layer {n}: the softmax" in line for n, line in enumerate(lines)] == [True] * 4
    assert [ADVICE["QM010"] in line for line in lines] == [True, False, False, False]


def test_a_sparkline_keeps_peaks() -> None:
    values = [0.0] * 100
    values[50] = 1.0
    line = spark(values, 0.0, 1.0)
    assert len(line) <= 16
    assert line.count("\u2588") == 1
    assert spark([], 0.0, 1.0) == ""


# Following ----------------------------------------------------------------------------------------


def test_a_follower_gives_each_line_once_and_only_when_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    follower = Follower(path)
    assert follower.poll() == []  # not there yet
    with path.open("w") as file:
        file.write('{"kind": "step", "step": 1}\n{"kind": "step", "step": 2')
        file.flush()
        assert follower.poll() == [{"kind": "step", "step": 1}]
        assert follower.poll() == []
        file.write('}\nno json\n{"kind": "step", "step": 3, "loss": "NaN"}\n')
        file.flush()
    two, nan = follower.poll()
    assert two == {"kind": "step", "step": 2}
    assert nan["loss"] != nan["loss"]
    assert "line 3 is damaged and left out: it is not JSON" in caplog.text
    assert not follower.restarted
    path.rename(tmp_path / "away")
    assert follower.poll() == []
    path.write_text('{"kind": "end"}\n')  # a new run in its place
    assert follower.poll() == [{"kind": "end"}]
    assert follower.restarted


def test_it_follows_a_file_that_another_process_writes_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    """Under a terminal, as a person sees it."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal, which this system has not")
    folder = write(tmp_path / "mine", growing(3))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*MODULE, str(folder), "--interval", "0.2"],
        stdin=slave, stdout=slave, stderr=slave,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)

    def wait_for(word: str) -> str:
        seen, until = "", time.monotonic() + 60
        while word not in seen and time.monotonic() < until:
            time.sleep(0.1)
            try:
                seen += os.read(master, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                continue
            except OSError:  # the other end is closed
                break
        return seen

    assert "step 20" in wait_for("step 20")
    log = JsonLines(rank_path(folder, 0), resume_after=20)
    for record in growing(25)[3:]:
        log(record)
    log.close()
    assert "step 240" in wait_for("step 240")
    process.send_signal(signal.SIGINT)
    wait_for("never said")
    assert process.wait(timeout=30) == 0
    os.close(master)

"""The report in a headless browser: every plot drawn, no error, usable on a phone; and its alerts."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from made import layer
from qknorm.lab import CompareConfig, DataConfig, ModelConfig, TrainConfig, compare
from qknorm.lab.report import write_report
from qknorm.lab.runs import find_runs, load_runs
from qknorm.monitor import Record
from qknorm.monitor.alerts import Alerts
from qknorm.monitor.to.jsonl import JsonLines, rank_path
from test_report import figures_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="looking at the page needs the program chromium")


def watched_elsewhere(folder: Path, layers: int, heads: int, records: int) -> Path:
    """The file of a monitor in somebody else's trainer: logits double every 100 steps."""
    log = JsonLines(rank_path(folder, 0))
    alerts = Alerts(to=[log])
    for i in range(records):
        tops = [
            [8 * 2 ** (i / 10) * (1 + h + n) / (layers + heads) for h in range(heads)]
            for n in range(layers)
        ]
        names = [f"model.layers.{n}.self_attn" for n in range(layers)]
        record = Record(
            step=10 * i,
            phase="train",
            layers={
                name: layer(top, [0.5 / v for v in top]) for name, top in zip(names, tops, strict=True)
            },
        )
        log(record)
        alerts(record)
    log.close()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Twins of the lab and a run watched elsewhere, side by side."""
    root = tmp_path_factory.mktemp("runs")
    text = root / "text.txt"
    text.write_text("".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400)))
    torch.manual_seed(0)
    base = TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=20,
        batch=2,
        context=16,
        warmup=2,
        eval_batches=2,
        stats_every=5,
    )
    compare(CompareConfig(base=base, lrs=(1e-2,)), root / "grid")
    watched_elsewhere(root / "grid" / "elsewhere", layers=6, heads=4, records=40)
    return root / "grid"


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_report(load_runs(find_runs([folder])), folder / "report.html").read_text()


def look(page: str, folder: Path, width: int | None = None) -> tuple[str, list[str]]:
    """The document after its scripts ran, and what it told the console."""
    file = folder / "page.html"
    # A message of our own shows that messages are seen at all. In a frame the page is narrow.
    tell = "console.error(`canary ${document.documentElement.scrollWidth} ${window.innerWidth}`)"
    page = page.replace("</body>", f"<script>setTimeout(() => {tell}, 1500)</script></body>")
    if width is not None:
        page = f'<iframe width="{width}" height="800" srcdoc="{escape(page)}"></iframe>'
    file.write_text(page)
    flags = [
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
        "enable-logging=stderr", "virtual-time-budget=8000", "dump-dom",
        f"user-data-dir={folder / 'profile'}",
    ]  # fmt: skip
    assert CHROMIUM is not None
    ended = subprocess.run(
        [CHROMIUM, *(f"--{flag}" for flag in flags), file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


@browser
def test_every_plot_is_drawn_without_an_error(page: str, tmp_path: Path) -> None:
    dom, messages = look(page, tmp_path)
    assert len(messages) == 1, messages
    assert "canary" in messages[0]
    for name, plot in figures_of(page).items():
        start = dom.index(f'<div id="{name}"')
        drawn = dom[start : dom.index("</figure>", start)]
        assert 'class="main-svg"' in drawn, name
        if plot["data"][0]["type"] == "scatter":
            paths = re.findall(r'class="js-line"[^>]* d="(.*?)"', drawn)
            lines = [trace for trace in plot["data"] if trace["mode"] == "lines"]
            # The legend's strokes have no corner.
            assert len([path for path in paths if "L" in path]) == len(lines), name
            marks = [trace for trace in plot["data"] if trace["mode"] == "markers"]
            assert drawn.count('class="point"') == sum(len(trace["x"]) for trace in marks), name
            bands = [trace for trace in plot["data"] if trace.get("fill")]
            assert drawn.count('class="js-fill"') == len(bands), name
        elif name.startswith("time"):
            assert "<image" in drawn, name
        else:
            assert drawn.count("heatmap-label") >= 4, name
    body = re.sub(r"<(script|style).*?</\1>", "", dom, flags=re.S)
    for word in ("NaN", "undefined"):
        assert word not in re.sub(r"<[^>]*>", "", body)


@browser
def test_a_phone_shows_it_without_scrolling_sideways(page: str, tmp_path: Path) -> None:
    _, messages = look(page, tmp_path, width=390)
    assert len(messages) == 1, messages
    found = re.search(r"canary (\d+) (\d+)", messages[0])
    assert found is not None
    content, window = map(int, found.groups())
    assert window == 390
    assert content <= window


def test_alerts_and_the_forecast_are_on_the_time_axis(page: str, folder: Path) -> None:
    data = figures_of(page)["max-logit"]["data"]
    run = next(run for run in load_runs(find_runs([folder])) if run.name == "elsewhere")
    growth = next(alert for alert in run.alerts if alert.code == "QM002")
    band = next(trace for trace in data if trace["mode"] == "none")
    assert band["x"] == [growth.step, growth.evidence["early"], growth.evidence["late"], growth.step]
    assert band["y"][1:3] == [50.0, 50.0]
    marks = [trace for trace in data if trace["name"] == "elsewhere, warning"]
    assert growth.step in marks[0]["x"]
    assert any("QM002" in text for text in marks[0]["text"])
    # Each mark lies on the curve.
    curve = next(trace for trace in data if trace["name"] == "elsewhere")
    height = dict(zip(curve["x"], curve["y"], strict=True))
    assert all(height[x] == y for x, y in zip(marks[0]["x"], marks[0]["y"], strict=True))
    assert growth.message in page
    assert page.count("Lower the peak rate") == 1  # F32: once for a code and a run


def test_heads_over_time_and_layers_where_there_are_too_many_heads(page: str, tmp_path: Path) -> None:
    plots = figures_of(page)
    name = next(
        n for n, plot in plots.items() if n.startswith("time") and len(plot["data"][0]["z"]) == 24
    )
    heat = plots[name]["data"][0]
    assert heat["x"] == [10 * i for i in range(40)]
    assert [row[0] for row in heat["customdata"]][:5] == ["0.0", "0.1", "0.2", "0.3", "1.0"]
    many = watched_elsewhere(tmp_path / "many", layers=24, heads=16, records=700)
    text = write_report(load_runs([many]), tmp_path / "many.html").read_text()
    heat = next(plot for n, plot in figures_of(text).items() if n.startswith("time"))["data"][0]
    assert len(heat["z"]) == 24
    assert len(heat["x"]) <= 300
    assert "not ended" in text

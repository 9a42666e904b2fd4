"""F84: two runs that a user's own trainer made under the monitor, side by side in a report."""

from __future__ import annotations

from pathlib import Path

from made import layer, record
from qknorm.lab.report import write_report
from qknorm.lab.runs import find_runs, load_runs
from qknorm.monitor import JsonLines, rank_path


def write(folder: Path, tops: list[float], *, ended: bool, every: int = 10) -> None:
    log = JsonLines(rank_path(folder, 0))
    log.run_started({"every": every})
    for i, top in enumerate(tops):
        log({"kind": "step", "step": i * every, "loss": 3.0 - 0.1 * i})
        log(record(i * every, {"blocks.0.attn": layer([1.0, top]), "blocks.1.attn": layer([0.5, 0.25])}))
    if ended:
        log.run_ended({})
    log.close()


def test_f84_two_watched_runs_are_compared_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "normed", [2.0, 4.0, 8.0], ended=True)
    write(tmp_path / "plain", [2.0, 40.0, 16.0, 99.0], ended=False)
    write(tmp_path / "other", [5.0], ended=True, every=7)
    runs = load_runs(find_runs([tmp_path / name for name in ("normed", "plain", "other")]))
    page = write_report(runs, tmp_path / "report.html").read_text()
    for sentence in (
        "normed ended at step 20. Its largest logit was 8.0, in layer blocks.0.attn, ",
        "plain did not report its end; its newest step is 30. Its largest logit was 99.0, "
        "in layer blocks.0.attn, head 1, at step 30.",
        "At step 20, the last that both observed, the largest logit of plain is 2.0 times as large as "
        "that of normed (16.0 against 8.0), and the entropy of its sharpest layer is 2.000 nats against "
        "2.000. Their losses there are 2.800 and 2.800.",
        "At step 0, the last that both observed, the largest logit of other is 2.5 times as large as "
        "that of normed (5.0 against 2.0)",
    ):
        assert sentence in page
    assert "Results of 3 runs" in page
    assert "No run has ended yet" not in page
    assert "twins" not in page.split("<h1>")[1].split("</h1>")[0]

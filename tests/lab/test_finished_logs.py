"""Finished logs of other tools, in `qknorm watch` and `qknorm report`, and their exit codes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qknorm.cli.report import report
from qknorm.cli.watch import watch
from qknorm.lab.runs import find_runs, load_runs

STEPS = 30


def rows(kind: str) -> list[dict[str, float]]:
    """Losses, and the largest logit as the monitor's destinations write it."""
    found = []
    for i in range(STEPS):
        loss = 4.0 - 0.1 * i if kind != "diverging" or i < 15 else 6.0
        row = {"step": 10 * (i + 1), "loss": loss, "grad_norm": 1.0}
        if kind == "broken" and i == 20:
            row["loss"] = math.nan
        if kind == "loud":
            row["attention/max_logit"] = 3.0 * i
        if kind == "bounded":
            row |= {"attention/max_logit": 1.6 * i, "attention/bound": 49.0}
        found.append(row)
    return found


def trainer_state(folder: Path, kind: str) -> Path:
    history = [*rows(kind), {"step": 300, "eval_loss": 3.0}, {"step": 300, "train_loss": 99.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 300, "log_history": history}))
    return folder


def csv_file(folder: Path, kind: str) -> Path:
    """As Lightning writes it: a row for each call, with gaps."""
    names = [
        "epoch",
        "step",
        "train_loss",
        "grad_norm",
        "attention/max_logit",
        "attention/bound",
        "note",
    ]
    lines = [",".join(names), "0,0,,,,,begun"]
    for row in rows(kind):
        values = {"train_loss": row["loss"]} | row
        lines.append(",".join(str(values.get(name, "")) for name in names))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder / "metrics.csv"


def tensorboard(folder: Path, kind: str) -> Path:
    """As Hugging Face's Trainer writes it."""
    pytest.importorskip("tensorboard", reason="needs the extra qknorm[tensorboard]")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for row in rows(kind):
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(f"train/{name}", value, row["step"])
        writer.add_scalar("train/train_loss", 99.0, 10 * STEPS)  # the mean of the whole run
    return folder


Write = Callable[[Path, str], Path]


def exit_code(path: Path, fail_on: str | None) -> int:
    return watch(path, interval=2.0, once=False, fail_on=fail_on, as_json=True)


@pytest.mark.parametrize("write", [trainer_state, csv_file, tensorboard])
def test_a_log_of_another_tool_is_read_and_judged(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"healthy": [], "bounded": ["QM001"], "loud": ["QM001", "QM002", "QM001"]}
    kinds |= {"diverging": ["QM012"], "broken": ["QM011"]}
    for kind, codes in kinds.items():
        (tmp_path / kind).mkdir()
        path = write(tmp_path / kind, kind)
        assert exit_code(path, None) == 0
        found = json.loads(capsys.readouterr().out)
        assert [alert["code"] for alert in found["alerts"]] == codes, kind
        assert (found["step"], found["ended"]) == (300, True)
        assert exit_code(path, "warning") == int(kind not in ("healthy", "bounded"))
        assert exit_code(path, "alarm") == int(kind in ("diverging", "broken"))
        capsys.readouterr()
    (run,) = load_runs(find_runs([tmp_path / "loud"]))
    assert [line["step"] for line in run.steps] == [10 * (i + 1) for i in range(STEPS)]
    assert run.steps[0]["grad_norm"] == 1.0
    assert run.steps[-1]["loss"] == pytest.approx(4.0 - 0.1 * (STEPS - 1))
    assert run.records[-1].max_logit == pytest.approx(3.0 * (STEPS - 1))


def test_watch_and_report_of_such_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_file(tmp_path, "diverging")
    assert watch(path, interval=2.0, once=False, fail_on=None, as_json=False) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "QM012 the run diverged: the last 10 % stay more than 1.0 above the best loss, 2.600" in shown
    assert "no attention was recorded" in shown
    assert report([path], output=None, fail_on="alarm", as_json=True) == 1
    page = (tmp_path / "report.html").read_text()
    assert "alarm QM012 at step 300" in page
    assert "Its last training loss is 6.000. Nothing is known of its attention." in page
    assert report([path], output=None, fail_on=None, as_json=True) == 0
    trainer_state(tmp_path, "loud")
    assert report([tmp_path / "trainer_state.json"], output=None, fail_on="alarm", as_json=True) == 0
    page = (tmp_path / "report.html").read_text()
    assert "ended at step 300. Its largest logit was 87.0 at step 300." in page
    capsys.readouterr()
    assert watch(tmp_path, interval=2.0, once=False, fail_on=None, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "the whole model: head 0 has a max logit of 51.0" in " ".join(shown.split())
    assert "nan" not in shown


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("trainer_state.json", "[]", 'it has no list "log_history"'),
        ("trainer_state.json", '{"log_history": [1]}', 'it has no list "log_history"'),
        ("trainer_state.json", "no json", 'it has no list "log_history"'),
        ("metrics.csv", "a,b\n1,2\n", "has no loss and no attention/max_logit"),
        ("metrics.csv", "", "has no loss and no attention/max_logit"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)):
        exit_code(tmp_path, None)


def test_the_latest_checkpoint_and_all_event_files_of_a_folder_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, kind in {500: "healthy", 1000: "loud", 9: "broken"}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        trainer_state(tmp_path / f"checkpoint-{step}", kind)
    assert exit_code(tmp_path, "warning") == 1
    assert exit_code(tmp_path, "alarm") == 0
    folder = tmp_path / "resumed"
    folder.mkdir()
    tensorboard(folder, "healthy")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), filename_suffix=".resumed") as writer:
        writer.add_scalar("train/loss", math.nan, 310)
    capsys.readouterr()
    assert exit_code(folder, "alarm") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(alert["code"], alert["step"]) for alert in found["alerts"]] == [("QM011", 310)]
    assert found["alerts"][0]["message"] == "the training loss is not finite"


def test_a_csv_without_steps_is_read_by_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("\ufeffLoss,note\n3.0,a\n,b\n2.5,c\n", encoding="utf-8")
    assert exit_code(path, "alarm") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["loss"]) == (2, 2.5)
    path.write_text("step,loss\n5,3.0\n,2.0\n6,2.5\n")  # a row that does not say its step
    assert exit_code(path, "alarm") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
    (run,) = load_runs(find_runs([path]))
    assert [line["step"] for line in run.steps] == [5, 6]


def test_an_unknown_severity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--fail-on takes warning or alarm; got info"):
        exit_code(csv_file(tmp_path, "healthy"), "info")


def test_a_run_that_goes_on_has_not_diverged_yet(tmp_path: Path) -> None:
    lines: list[Any] = [{"kind": "step", **row} for row in rows("diverging")]
    log = tmp_path / "attention.rank00000.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert exit_code(tmp_path, "alarm") == 0
    log.write_text(log.read_text() + '{"kind": "end"}\n')
    assert exit_code(tmp_path, "alarm") == 1

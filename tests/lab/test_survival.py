"""Runs that survive closed terminals and pipes, kills, second runs and forgotten flags (F75 to F77)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qknorm.cli import main
from qknorm.lab import checkpoint, train
from qknorm.lab.files import CHECKPOINT_FILE, LOCK_FILE, lock, unlock
from qknorm.lab.trainer import TrainConfig, saved_config
from runs import CHILD_ENV, assert_same_run, at_step, files, one_line, stop, strict_lines, train_command


def wait_for(log: Path, lines: int, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") >= lines):
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    """The command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["qknorm", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


# F75: a checkpoint, whatever ends the run ---------------------------------------------------------


def test_f75_who_reads_the_output_is_gone(text: Path, tmp_path: Path) -> None:
    """As in `qknorm train ... 2>&1 | head -1`."""
    folder = tmp_path / "run"
    reading, writing = os.pipe()
    command = train_command(folder, text, "--steps", "2000")
    child = subprocess.Popen(command, stdout=writing, stderr=writing, text=True, env=CHILD_ENV)
    os.close(writing)
    try:
        wait_for(folder / "metrics.jsonl", 5, child)
        os.close(reading)
        child.wait(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 1
    done = checkpoint.load(folder / CHECKPOINT_FILE)["step"]
    assert 5 <= done < 2000
    assert [line["step"] for line in strict_lines(folder, "step")] == list(range(1, done + 1))
    assert not (folder / LOCK_FILE).exists()


def test_f75_a_broken_pipe_is_a_request_to_stop(config: TrainConfig, tmp_path: Path) -> None:
    heard = []

    def on_item(item: Any) -> None:
        heard.append(item)
        if len(heard) == 4:
            raise BrokenPipeError

    outcome = train(config, tmp_path / "run", on_item=on_item)
    assert outcome.stopped
    assert outcome.final is None
    assert len(heard) == 4  # nobody listens any more
    assert checkpoint.load(tmp_path / "run" / CHECKPOINT_FILE)["step"] == outcome.steps
    train(config, tmp_path / "whole")
    train(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_f75_a_run_under_nohup_outlives_its_terminal(config: TrainConfig, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = replace(config, steps=5)
        assert train(run, tmp_path / "run", on_item=at_step(3, stop(signal.SIGHUP))).steps == 5
    finally:
        signal.signal(signal.SIGHUP, before)


def test_f75_a_killed_process_loses_at_most_what_came_after_the_last_checkpoint(
    text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = train_command(folder, text, "--steps", "2000", "--checkpoint-every", "10")
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=CHILD_ENV)
    try:
        wait_for(folder / "metrics.jsonl", 40, child)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
    logged = [
        line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"step_ms"' in line
    ]
    done = checkpoint.load(folder / CHECKPOINT_FILE)["step"]
    assert done % 10 == 0
    assert done >= len(logged) - 11
    # The lock of a process that is gone holds nobody.
    unlock(folder, lock(folder))


def test_f75_checkpoints_are_periodic_unless_switched_off() -> None:
    assert 0 < TrainConfig().checkpoint_every < TrainConfig().steps


# F76: one run at a time in a folder ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["resume", "overwrite", "neither"])
def test_f76_a_second_run_in_a_folder_is_refused_and_harms_nothing(
    config: TrainConfig, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "run"
    options = {} if how == "neither" else {how: True}
    refused = []

    def second() -> None:
        checkpoint_of_first = folder / CHECKPOINT_FILE
        assert checkpoint_of_first.exists()
        with pytest.raises(ValueError, match="going on") as error:
            train(replace(config, lr=3e-2) if how != "resume" else config, folder, **options)
        refused.append(one_line(error))

    run = replace(config, checkpoint_every=5)
    train(run, folder, on_item=at_step(12, second))
    assert len(refused) == 1
    assert str(os.getpid()) in refused[0]
    train(run, tmp_path / "whole")
    assert_same_run(folder, tmp_path / "whole")
    assert not (folder / LOCK_FILE).exists()


def test_f76_another_process_is_named(config: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; from qknorm.lab.files import lock; "
        "held = lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {child.pid}"):
            train(config, folder, overwrite=True)
    finally:
        child.kill()
        child.wait()
    assert train(replace(config, steps=2), folder, overwrite=True).steps == 2


def test_f76_a_comparison_is_not_deleted_under_a_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "both"
    sizes = ("--data", text, "--layers", 1, "--dim", 16, "--heads", 2, "--context", 16, "--batch", 2)
    assert cli(monkeypatch, "compare", folder, *sizes, "--steps", 3, "--warmup", 1, "--json") == 0
    before = files(folder)
    run = next(path.parent for path in folder.glob("qk-*/metrics.jsonl"))
    held = lock(run)
    try:
        again = cli(monkeypatch, "compare", folder, *sizes, "--steps", 3, "--overwrite", "--json")
        assert again == 2
        assert {k: v for k, v in files(folder).items() if k.name != LOCK_FILE} == before
    finally:
        unlock(run, held)


# F77: resuming from the folder alone --------------------------------------------------------------


def test_f77_resume_needs_no_other_flag(
    config: TrainConfig, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(monkeypatch, "train", stopped, "--resume", "--json") == 0
    train(config, tmp_path / "whole")
    assert_same_run(stopped, tmp_path / "whole")


def test_f77_the_saved_configuration_is_read_back_whole(config: TrainConfig, stopped: Path) -> None:
    assert saved_config(stopped) == config


def test_f77_a_flag_that_differs_is_named_with_both_values(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(stopped)
    for given, flag, saved in (
        (("--lr", "0.5"), "--lr is 0.5", "0.01"),
        (("--layers", "3"), "--layers is 3", "2"),
        (("--steps", "61"), "--steps is 61", "60"),
        (("--data", "stdlib"), "--data is stdlib", "text.txt"),
        (("--arm", "none"), "--arm is none", "qk"),
    ):
        assert cli(monkeypatch, "train", stopped, "--resume", *given) == 2
        shown = capsys.readouterr().err
        assert flag in shown
        assert saved in shown
    assert files(stopped) == before


def test_f77_what_may_change_may_be_given(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--lr", "0.01", "--checkpoint-every", "7", "--stats-every", "3")
    assert cli(monkeypatch, "train", stopped, "--resume", *given, "--json") == 0
    saved = json.loads((stopped / "config.json").read_text())
    assert (saved["checkpoint_every"], saved["stats_every"]) == (7, 3)


def test_f77_a_taken_folder_names_resume_before_what_deletes(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(monkeypatch, "train", stopped) == 2
    shown = capsys.readouterr().err
    assert shown.index("--resume") < shown.index("--overwrite")
    assert "to delete what is there" in shown


def test_a_first_save_that_fails_does_not_speak_of_resuming(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "replace_file", full)
    with pytest.raises(checkpoint.CheckpointError, match="no earlier checkpoint") as error:
        train(config, tmp_path / "run", on_item=at_step(3, stop()))
    assert "resume" not in one_line(error)

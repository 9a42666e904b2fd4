"""Resume is exact, signals end a run properly."""

import copy
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from qknorm.lab import checkpoint, train
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.trainer import Trainer
from runs import (
    CHILD_ENV,
    arm,
    assert_same_bits,
    assert_same_run,
    at_step,
    files,
    one_line,
    stop,
    strict_lines,
    train_command,
    without_clocks,
)

# Resume -----------------------------------------------------------------------------------------


def assert_each_once(folder):
    """All 60 steps, what was seen of every seventh, and the end, once and in order."""
    steps = [line["step"] for line in strict_lines(folder, "step")]
    assert steps == [*range(1, 61)]
    records = [(line["phase"], line["step"]) for line in strict_lines(folder, "record")]
    assert records == [*(("train", step) for step in range(7, 61, 7)), ("eval", 60)]
    assert [line["kind"] for line in strict_lines(folder)][-3:] == ["final", "record", "end"]


@pytest.mark.parametrize("name", ["qk", "qk-decay", "qk+sink", "none", "muon"])
def test_sixty_steps_equal_thirty_and_resume_and_thirty_to_the_bit(config, tmp_path, name):
    run = replace(config, optimizer="muon") if name == "muon" else arm(config, name)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(run, whole).steps == 60
    first = train(run, halves, on_item=at_step(30, stop()))
    assert (first.final, first.steps) == (None, 30)
    assert [line["step"] for line in strict_lines(halves, "step")] == list(range(1, 31))
    assert checkpoint.load(halves / CHECKPOINT_FILE)["step"] == 30
    second = train(run, halves, resume=True)
    assert second.steps == 60
    assert_same_run(halves, whole)
    assert_each_once(halves)


def test_the_bits_depend_on_the_optimizer_state_too(config, tmp_path):
    """That the comparison above can fail: moments forgotten at step 30 change the weights."""
    trainer = Trainer(config)
    for _ in range(30):
        trainer.train_step()
    state = copy.deepcopy(trainer.state())
    resumed, forgetful = Trainer(config), Trainer(config)
    resumed.restore(copy.deepcopy(state))
    forgetful.restore(state | {"optimizers": Trainer(config).state()["optimizers"]})
    for one in (trainer, resumed, forgetful):
        one.train_step()
        one.train_step()
    assert_same_bits(trainer.model.state_dict(), resumed.model.state_dict())
    with pytest.raises(AssertionError):
        assert_same_bits(trainer.model.state_dict(), forgetful.model.state_dict())


def test_a_crash_after_a_checkpoint_resumes_from_it_and_each_step_stands_in_the_log_once(
    config, tmp_path
):
    class CrashError(Exception):
        pass

    def crash():
        raise CrashError

    run = replace(config, checkpoint_every=10)
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    train(run, whole)
    with pytest.raises(CrashError):
        train(run, crashed, on_item=at_step(47, crash))
    assert checkpoint.load(crashed / CHECKPOINT_FILE)["step"] == 40
    # What a killed process leaves: lines past the checkpoint, the last of them cut short.
    with (crashed / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "step", "st')
    train(run, crashed, resume=True)
    assert_same_run(crashed, whole)


def test_resuming_twice_is_as_good_as_once(config, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole)
    train(config, parts, on_item=at_step(1, stop()))
    train(config, parts, resume=True, on_item=at_step(59, stop()))
    train(config, parts, resume=True)
    assert_same_run(parts, whole)


def test_resuming_a_run_that_has_ended_changes_nothing(config, tmp_path):
    folder = tmp_path / "run"
    run = replace(config, steps=8)
    first = train(run, folder)
    before = without_clocks(folder)
    again = train(run, folder, resume=True)
    assert again.final["final_loss"] == first.final["final_loss"]
    assert without_clocks(folder) == before


def test_bf16_and_constant_schedule_resume_to_the_bit(config, tmp_path):
    run = replace(config, steps=12, dtype="bfloat16", schedule="constant", warmup=0)
    train(run, tmp_path / "whole")
    train(run, tmp_path / "parts", on_item=at_step(6, stop()))
    train(run, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_resume_may_change_how_often_one_looks_and_saves_and_nothing_else(config, stopped, tmp_path):
    looser = replace(config, steps=60, stats_every=3, checkpoint_every=20)
    train(looser, stopped, resume=True)
    train(config, tmp_path / "whole")
    states = [checkpoint.load(f / CHECKPOINT_FILE) for f in (stopped, tmp_path / "whole")]
    assert_same_bits(states[0]["model"], states[1]["model"])


@pytest.mark.parametrize(
    "change",
    [{"lr": 2e-2}, {"seed": 1}, {"steps": 61}, {"batch": 4}, {"z_loss": 0.0}, {"warmup": 11}],
    ids=lambda change: next(iter(change)),
)
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(config, stopped, change):
    before = files(stopped)
    with pytest.raises(ValueError, match=next(iter(change))) as error:
        train(replace(config, **change), stopped, resume=True)
    one_line(error)
    assert files(stopped) == before


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(config, stopped):
    before = files(stopped)
    for name in ("none", "qk-decay"):
        with pytest.raises(ValueError, match="model") as error:
            train(arm(config, name), stopped, resume=True)
        one_line(error)
    assert files(stopped) == before


# Signals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_ends_the_run_after_the_step_with_a_checkpoint(config, tmp_path, number):
    # A shell's `nohup`, under which tests may run, leaves SIGHUP ignored.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        outcome = train(config, tmp_path / "run", on_item=at_step(9, stop(number)))
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert (outcome.final, outcome.steps) == (None, 9)
    assert checkpoint.load(tmp_path / "run" / CHECKPOINT_FILE)["step"] == 9
    assert [line["step"] for line in strict_lines(tmp_path / "run", "step")] == list(range(1, 10))


def test_a_second_sigint_interrupts_as_it_always_did(config, tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    # A run of tests in the background of a shell inherits that SIGINT is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", on_item=at_step(3, twice))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_a_second_sigterm_reaches_whoever_handled_it_before(config, tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:

        def twice():
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
            signal.raise_signal(signal.SIGTERM)

        assert train(config, tmp_path / "run", on_item=at_step(3, twice)).steps == 3
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_in_the_last_step_still_ends_the_run_properly(config, tmp_path):
    run = replace(config, steps=5)
    outcome = train(run, tmp_path / "run", on_item=at_step(5, stop()))
    assert outcome.final is not None
    assert [line["kind"] for line in strict_lines(tmp_path / "run")][-3:] == ["final", "record", "end"]


def test_a_real_sigterm_in_the_middle_exits_with_1_and_resume_completes_to_the_bit(text, tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    log = folder / "metrics.jsonl"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": CHILD_ENV}
    child = subprocess.Popen(train_command(folder, text), **pipes)
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") >= 5):
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 1, errors
    assert "Traceback" not in errors
    assert "--resume" in errors
    done = checkpoint.load(folder / CHECKPOINT_FILE)["step"]
    assert 5 <= done < 60
    assert [line["step"] for line in strict_lines(folder, "step")] == list(range(1, done + 1))
    for target, more in ((folder, ["--resume"]), (whole, [])):
        ended = subprocess.run(
            train_command(target, text, *more),
            capture_output=True,
            text=True,
            env=CHILD_ENV,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
    assert_same_run(folder, whole)
    assert_each_once(folder)

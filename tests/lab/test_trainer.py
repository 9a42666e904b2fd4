"""The trainer: exact resume, clean stops, whole checkpoints, honest logs."""

import copy
import errno
import io
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from qknorm.lab import ARMS, DataConfig, ModelConfig, TrainConfig, checkpoint, train
from qknorm.lab.arms import get_arm
from qknorm.lab.checkpoint import CheckpointError
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.trainer import Trainer
from qknorm.spec import NormDialect

CLOCKS = ("step_ms", "tokens_per_s")
# The same numbers in a child process need the same number of threads.
CHILD_ENV = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "COLUMNS": "200"}
QKNORM = (sys.executable, "-c", "from qknorm.cli import main; main()")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400)))
    return path


@pytest.fixture
def config(text):
    """A run of a second or less, with everything on that a checkpoint must carry."""
    return TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=60,
        batch=2,
        context=16,
        lr=1e-2,
        warmup=10,
        weight_decay=1e-2,
        z_loss=1e-4,
        eval_batches=2,
        stats_every=7,
    )


def arm(config, name, **options):
    chosen = get_arm(name)
    return replace(
        config, arm=name, model=chosen.apply(config.model), gain_decay=chosen.gain_decay, **options
    )


def strict_lines(folder):
    """The log as a strict reader sees it: NaN and Infinity are no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def without_clocks(folder):
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in strict_lines(folder)]


def at_step(number, action):
    """An `on_record` that acts when a step has been logged."""

    def on_record(record):
        if record["kind"] == "step" and record["step"] == number:
            action()

    return on_record


def stop(number=signal.SIGTERM):
    return lambda: signal.raise_signal(number)


def assert_same_bits(a, b, path="checkpoint"):
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same_bits(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def assert_same_run(folder, whole):
    assert without_clocks(folder) == without_clocks(whole)
    states = [checkpoint.load(f / CHECKPOINT_FILE) for f in (folder, whole)]
    for part in ("model", "optimizer", "losses", "step"):
        assert_same_bits(states[0][part], states[1][part], part)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(error):
    sentence = str(getattr(error, "value", error)).strip()
    assert sentence
    assert "\n" not in sentence
    return sentence


@pytest.fixture
def stopped(config, tmp_path):
    """A run that was stopped at step 5, and its folder."""
    folder = tmp_path / "stopped"
    assert train(config, folder, on_record=at_step(5, stop())).record is None
    return folder


# Resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qk", "qk-decay", "qk+sink", "none"])
def test_sixty_steps_equal_thirty_and_resume_and_thirty_to_the_bit(config, tmp_path, name):
    run = arm(config, name)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(run, whole).steps == 60
    first = train(run, halves, on_record=at_step(30, stop()))
    assert (first.record, first.steps) == (None, 30)
    assert [line["step"] for line in strict_lines(halves)] == list(range(1, 31))
    assert checkpoint.load(halves / CHECKPOINT_FILE)["step"] == 30
    second = train(run, halves, resume=True)
    assert second.steps == 60
    assert_same_run(halves, whole)
    assert [line.get("step", "final") for line in strict_lines(halves)] == [*range(1, 61), "final"]


def test_the_bits_depend_on_the_optimizer_state_too(config, tmp_path):
    """That the comparison above can fail: moments forgotten at step 30 change the weights."""
    trainer = Trainer(config)
    for _ in range(30):
        trainer.train_step()
    state = copy.deepcopy(trainer.state())
    resumed, forgetful = Trainer(config), Trainer(config)
    resumed.restore(copy.deepcopy(state))
    forgetful.restore(state | {"optimizer": Trainer(config).optimizer.state_dict()})
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
        train(run, crashed, on_record=at_step(47, crash))
    assert checkpoint.load(crashed / CHECKPOINT_FILE)["step"] == 40
    # What a killed process leaves: lines past the checkpoint, the last of them cut short.
    with (crashed / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "step", "st')
    train(run, crashed, resume=True)
    assert_same_run(crashed, whole)


def test_resuming_twice_is_as_good_as_once(config, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole)
    train(config, parts, on_record=at_step(1, stop()))
    train(config, parts, resume=True, on_record=at_step(59, stop()))
    train(config, parts, resume=True)
    assert_same_run(parts, whole)


def test_resuming_a_run_that_has_ended_changes_nothing(config, tmp_path):
    folder = tmp_path / "run"
    run = replace(config, steps=8)
    first = train(run, folder)
    before = without_clocks(folder)
    again = train(run, folder, resume=True)
    assert again.record["final_loss"] == first.record["final_loss"]
    assert without_clocks(folder) == before


def test_bf16_and_constant_schedule_resume_to_the_bit(config, tmp_path):
    run = replace(config, steps=12, dtype="bfloat16", schedule="constant", warmup=0)
    train(run, tmp_path / "whole")
    train(run, tmp_path / "parts", on_record=at_step(6, stop()))
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_ends_the_run_after_the_step_with_a_checkpoint(config, tmp_path, number):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    outcome = train(config, tmp_path / "run", on_record=at_step(9, stop(number)))
    assert (outcome.record, outcome.steps) == (None, 9)
    assert checkpoint.load(tmp_path / "run" / CHECKPOINT_FILE)["step"] == 9
    assert [line["step"] for line in strict_lines(tmp_path / "run")] == list(range(1, 10))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_second_sigint_interrupts_as_it_always_did(config, tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    # A run of tests in the background of a shell inherits that SIGINT is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", on_record=at_step(3, twice))
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

        assert train(config, tmp_path / "run", on_record=at_step(3, twice)).steps == 3
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_in_the_last_step_still_ends_the_run_properly(config, tmp_path):
    run = replace(config, steps=5)
    outcome = train(run, tmp_path / "run", on_record=at_step(5, stop()))
    assert outcome.record is not None
    assert strict_lines(tmp_path / "run")[-1]["kind"] == "final"


def arguments(folder, text, *more):
    options = {
        "data": text, "layers": 2, "dim": 64, "heads": 2, "context": 64, "batch": 16, "steps": 60,
        "warmup": 10, "lr": 0.01, "stats-every": 7,
    }  # fmt: skip
    flat = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*QKNORM, "train", str(folder), *flat, *more]


def test_a_real_sigterm_in_the_middle_exits_with_1_and_resume_completes_to_the_bit(text, tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    log = folder / "metrics.jsonl"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": CHILD_ENV}
    child = subprocess.Popen(arguments(folder, text), **pipes)
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
    assert [line["step"] for line in strict_lines(folder)] == list(range(1, done + 1))
    for target, more in ((folder, ["--resume"]), (whole, [])):
        ended = subprocess.run(
            arguments(target, text, *more), capture_output=True, text=True, env=CHILD_ENV, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
    assert_same_run(folder, whole)
    assert [line.get("step", "final") for line in strict_lines(folder)] == [*range(1, 61), "final"]


# A full disk ------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_while_saving_leaves_the_old_checkpoint(config, stopped, monkeypatch):
    old = (stopped / CHECKPOINT_FILE).read_bytes()
    real = torch.save

    def full(state, file, *rest, **options):
        file.write(b"half a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match="No space left on device") as error:
        train(config, stopped, resume=True)
    sentence = one_line(error)
    assert str(stopped / CHECKPOINT_FILE) in sentence
    assert (stopped / CHECKPOINT_FILE).read_bytes() == old
    assert list(stopped.rglob("*.part")) == []
    monkeypatch.setattr(torch, "save", real)
    train(config, stopped, resume=True)
    train(config, stopped.parent / "whole")
    assert_same_run(stopped, stopped.parent / "whole")


def limited(folder, text, limit, *more):
    """`qknorm train` in a process whose files cannot grow past `limit` bytes."""

    def shrink():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    config = ["--layers", "2", "--dim", "32", "--heads", "2", "--context", "16", "--batch", "2"]
    return subprocess.run(
        [*QKNORM, "train", str(folder), "--data", str(text), *config, *more],
        capture_output=True,
        text=True,
        env=CHILD_ENV | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=shrink,
        timeout=120,
    )


def test_a_file_that_cannot_grow_leaves_the_old_checkpoint_and_one_sentence(text, tmp_path):
    folder = tmp_path / "run"
    run = TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=20,
        batch=2,
        context=16,
    )
    train(run, folder, on_record=at_step(4, stop()))
    old = (folder / CHECKPOINT_FILE).read_bytes()
    assert len(old) > 200_000
    ended = limited(folder, text, 100_000, "--steps", "20", "--resume")
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert os.strerror(errno.EFBIG) in errors[0]
    assert (folder / CHECKPOINT_FILE).read_bytes() == old
    assert list(folder.rglob("*.part")) == []
    assert train(run, folder, resume=True).steps == 20


def test_a_disk_that_is_full_from_the_start_leaves_no_half_written_file(text, tmp_path):
    folder = tmp_path / "run"
    ended = limited(folder, text, 300, "--steps", "3")
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert list(folder.rglob("*.part")) == []


def test_a_disk_that_fills_up_while_logging_ends_in_one_sentence_and_can_be_resumed(text, tmp_path):
    folder = tmp_path / "run"
    run = TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=60,
        batch=2,
        context=16,
    )
    train(run, folder, on_record=at_step(4, stop()))
    old = (folder / CHECKPOINT_FILE).read_bytes()
    ended = limited(folder, text, 5000, "--steps", "60", "--resume")
    assert ended.returncode == 2, ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "error" in line]) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (folder / CHECKPOINT_FILE).read_bytes() == old
    train(run, folder, resume=True)
    assert [line.get("step", "final") for line in strict_lines(folder)] == [*range(1, 61), "final"]


def test_an_interrupted_save_never_becomes_the_checkpoint(config, stopped, monkeypatch):
    old = (stopped / CHECKPOINT_FILE).read_bytes()

    def interrupted(state, file, *rest, **options):
        file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, stopped, resume=True)
    assert (stopped / CHECKPOINT_FILE).read_bytes() == old


# Damaged checkpoints ----------------------------------------------------------------------------


def truncated(data):
    return data[: len(data) // 2]


def last_byte_missing(data):
    return data[:-1]


def flipped(data):
    # In the middle of the largest tensor: a byte between two records means nothing.
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    place = largest.header_offset + largest.file_size // 2
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


def emptied(data):
    return b""


def prose(data):
    return b"this is not a checkpoint\n" * 10


def another_archive(data):
    buffer = io.BytesIO()
    torch.save({"weights": torch.ones(3)}, buffer)
    return buffer.getvalue()


def not_a_dict(data):
    buffer = io.BytesIO()
    torch.save([1, 2, 3], buffer)
    return buffer.getvalue()


def code(data):
    """A pickle that would run code when it is read."""
    source, buffer = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in source.namelist():
            evil = b"cos\nsystem\n(S'touch /tmp/qknorm-was-here'\ntR."
            archive.writestr(name, evil if name.endswith("data.pkl") else source.read(name))
    return buffer.getvalue()


DAMAGE = [
    truncated, last_byte_missing, flipped, emptied, prose, another_archive, not_a_dict, code,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_nothing_changes(config, stopped, damage):
    path = stopped / CHECKPOINT_FILE
    path.write_bytes(damage(path.read_bytes()))
    before = files(stopped)
    with pytest.raises(ValueError, match=CHECKPOINT_FILE) as error:
        train(config, stopped, resume=True)
    one_line(error)
    assert files(stopped) == before
    assert not Path("/tmp/qknorm-was-here").exists()


def test_one_flipped_byte_anywhere_is_refused_or_harmless(config, stopped):
    path = stopped / CHECKPOINT_FILE
    data = path.read_bytes()
    whole = checkpoint.load(path)
    size = len(data)
    refused = 0
    # Headers and directory of the archive byte by byte is too much here: a spread, and its ends.
    places = [*range(0, size, size // 60), *range(0, 64, 3), *range(size - 120, size, 3)]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            found = checkpoint.load(path)
        except CheckpointError as error:
            one_line(error)
            refused += 1
        else:
            assert_same_bits(found, whole)
    assert refused > len(places) / 2


def test_resume_without_a_checkpoint_is_refused_and_creates_nothing(config, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint") as error:
        train(config, tmp_path / "new", resume=True)
    one_line(error)
    assert not (tmp_path / "new").exists()


# Folders ----------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused_and_left_untouched(config, stopped):
    before = files(stopped)
    with pytest.raises(ValueError, match="overwrite") as error:
        train(config, stopped)
    one_line(error)
    assert files(stopped) == before


def test_a_folder_that_holds_only_a_checkpoint_is_not_emptied(config, stopped):
    (stopped / "metrics.jsonl").unlink()
    before = files(stopped)
    with pytest.raises(ValueError, match="overwrite"):
        train(config, stopped)
    assert files(stopped) == before


def test_overwrite_starts_anew(config, stopped, tmp_path):
    train(replace(config, steps=6, seed=4), stopped, overwrite=True)
    train(replace(config, steps=6, seed=4), tmp_path / "fresh")
    assert_same_run(stopped, tmp_path / "fresh")


def test_a_run_writes_its_four_files_and_nothing_else(config, tmp_path):
    folder = tmp_path / "deep" / "run"
    train(replace(config, steps=3), folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "environment.json", "metrics.jsonl", CHECKPOINT_FILE}
    saved = json.loads((folder / "config.json").read_text())
    assert saved == json.loads(json.dumps(asdict(replace(config, steps=3))))
    found = json.loads((folder / "environment.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()


def bad_data(config, **options):
    return replace(config, data=replace(config.data, **options))


BAD = {
    "missing data": lambda c, tmp: bad_data(c, source=str(tmp / "no.txt")),
    "short data": lambda c, tmp: replace(c, context=4096),
    "token out of range": lambda c, tmp: replace(c, model=replace(c.model, vocab_size=50)),
    "unknown backend": lambda c, tmp: replace(c, model=replace(c.model, backend="fancy")),
    "gain decay of a gain stored as w": lambda c, tmp: replace(c, gain_decay=0.1),
    "eps in half precision": lambda c, tmp: replace(
        c, dtype="bfloat16", model=replace(c.model, norm=NormDialect(eps=1e-8))
    ),
    "a cap and a sink": lambda c, tmp: replace(
        c, model=replace(ARMS["softcap"].apply(c.model), sink="logit")
    ),
    "a cap and a named backend": lambda c, tmp: replace(
        c, model=replace(ARMS["softcap"].apply(c.model), backend="stock")
    ),
    "a seed beyond the generator": lambda c, tmp: replace(c, seed=2**64),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_in_one_line_and_creates_nothing(config, tmp_path, what):
    folder = tmp_path / "runs" / "new"
    with pytest.raises(ValueError, match=r"\S") as error:
        train(BAD[what](config, tmp_path), folder)
    one_line(error)
    assert not folder.parent.exists()


@pytest.mark.parametrize("what", [name for name in BAD if "sink" not in name])
def test_bad_input_leaves_a_run_to_be_overwritten_as_it_was(config, stopped, tmp_path, what):
    before = files(stopped)
    with pytest.raises(ValueError, match=r"\S"):
        train(BAD[what](config, tmp_path), stopped, overwrite=True)
    assert files(stopped) == before


def test_tensorboard_that_is_not_installed_is_refused_and_creates_nothing(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"qknorm\[tensorboard\]"):
        train(replace(config, tensorboard=True), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0}, {"batch": 0}, {"context": 0}, {"lr": 0.0}, {"lr": -1.0}, {"lr": math.nan},
        {"lr": math.inf}, {"schedule": "linear"}, {"dtype": "float16"}, {"clip": 0.0}, {"clip": -1.0},
        {"warmup": -1}, {"weight_decay": -0.1}, {"weight_decay": math.nan}, {"z_loss": -1.0},
        {"seed": -1}, {"stats_every": -1}, {"checkpoint_every": -1}, {"eval_batches": 0},
        {"clip": math.nan}, {"beta1": 1.0}, {"beta2": -0.1},
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_means_nothing_is_refused_where_it_is_made(options):
    with pytest.raises(ValueError, match=next(iter(options))) as error:
        TrainConfig(**options)
    one_line(error)


# The optimizer ----------------------------------------------------------------------------------


def test_the_schedule_warms_up_and_ends_at_a_tenth_of_the_peak():
    cosine = TrainConfig(lr=2.0, warmup=10, steps=110)
    assert cosine.rate(1) == pytest.approx(0.2)
    assert cosine.rate(5) == pytest.approx(1.0)
    assert cosine.rate(10) == pytest.approx(2.0)
    assert cosine.rate(60) == pytest.approx(1.1)  # half way: the mean of peak and end
    assert cosine.rate(35) == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 4)))
    assert cosine.rate(110) == pytest.approx(0.2)
    rates = [cosine.rate(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_the_constant_schedule_stays_at_the_peak_and_no_warm_up_starts_there():
    constant = TrainConfig(lr=2.0, warmup=10, steps=110, schedule="constant")
    assert constant.rate(5) == pytest.approx(1.0)
    assert {constant.rate(step) for step in range(10, 111)} == {2.0}
    assert TrainConfig(lr=2.0, warmup=0, steps=5, schedule="constant").rate(1) == 2.0


def test_the_logged_rate_is_that_of_the_schedule(config, tmp_path):
    run = replace(config, steps=25)
    train(run, tmp_path / "run")
    for line in strict_lines(tmp_path / "run")[:-1]:
        assert line["lr"] == pytest.approx(run.rate(line["step"]), rel=1e-6)


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
def test_weight_decay_is_independent_of_the_peak_rate(config, lr):
    run = replace(config, lr=lr, weight_decay=0.2, warmup=4, steps=12)
    trainer = Trainer(run)
    # Rows of bytes that the text has not: their gradient is zero, so that decay alone moves them.
    before = trainer.model.embed.weight[200:].detach().clone()
    expected = 1.0
    for step in range(1, 13):
        trainer.train_step()
        expected *= 1 - 0.2 * run.rate(step) / lr
        after = trainer.model.embed.weight[200:].detach()
        assert torch.allclose(after, before * expected, rtol=1e-5, atol=0)
    assert expected < 0.6


def test_gains_and_norms_do_not_decay(config):
    trainer = Trainer(replace(config, weight_decay=0.5))
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    decayed = {id(p) for g in groups.values() if g["weight_decay"] for p in g["params"]}
    for name, parameter in trainer.model.named_parameters():
        is_weight = parameter.ndim == 2 and not name.endswith("gain")
        assert (id(parameter) in decayed) == is_weight, name


def test_gain_decay_pulls_the_gain_to_one(config):
    run = arm(config, "qk-decay")
    assert run.gain_decay > 0
    run = replace(run, gain_decay=0.1, lr=1e-6, warmup=0, schedule="constant", steps=40)
    trainer = Trainer(run)
    norms = [layer.norm for layer in trainer.model.attention_layers()]
    with torch.no_grad():
        for norm in norms:
            for stored, value in zip(norm.parameters(), (2.0, -0.5), strict=True):
                stored.fill_(value)
    for _ in range(40):
        trainer.train_step()
    for norm in norms:
        q_gain, k_gain = norm.effective_gains()
        # Adam at a rate of 1e-6 moves them by 4e-5 at most; the decay by 0.9 a step.
        assert torch.allclose(q_gain, torch.full_like(q_gain, 1 + 2 * 0.9**40), atol=1e-4)
        assert torch.allclose(k_gain, torch.full_like(k_gain, 1 - 0.5 * 0.9**40), atol=1e-4)


def test_clipping_limits_the_step_and_the_log_shows_the_norm_before_it(config, monkeypatch):
    loose, tight = (Trainer(replace(config, clip=clip, z_loss=0.0)) for clip in (None, 1e-3))
    grads = []
    for trainer in (loose, tight):
        step = trainer.optimizer.step

        def spy(step=step, trainer=trainer):
            grads.append([p.grad.norm() for p in trainer.model.parameters()])
            return step()

        monkeypatch.setattr(trainer.optimizer, "step", spy)
    records = [trainer.train_step() for trainer in (loose, tight)]
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-6)
    assert records[0]["grad_norm"] > 0.1
    norms = [float(torch.stack(norms).norm()) for norms in grads]
    assert norms[0] == pytest.approx(records[0]["grad_norm"], rel=1e-5)
    assert norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_z_loss_is_the_mean_squared_log_of_the_denominator_and_not_in_the_logged_loss(
    config, monkeypatch
):
    with_z, without = (Trainer(replace(config, z_loss=z, clip=None)) for z in (0.3, 0.0))
    inputs, targets = with_z.data.batch(config.seed, 1, config.batch, config.context)
    twin = copy.deepcopy(with_z.model)
    log_probabilities = twin(inputs)[0].log_softmax(-1)
    loss = -log_probabilities.gather(-1, targets[..., None]).mean()
    z = torch.logsumexp(twin(inputs)[0], -1).square().mean()
    (loss + 0.3 * z).backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    found = {}
    step = with_z.optimizer.step

    def spy():
        found.update({name: p.grad.clone() for name, p in with_z.model.named_parameters()})
        return step()

    monkeypatch.setattr(with_z.optimizer, "step", spy)
    assert with_z.train_step()["loss"] == without.train_step()["loss"]
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-6), name


def test_the_loss_is_cross_entropy_in_nats_per_token(config):
    trainer = Trainer(config)
    inputs, targets = trainer.data.batch(config.seed, 1, config.batch, config.context)
    with torch.no_grad():
        logits = trainer.model(inputs)[0].double()
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    record = trainer.train_step()
    assert record["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert record["loss"] == pytest.approx(math.log(256), abs=0.1)


def test_training_lowers_the_loss_on_text_it_has_not_seen(config, tmp_path):
    outcome = train(replace(config, steps=60), tmp_path / "run")
    assert outcome.record["final_loss"] < outcome.record["initial_loss"] - 0.5
    assert outcome.record["diverged"] is False
    assert outcome.record["reason"] is None


def test_seeds_change_the_run_and_nothing_else_does(config, tmp_path):
    run = replace(config, steps=3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)
        train(replace(run, seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    losses = [[line["loss"] for line in strict_lines(tmp_path / n)[:-1]] for n in ("a", "c")]
    assert losses[0] != losses[1]


# Options ----------------------------------------------------------------------------------------


def test_bf16_autocast_trains_with_weights_in_fp32_and_a_bound_that_covers_bf16(config, tmp_path):
    run = replace(config, steps=30, dtype="bfloat16", stats_every=1)
    outcome = train(run, tmp_path / "bf16")
    train(replace(run, dtype="float32"), tmp_path / "fp32")
    assert outcome.record["final_loss"] < outcome.record["initial_loss"] - 0.3
    state = checkpoint.load(tmp_path / "bf16" / CHECKPOINT_FILE)
    assert {p.dtype for p in state["model"].values()} == {torch.float32}
    losses = [[x["loss"] for x in strict_lines(tmp_path / n)[:-1]] for n in ("bf16", "fp32")]
    assert losses[0] != losses[1]
    assert losses[0][:10] == pytest.approx(losses[1][:10], rel=0.02)
    assert_bounded(strict_lines(tmp_path / "bf16"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_a_compiled_run_follows_the_eager_one(config, tmp_path):
    run = replace(config, model=replace(config.model, layers=1), steps=3, stats_every=1)
    train(replace(run, compile=True), tmp_path / "compiled")
    train(run, tmp_path / "eager")
    pairs = zip(strict_lines(tmp_path / "compiled"), strict_lines(tmp_path / "eager"), strict=True)
    for compiled, eager in pairs:
        for key in ("loss", "grad_norm", "max_logit", "entropy_nats", "final_loss"):
            if key in eager:
                assert compiled[key] == pytest.approx(eager[key], rel=1e-3)


def test_tensorboard_files_hold_the_logged_numbers(config, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    train(replace(config, steps=8, tensorboard=True), folder)
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps = strict_lines(folder)[:-1]
    for name in ("loss", "grad_norm", "max_logit", "entropy_nats"):
        logged = {line["step"]: line[name] for line in steps if name in line}
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx(logged, rel=1e-5)
        assert shown


# The log ----------------------------------------------------------------------------------------


def assert_bounded(lines):
    """Measured at most the bound, for every head of every line that has both."""
    watched = [line["layers"] for line in lines if "layers" in line]
    assert watched
    for layers in watched:
        for measured, bounds in zip(layers["max_logit"], layers["bound"], strict=True):
            for x, bound in zip(measured, bounds, strict=True):
                assert x <= bound


@pytest.mark.parametrize("name", ["qk", "qk-full", "qk-after-rope", "softcap", "qk-decay"])
def test_the_measured_maximum_stays_within_the_bound_on_every_logged_step(config, tmp_path, name):
    # Heads of two entries come close to their bound, and a bold rate moves the gains.
    narrow = replace(config, model=replace(config.model, head_dim=2), stats_every=1, steps=40)
    train(arm(narrow, name, lr=1e-1, warmup=0, schedule="constant"), tmp_path / "run")
    assert_bounded(strict_lines(tmp_path / "run"))


def test_the_bound_of_a_step_is_that_of_the_gains_that_were_measured(config):
    """Gains that shrink in the step must not put the bound below what was seen before it."""
    run = arm(replace(config, model=replace(config.model, head_dim=2)), "qk-decay")
    trainer = Trainer(replace(run, gain_decay=0.5, warmup=0, lr=1e-3, stats_every=1, batch=16))
    with torch.no_grad():
        for layer in trainer.model.attention_layers():
            for stored in layer.norm.parameters():
                stored.fill_(3.0)  # a gain of 4, and of 2.5 after the step
    bound = trainer.model.logit_bounds(run.context)
    layers = trainer.train_step()["layers"]
    assert torch.allclose(layers["bound"], bound)
    assert (layers["max_logit"] <= layers["bound"]).all()


@pytest.mark.parametrize("name", ["none", "qk", "softcap", "qk+sink"])
def test_every_line_is_strict_json_with_the_promised_shapes(config, tmp_path, name):
    model = replace(config.model, layers=3, heads=4, kv_heads=2)
    outcome = train(arm(replace(config, model=model, steps=15), name), tmp_path / "run")
    lines = strict_lines(tmp_path / "run")
    assert [line["kind"] for line in lines] == ["step"] * 15 + ["final"]
    for line in lines[:-1]:
        for key in ("loss", "grad_norm", "lr", "step_ms", "tokens_per_s"):
            assert line[key] > 0
        assert line["tokens_per_s"] == pytest.approx(2 * 16 / (line["step_ms"] / 1e3), rel=1e-3)
    watched = [line for line in lines if "layers" in line]
    assert [line["step"] for line in watched[:-1]] == [1, 7, 14]
    for line in watched:
        layers = line["layers"]
        tables = ["max_logit", "entropy_nats", "entropy_ratio", "sink_mass"]
        if name == "none":
            assert layers["bound"] is None
        else:
            tables.append("bound")
        for key in tables:
            assert [len(row) for row in layers[key]] == [4, 4, 4], key
            assert all(isinstance(x, float) for row in layers[key] for x in row), key
        assert line["max_logit"] == max(map(max, layers["max_logit"]))
        entropy = min(sum(row) / 4 for row in layers["entropy_nats"])
        assert line["entropy_nats"] == pytest.approx(entropy, rel=1e-5)
        flat = [x for row in layers["entropy_nats"] for x in row]
        assert all(0 <= x <= math.log(16) for x in flat)
        assert all(0 <= x <= 1 for row in layers["entropy_ratio"] for x in row)
        sinks = [x for row in layers["sink_mass"] for x in row]
        assert all(0 < x < 1 if "sink" in name else x == 0 for x in sinks)
    final = lines[-1]
    assert (final["arm"], final["lr"], final["seed"], final["steps"]) == (name, 1e-2, 0, 15)
    assert final["initial_loss"] == lines[0]["loss"]
    assert final["final_loss"] == pytest.approx(outcome.record["final_loss"], rel=1e-6)


def test_watching_or_not_gives_the_same_run(config, tmp_path):
    run = replace(config, steps=20)
    for every in (0, 1):
        train(replace(run, stats_every=every), tmp_path / str(every))
    states = [checkpoint.load(tmp_path / n / CHECKPOINT_FILE) for n in "01"]
    assert_same_bits(states[0]["model"], states[1]["model"])
    assert [line["kind"] for line in strict_lines(tmp_path / "0") if "layers" in line] == ["final"]


def test_on_record_sees_what_is_logged(config, tmp_path):
    seen = []
    train(replace(config, steps=8), tmp_path / "run", on_record=seen.append)
    lines = strict_lines(tmp_path / "run")
    assert [r["kind"] for r in seen] == [line["kind"] for line in lines]
    assert [r.get("loss") for r in seen] == pytest.approx([line.get("loss") for line in lines])


def test_a_line_is_in_the_file_when_it_is_reported(config, tmp_path):
    folder = tmp_path / "run"
    counts = []
    train(replace(config, steps=5), folder, on_record=lambda r: counts.append(len(strict_lines(folder))))
    assert counts == [1, 2, 3, 4, 5, 6]


def test_a_loss_that_is_not_finite_stops_the_run_and_is_recorded_as_diverged(config, tmp_path):
    run = arm(config, "none", lr=1e30, clip=None, warmup=0, schedule="constant")
    outcome = train(run, tmp_path / "run")
    assert outcome.steps < 60
    assert outcome.record["diverged"] is True
    lines = strict_lines(tmp_path / "run")
    final = lines[-1]
    assert final["kind"] == "final"
    assert final["diverged"] is True
    assert "finite" in final["reason"]
    assert final["final_loss"] is None
    assert final["steps"] == outcome.steps == lines[-2]["step"]
    assert lines[-2]["loss"] is None
    assert all(line["loss"] is not None for line in lines[:-2])


def test_resuming_what_has_diverged_trains_no_further(config, tmp_path):
    run = arm(config, "none", lr=1e30, clip=None, warmup=0, schedule="constant")
    first = train(run, tmp_path / "run")
    before = without_clocks(tmp_path / "run")
    again = train(run, tmp_path / "run", resume=True)
    assert again.steps == first.steps
    assert without_clocks(tmp_path / "run") == before

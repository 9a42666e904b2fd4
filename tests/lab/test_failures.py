"""A full disk, a damaged checkpoint, a folder in use, a configuration that means nothing."""

import errno
import io
import json
import math
import os
import resource
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from qknorm.lab import ARMS, DataConfig, ModelConfig, TrainConfig, checkpoint, train
from qknorm.lab.checkpoint import CheckpointError
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.spec import NormDialect
from runs import (
    CHILD_ENV,
    QKNORM,
    assert_same_bits,
    assert_same_run,
    at_step,
    files,
    one_line,
    stop,
    strict_lines,
)

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


def small(text, steps):
    """What `limited` trains."""
    return TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=steps,
        batch=2,
        context=16,
    )


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
    run = small(text, steps=20)
    train(run, folder, on_item=at_step(4, stop()))
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
    run = small(text, steps=60)
    train(run, folder, on_item=at_step(4, stop()))
    old = (folder / CHECKPOINT_FILE).read_bytes()
    ended = limited(folder, text, 5000, "--steps", "60", "--resume")
    assert ended.returncode == 2, ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "error" in line]) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (folder / CHECKPOINT_FILE).read_bytes() == old
    train(run, folder, resume=True)
    assert [line["step"] for line in strict_lines(folder, "step")] == [*range(1, 61)]
    assert [line["kind"] for line in strict_lines(folder, "final", "end")] == ["final", "end"]


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

"""The command line: one sentence for every bad input."""

import os

import pytest
import torch

from commands import SIZE, TEXT, complaint, copy_of, final


def bad_data(tmp_path):
    """Sources that must be refused, by what is wrong with them."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"no": 1}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n\n{"text": \n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xe9"}\n')
    (tmp_path / "odd.bin").write_bytes(bytes(1001))
    (tmp_path / "high.bin").write_bytes(b"\xff\xff" * 1000)
    (tmp_path / "text.pdf").write_text(TEXT)
    (tmp_path / "tokenizer.json").write_text("{}")


BAD = {
    "missing data": (["--data", "nowhere.txt"], "nowhere.txt"),
    "empty data": (["--data", "empty.txt"], "empty.txt"),
    "a folder without text": (["--data", "folder"], "folder"),
    "a line without text": (["--data", "bad.jsonl"], "line 2"),
    "a line that is no JSON": (["--data", "broken.jsonl"], "line 3"),
    "a line that is no UTF-8": (["--data", "latin.jsonl"], "latin.jsonl"),
    "a dump of odd size": (["--data", "odd.bin", "--vocab-size", 65536], "1001"),
    "a dump without a vocabulary": (["--data", "high.bin"], "--vocab-size"),
    "tokens out of range": (["--data", "high.bin", "--vocab-size", 50_000], "65535"),
    "an unknown kind of file": (["--data", "text.pdf"], "text.pdf"),
    "T longer than the data": (["--data", "short.txt"], "context"),
    "a missing tokenizer": (["--tokenizer", "no.json"], "no.json"),
    "a broken tokenizer": (["--tokenizer", "tokenizer.json"], "tokenizer.json"),
    "heads that do not divide": (["--heads", 5], "5"),
    "an odd head with RoPE": (["--head-dim", 7], "7"),
    "an odd rotary width": (["--head-dim", 16, "--rotary-share", 0.3125], "5"),
    "query heads over key heads": (["--heads", 4, "--kv-heads", 3], "3"),
    "no heads": (["--heads", 0], "0"),
    "no key heads": (["--kv-heads", 0], "0"),
    "a window of 0": (["--window", 0], "window"),
    "an unknown backend": (["--backend", "fancy"], "fancy"),
    "an unsupported combination": (["--arm", "softcap", "--backend", "stock"], "stock"),
    "an unknown arm": (["--arm", "qk2"], "qk2"),
    "an unknown dtype": (["--dtype", "float8"], "float8"),
    "an unknown schedule": (["--schedule", "linear"], "linear"),
    "an unknown token dtype": (["--token-dtype", "int64"], "int64"),
    "no steps": (["--steps", 0], "steps"),
    "no batch": (["--batch", 0], "batch"),
    "no context": (["--context", 0], "context"),
    "a negative rate": (["--lr", -0.1], "lr"),
    "a rate of nan": (["--lr", "nan"], "lr"),
    "a negative clip": (["--clip", -1], "clip"),
    "a negative seed": (["--seed", -1], "seed"),
    "a seed beyond the generator": (["--seed", 2**64], "seed"),
    "a vocabulary below zero": (["--vocab-size", -3], "vocab"),
}


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize("what", BAD)
def test_bad_input_ends_in_one_sentence_and_creates_nothing(qknorm, tmp_path, monkeypatch, what, verb):
    (tmp_path / "in").mkdir()
    bad_data(tmp_path / "in")
    (tmp_path / "in" / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "in")
    arguments, word = BAD[what]
    before = sorted((tmp_path / "in").rglob("*"))
    ended = qknorm(verb, tmp_path / "new" / "run", *SIZE, "--data", "text.txt", "--steps", 2, *arguments)
    complaint(ended, word)
    assert not (tmp_path / "new").exists()
    assert sorted((tmp_path / "in").rglob("*")) == before


def test_a_large_seed_works_or_is_refused_before_anything_is_created(qknorm, text, tmp_path):
    ended = qknorm("train", tmp_path / "run", *SIZE, "--data", text, "--steps", 2, "--seed", 2**40)
    if ended.code == 2:
        complaint(ended, "seed")
        assert not (tmp_path / "run").exists()
    else:
        assert final(tmp_path / "run")["seed"] == 2**40


def test_resume_without_a_checkpoint_is_one_sentence_and_creates_nothing(qknorm, text, tmp_path):
    ended = qknorm("train", tmp_path / "new", *SIZE, "--data", text, "--resume")
    complaint(ended, "no checkpoint")
    assert not (tmp_path / "new").exists()


def broken(kind, trained, tmp_path):
    whole = (trained / "checkpoint.pt").read_bytes()
    other = tmp_path / "other.pt"
    torch.save({"a": torch.ones(2)}, other)
    return {"truncated": whole[:-500], "empty": b"", "text": b"hello\n", "another": other.read_bytes()}[
        kind
    ]


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "another"])
@pytest.mark.parametrize("verb", ["train", "sample"])
def test_a_corrupt_checkpoint_is_one_sentence(qknorm, trained, text, tmp_path, verb, kind):
    folder = copy_of(trained, tmp_path, broken(kind, trained, tmp_path))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    if verb == "sample":
        ended = qknorm("sample", folder)
    else:
        ended = qknorm("train", folder, *SIZE, "--data", text, "--steps", 40, "--resume")
    complaint(ended, "checkpoint.pt")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_resume_with_another_configuration_is_one_sentence(qknorm, trained, text, tmp_path):
    folder = copy_of(trained, tmp_path)
    ended = qknorm("train", folder, *SIZE, "--data", text, "--steps", 41, "--lr", 0.02, "--resume")
    complaint(ended, "steps")


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_file_where_the_folder_should_be_is_one_sentence(qknorm, text, tmp_path, verb):
    file = tmp_path / "file"
    file.write_text("mine")
    complaint(qknorm(verb, file, *SIZE, "--data", text, "--steps", 2), file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["report", "nowhere"], "nowhere"),
        (["report", "."], "metrics.jsonl"),
        (["sample", "nowhere"], "no checkpoint"),
        (["sample", "."], "no checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_folder_that_is_no_run_is_one_sentence(qknorm, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    complaint(qknorm(*arguments), word)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_sentence(qknorm, trained, tmp_path):
    complaint(qknorm("report", trained, "-o", tmp_path / "no" / "r.html"), "r.html")
    assert not (tmp_path / "no").exists()


def test_a_disk_that_is_full_is_one_sentence(qknorm, text, tmp_path, monkeypatch):
    def full(state, file, *rest, **options):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", full)
    ended = qknorm("train", tmp_path / "run", *SIZE, "--data", text, "--steps", 2, "--json")
    complaint(ended, os.strerror(28), "checkpoint.pt")
    assert list(tmp_path.rglob("*.part")) == []

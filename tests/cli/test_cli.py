"""The command line: help, exit codes, JSON for programs, and one sentence for every bad input."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from qknorm.cli import main
from qknorm.lab import ARMS, checkpoint
from qknorm.lab.data import Codec
from qknorm.lab.sample import generate, load_model
from qknorm.lab.trainer import Trainer

TEXT = "".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400))
VERBS = ("train", "compare", "sample", "report", "env")
SIZE = ("--layers", 1, "--dim", 32, "--heads", 2, "--context", 16, "--batch", 4, "--warmup", 2)


class Ended:
    """How a command ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        def refuse(name):
            raise AssertionError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def qknorm(monkeypatch, capfd):
    """Runs the program in this process as a shell would."""

    def run(*arguments):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["qknorm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Ended(ended.value.code or 0, out, err)

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run that learned something, made by the program in a process of its own."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    arguments = [*SIZE, "--data", text, "--steps", 40, "--lr", 0.02, "--stats-every", 5]
    ended = subprocess.run(
        [sys.executable, "-c", "from qknorm.cli import main; main()", "train", folder]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return folder


def words(text):
    """A text without the boxes and line breaks of a terminal."""
    return re.sub(r"[\s\u2500-\u257f]+", " ", text)


def complaint(ended, *parts):
    """The one sentence of a refusal."""
    assert ended.code == 2, ended.err or ended.out
    assert "Traceback" not in ended.err
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    assert len(lines[0]) > 15
    for part in parts:
        assert str(part) in lines[0]
    assert ended.out == ""
    return lines[0]


def final(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


# Help -------------------------------------------------------------------------------------------


def test_help_lists_every_verb_with_a_line_about_it(qknorm):
    ended = qknorm("--help")
    assert ended.code == 0
    for verb in VERBS:
        assert re.search(rf"{verb} +[A-Z]\w+ ", words(ended.out)), verb
    assert ended.err == ""


OPTIONS = {
    "train": (
        "--data --steps --lr --arm --seed --batch --context --schedule --warmup --weight-decay --clip "
        "--z-loss --dtype --compile --stats-every --checkpoint-every --tensorboard --layers --dim "
        "--heads --kv-heads --head-dim --window --backend --vocab-size --tokenizer --token-dtype "
        "--resume --overwrite --json"
    ),
    "compare": "--data --steps --arm --lr --seed --overwrite --json --window --z-loss --tokenizer",
    "sample": "--prompt --tokens --temperature --seed --json",
    "report": "--output --json",
    "env": "--json",
}


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_lists_its_options_each_with_words(qknorm, verb):
    ended = qknorm(verb, "--help")
    assert ended.code == 0
    assert "Traceback" not in ended.out + ended.err
    said = words(ended.out)
    assert re.search(rf"Usage: .*{verb} \[OPTIONS\]", said)
    for option in OPTIONS[verb].split():
        # A letter for short, a type, and words.
        assert re.search(rf"{option}( -\w)? <\S+> [^-]*[A-Za-z]{{3}}", said), option


def test_help_of_compare_explains_every_arm_to_the_letter(qknorm):
    said = words(qknorm("compare", "--help").out)
    for name, arm in ARMS.items():
        assert f"{name}: {arm.help}" in said, name


def test_help_of_train_says_the_exit_codes_and_how_to_resume(qknorm):
    said = words(qknorm("train", "--help").out)
    assert "Exit code 0 when finished, 1 if it diverged or was stopped, 2 for bad input." in said
    assert "--resume continues it" in said


def test_no_arguments_show_the_help(qknorm):
    ended = qknorm()
    assert "Usage:" in ended.out + ended.err
    for verb in VERBS:
        assert verb in ended.out + ended.err


# Exit codes and what is printed -----------------------------------------------------------------


def test_a_run_that_learns_exits_with_0_and_says_its_numbers(qknorm, text, tmp_path):
    folder = tmp_path / "run"
    ended = qknorm("train", folder, *SIZE, "--data", text, "--steps", 40, "--lr", 0.02)
    assert ended.code == 0, ended.err
    end = final(folder)
    assert end["diverged"] is False
    assert "finished" in ended.out
    assert f"{end['final_loss']:.3f}" in ended.out
    assert f"{end['max_logit']:.1f}" in ended.out
    assert f"{end['entropy_nats']:.3f}" in ended.out
    assert str(folder) in ended.out
    # Progress for people goes to stderr, so that the result can be piped.
    assert "step 40/40" in ended.err
    for word in ("loss", "max logit", "entropy", "tok/s"):
        assert word in ended.err


def test_a_run_that_does_not_learn_exits_with_1(qknorm, text, tmp_path):
    ended = qknorm("train", tmp_path / "run", *SIZE, "--data", text, "--steps", 2, "--lr", 1e-9)
    assert ended.code == 1
    assert "diverged" in ended.out
    assert "Traceback" not in ended.err


def stop_after(step, monkeypatch):
    original = Trainer.train_step

    def train_step(self):
        record = original(self)
        if self.step == step:
            signal.raise_signal(signal.SIGINT)
        return record

    monkeypatch.setattr(Trainer, "train_step", train_step)


def test_a_stopped_run_exits_with_1_and_resume_finishes_it(qknorm, text, tmp_path, monkeypatch):
    arguments = ["train", tmp_path / "run", *SIZE, "--data", text, "--steps", 30, "--lr", 0.02]
    with monkeypatch.context() as patch:
        stop_after(12, patch)
        ended = qknorm(*arguments, "--json")
    assert ended.code == 1
    assert ended.json == {"stopped_at": 12}
    assert "--resume" in ended.err
    assert "12 of 30" in ended.err
    ended = qknorm(*arguments, "--resume")
    assert ended.code == 0, ended.err
    assert final(tmp_path / "run")["steps"] == 30


def test_a_stopped_comparison_exits_with_1_and_leaves_no_summary(qknorm, text, tmp_path, monkeypatch):
    stop_after(2, monkeypatch)
    ended = qknorm("compare", tmp_path, *SIZE, "--data", text, "--steps", 4)
    assert ended.code == 1
    assert "stopped" in ended.err
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()


def test_a_stopped_comparison_prints_json_too(qknorm, text, tmp_path, monkeypatch):
    stop_after(2, monkeypatch)
    ended = qknorm("compare", tmp_path, *SIZE, "--data", text, "--steps", 4, "--json")
    assert ended.code == 1
    assert isinstance(ended.json, dict)


@pytest.mark.parametrize("arguments", [["train"], ["train", "x", "--no-such-option"], ["nonsense"]])
def test_wrong_usage_exits_with_2_without_a_traceback(qknorm, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = qknorm(*arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "report"])
def test_a_folder_is_printed_as_it_is_called(qknorm, text, tmp_path, trained, verb):
    # Square brackets are markup to rich.
    folder = tmp_path / "run[bold]"
    if verb == "train":
        ended = qknorm("train", folder, *SIZE, "--data", text, "--steps", 2)
    else:
        folder.mkdir()
        ended = qknorm("report", trained, "--output", folder / "r.html")
    assert folder.exists()
    assert str(folder) in ended.out


# JSON -------------------------------------------------------------------------------------------


def test_train_prints_its_final_record_as_json(qknorm, text, tmp_path):
    folder = tmp_path / "run"
    ended = qknorm("train", folder, *SIZE, "--data", text, "--steps", 30, "--lr", 0.02, "--json")
    assert ended.code == 0
    assert ended.json.items() <= final(folder).items()
    assert ended.json["final_loss"] > 0
    assert ended.err == ""


def test_train_prints_strict_json_for_a_run_that_is_not_finite(qknorm, text, tmp_path):
    arguments = ["--steps", 9, "--lr", 1e30, "--clip", 0, "--warmup", 0, "--arm", "none", "--json"]
    ended = qknorm("train", tmp_path / "run", *SIZE, "--data", text, *arguments)
    assert ended.code == 1
    assert ended.json["diverged"] is True
    assert ended.json["final_loss"] is None


def test_compare_prints_the_summary_as_json_and_writes_both_files(qknorm, text, tmp_path):
    folder = tmp_path / "grid"
    options = ["--arm", "none", "--arm", "qk", "--lr", 1e-3, "--lr", 2e-2, "--seed", 0, "--seed", 1]
    ended = qknorm("compare", folder, *SIZE, "--data", text, "--steps", 3, *options, "--json")
    assert ended.code == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert ended.json["runs"] == summary
    assert len(summary) == 8
    assert ended.json["lr_sensitivity"] == {}
    assert ended.json["report"] == str(folder / "report.html")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert ended.err == ""


def test_compare_prints_a_table_a_verdict_and_the_sensitivity_of_the_whole_grid(
    qknorm, text, tmp_path, monkeypatch
):
    rates = [part for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1) for part in ("--lr", lr)]
    ended = qknorm("compare", tmp_path, *SIZE, "--data", text, "--steps", 2, *rates)
    assert ended.code == 0, ended.err
    said = words(ended.out)
    for arm in ("none", "qk"):
        assert f"LR sensitivity of {arm}:" in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary) == 14
    for record in summary:
        assert f"{record['final_loss']:.3f}" in said
    assert str(tmp_path / "report.html") in ended.out
    again = qknorm("compare", tmp_path, *SIZE, "--data", text, "--steps", 2, *rates)
    assert "overwrite" in complaint(again)


def test_report_prints_json_and_writes_where_it_was_told(qknorm, trained, tmp_path):
    page = tmp_path / "page.html"
    ended = qknorm("report", trained, "--output", page, "--json")
    assert ended.code == 0
    assert ended.json["report"] == str(page)
    assert ended.json["runs"][0]["final_loss"] == final(trained)["final_loss"]
    assert page.exists()
    assert ended.err == ""
    plain = qknorm("report", trained, "-o", page)
    assert plain.code == 0
    assert f"{final(trained)['final_loss']:.3f}" in plain.out


def test_report_goes_to_the_first_folder_unless_told(qknorm, trained):
    assert qknorm("report", trained).code == 0
    assert (trained / "report.html").exists()


def test_sample_prints_json(qknorm, trained):
    ended = qknorm("sample", trained, "--prompt", "12 green", "--tokens", 10, "--json")
    assert ended.code == 0
    assert ended.json["prompt"] == "12 green"
    assert ended.json["text"].startswith("12 green")
    assert ended.err == ""


def test_env_lists_backends_and_versions(qknorm):
    ended = qknorm("env")
    assert ended.code == 0
    for word in ("reference", "stock", "fp32", "bf16", "auto", torch.__version__):
        assert word in words(ended.out)
    ended = qknorm("env", "--json")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.json["environment"]["torch"] == torch.__version__
    cases = {row["case"]: row for row in ended.json["backends"]}
    assert "cpu fp32" in cases
    for row in cases.values():
        assert {"reference", "stock"} <= set(row["backends"])
        assert row["backends"][row["auto"]] is None
        assert all(reason is None or len(reason) > 5 for reason in row["backends"].values())


# Bad input --------------------------------------------------------------------------------------


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


def copy_of(trained, tmp_path, data=None):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in trained.iterdir():
        if file.suffix in (".pt", ".json", ".jsonl"):
            (folder / file.name).write_bytes(file.read_bytes())
    if data is not None:
        (folder / "checkpoint.pt").write_bytes(data)
    return folder


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


# Sample -----------------------------------------------------------------------------------------


def sampled(qknorm, folder, *arguments):
    ended = qknorm("sample", folder, "--prompt", "12 green", *arguments, "--json")
    assert ended.code == 0, ended.err
    return ended.json["text"]


def test_sample_depends_on_the_seed_alone(qknorm, trained):
    first = sampled(qknorm, trained, "--tokens", 40, "--seed", 1)
    torch.rand(3)
    assert sampled(qknorm, trained, "--tokens", 40, "--seed", 1) == first
    assert sampled(qknorm, trained, "--tokens", 40, "--seed", 2) != first


def test_sample_goes_to_stdout_and_nothing_else_does(qknorm, trained):
    ended = qknorm("sample", trained, "--prompt", "12 green", "--tokens", 20, "--seed", 1)
    assert ended.out == sampled(qknorm, trained, "--tokens", 20, "--seed", 1) + "\n"


def uncached(folder, prompt, tokens, *, temperature, seed):
    """The definition: the whole text through the model for every token."""
    model, _ = load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt.encode())
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([ids]))[0][0, -1].double()
            if temperature == 0:
                ids.append(int(logits.argmax()))
            else:
                p = torch.softmax(logits.float() / temperature, dim=-1)
                ids.append(int(torch.multinomial(p, 1, generator=generator)))
    return Codec(None).decode(ids)


def test_temperature_zero_takes_the_likeliest_token_whatever_the_seed(qknorm, trained):
    greedy = sampled(qknorm, trained, "--tokens", 30, "--temperature", 0, "--seed", 1)
    assert greedy == sampled(qknorm, trained, "--tokens", 30, "--temperature", 0, "--seed", 2)
    assert greedy == uncached(trained, "12 green", 30, temperature=0, seed=0)


def test_sampling_through_the_cache_equals_sampling_without_it(qknorm, trained):
    # Past the context of training, so that positions must go on counting.
    text = sampled(qknorm, trained, "--tokens", 60, "--temperature", 0.7, "--seed", 5)
    assert text == uncached(trained, "12 green", 60, temperature=0.7, seed=5)


def test_a_lower_temperature_is_closer_to_greedy(trained):
    model, codec = load_model(trained)
    greedy = generate(model, codec, "12 green", tokens=20, temperature=0.0, seed=0)
    cold = generate(model, codec, "12 green", tokens=20, temperature=1e-4, seed=3)
    hot = generate(model, codec, "12 green", tokens=20, temperature=5.0, seed=3)
    assert cold == greedy
    assert hot != greedy


def test_a_prompt_beyond_ascii_survives(qknorm, trained):
    ended = qknorm("sample", trained, "--prompt", "na\u00efve \u4f60", "--tokens", 3, "--json")
    assert ended.json["text"].startswith("na\u00efve \u4f60")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--prompt", ""], "prompt"),
        (["--tokens", 0], "tokens"),
        (["--tokens", -5], "tokens"),
        (["--temperature", -1], "temperature"),
        (["--temperature", "nan"], "temperature"),
    ],
    ids=lambda value: "=".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_request_that_means_nothing_is_one_sentence(qknorm, trained, arguments, word):
    complaint(qknorm("sample", trained, *arguments), word)


def test_a_prompt_outside_the_vocabulary_is_one_sentence(qknorm, tmp_path):
    dump = tmp_path / "t.bin"
    dump.write_bytes(bytes([1, 2, 3, 4] * 300))
    arguments = ["--data", dump, "--token-dtype", "uint8", "--vocab-size", 10, "--steps", 1]
    qknorm("train", tmp_path / "run", *SIZE, *arguments)
    complaint(qknorm("sample", tmp_path / "run", "--prompt", "a"), 97, 10)


def test_a_model_of_nan_is_one_sentence(qknorm, trained, tmp_path):
    state = checkpoint.load(trained / "checkpoint.pt")
    state["model"]["head.weight"].fill_(torch.nan)
    folder = copy_of(trained, tmp_path)
    checkpoint.save(state, folder / "checkpoint.pt")
    complaint(qknorm("sample", folder))

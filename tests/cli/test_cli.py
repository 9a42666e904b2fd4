"""The command line: help, exit codes, JSON for programs."""

import json
import re
import signal

import pytest
import torch

from commands import SIZE, VERBS, complaint, final, words
from qknorm.lab import ARMS
from qknorm.lab.trainer import Trainer

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
    assert (
        "exit code is 0 if the run finished or saturated, 1 if it diverged, did not learn or was" in said
    )
    assert "from which --resume continues" in said


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
    assert ended.out.startswith("did not learn: the final loss ")  # F82
    assert "diverged" not in ended.out
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_f48_a_loss_that_is_lost_is_a_sentence(qknorm, text, tmp_path, monkeypatch, verb):
    loss = Trainer._loss

    def lost(self, logits, targets):
        nats, z = loss(self, logits, targets)
        return nats * (torch.nan if self.step == 15 and nats.requires_grad else 1), z

    monkeypatch.setattr(Trainer, "_loss", lost)
    ended = qknorm(verb, tmp_path / "run", *SIZE, "--data", text, "--steps", 20, "--lr", 0.02)
    # A diverged twin is a result, a diverged run is not.
    assert ended.code == (1 if verb == "train" else 0)
    assert "diverged: the loss is not finite at step 15." in words(ended.out)
    assert "Traceback" not in ended.err
    assert "nan" not in ended.out


def stop_after(step, monkeypatch):
    original = Trainer.train_step

    def train_step(self):
        items = original(self)
        if self.step == step:
            signal.raise_signal(signal.SIGINT)
        return items

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

"""A calm terminal: no words of other libraries, no escapes of other people, and any width."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SIZE, complaint
from made import layer, record
from qknorm import __version__
from qknorm.auditor.findings import Report, finding
from qknorm.cli import console
from qknorm.cli.audit_page import to_html
from qknorm.lab.printable import printable
from qknorm.monitor import Alerts, JsonLines, rank_path

# A red title that also renames the window, reverses the reading order and begins a line of its own.
EVIL = "\x1b[31mlayers\x1b]0;title\x07\x9b2J\u202e\n[bold]:warning:"
SHOWN = r"\x1b[31mlayers\x1b]0;title\x07\x9b2J\u202e\n[bold]:warning:"


# F81: names that others chose -------------------------------------------------------------------------


def test_f81_what_does_not_print_is_spelled_out() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("plain, \u00e9\u4e2d\u2581 and \\") == "plain, \u00e9\u4e2d\u2581 and \\"
    assert printable(os.fsdecode(b"\xff")) == r"\udcff"  # a name that is no text at all


@pytest.fixture
def evil_run(tmp_path: Path) -> Path:
    """A folder of evil name with the log of a model whose layers have such names."""
    folder = tmp_path / EVIL.replace("\n", "")
    log = JsonLines(rank_path(folder, 0))
    alerts = Alerts(to=[log])
    for step in range(6):
        seen = record(step, {EVIL: layer([60.0 + step], [0.1]), f"{EVIL}2": layer([3.0])})
        log(seen)
        alerts(seen)
    log.close(ended=True)
    with log.path.open("a") as file:
        file.write("damaged\n")
    return folder


def is_harmless(text: str) -> bool:
    """Whether a terminal obeys nothing in a text."""
    return all(line.isprintable() for line in text.split("\n"))


def test_f81_no_escape_reaches_the_terminal_or_the_page(
    qknorm: Any, evil_run: Path, tmp_path: Path, trained: Path
) -> None:
    for arguments in (
        ("watch", evil_run, "--once"),
        ("watch", evil_run, "--json"),
        ("report", evil_run),
        ("report", evil_run / EVIL),
        ("audit", evil_run),
        ("audit", f"{EVIL}:make"),
        ("sample", evil_run),
        ("train", evil_run / "run", *SIZE, "--data", EVIL),
        ("train", evil_run / "run", *SIZE, "--arm", EVIL),
    ):
        ended = qknorm(*arguments)
        assert is_harmless(ended.out), arguments
        assert is_harmless(ended.err), arguments
        assert r"\x1b[31m" in ended.out + ended.err, arguments
        if arguments[0] == "watch":
            assert ended.err.startswith("warning: ")
            assert "is damaged and left out: it is not JSON" in ended.err
        if ended.code == 2:
            complaint(ended)
    page = (evil_run / "report.html").read_text()
    assert is_harmless(re.sub("<script.*?</script>", "", page, flags=re.S))
    assert "[bold]:warning:" in page


def test_f81_a_page_spells_out_what_does_not_print() -> None:
    found = Report(
        findings=[finding("QK001", EVIL, f"<b>{EVIL}")],
        formulas={},
        exercised=[EVIL],
        not_probed=[EVIL],
    )
    page = to_html(found, EVIL, "warning")
    assert is_harmless(page)
    assert page.count(SHOWN) >= 5
    assert "<b>\\x1b" not in page


def test_f81_text_of_a_model_is_obeyed_by_no_terminal(
    qknorm: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qknorm.cli.sample.generate", lambda *_, **__: f"a\n{EVIL}")
    assert qknorm("sample", trained).out == f"a\n{EVIL}\n"  # a pipe gets it to the letter
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("qknorm.cli.sample.generate", lambda *_, **__: f"a\n\tb{EVIL}")
    shown = qknorm("sample", trained).out
    assert is_harmless(shown)
    assert shown.startswith("a\n        b\\x1b")


# F73: words of other libraries ------------------------------------------------------------------------


def test_f73_loading_a_checkpoint_prints_no_bar_and_no_report(qknorm: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    from safetensors.torch import load_file, save_file

    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        architectures=["Qwen3ForCausalLM"],
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file) | {"model.layers.0.self_attn.other.weight": torch.ones(3)}
    del held["model.layers.0.self_attn.q_norm.weight"]  # on which transformers prints a table
    save_file(held, file, metadata={"format": "pt"})
    ended = qknorm("audit", tmp_path)
    assert ended.err == ""
    assert "no file holds model.layers.0.self_attn.q_norm.weight" in ended.out


# F86 --------------------------------------------------------------------------------------------------


def test_f86_the_version(qknorm: Any) -> None:
    ended = qknorm("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"qknorm {__version__}\n", "")


@pytest.mark.parametrize("name", ["nowhere.safetensors", "nowhere.gguf", "org/nowhere", "runs/nowhere"])
def test_f86_a_missing_file_is_called_missing(qknorm: Any, name: str) -> None:
    verbs = ("report", "watch") if name.startswith("runs") else ("audit",)
    for verb in verbs:
        complaint(qknorm(verb, name), f"no such file or folder: {name}")


def test_f86_a_file_of_another_kind_is_not_called_missing(qknorm: Any, tmp_path: Path) -> None:
    complaint(qknorm("audit", tmp_path), f"{tmp_path} has no config.json")
    os.mkfifo(tmp_path / "model.safetensors")
    complaint(qknorm("audit", tmp_path / "model.safetensors"), "cannot be audited: expected")


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl", "text.bin", "folder"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_f86_data_without_an_end_is_refused_and_not_waited_for(
    qknorm: Any, tmp_path: Path, name: str, kind: str
) -> None:
    file = tmp_path / name
    if name == "folder":
        file.mkdir()
        file = file / "part.txt"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    source = tmp_path / name
    options = ("--data", source, "--vocab-size", 256)
    complaint(qknorm("train", tmp_path / "run", *SIZE, *options), file, "not a regular file")
    assert not (tmp_path / "run").exists()


def test_f86_a_factory_that_hangs_or_asks_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def hang():\n"
        "    print('loading', flush=True)\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        except BaseException:\n"
        "            pass\n"
        "def ask():\n"
        "    input()\n"
    )
    main_end, child_end = os.openpty()  # a terminal, at which a question would be answered
    try:
        for factory, why in (("hang", "not audited within 0.5 s"), ("ask", "EOFError")):
            command = [sys.executable, "-m", "qknorm", "audit", f"mine:{factory}", "--json"]
            ended = subprocess.run(
                [*command, "--time-limit", "0.5"],
                stdin=child_end,
                capture_output=True,
                text=True,
                timeout=120,
                cwd=tmp_path,
            )
            assert ended.returncode == 2, ended.stderr
            assert ended.stdout == ""
            assert ended.stderr.splitlines()[-1].startswith(f"error: mine:{factory} ")
            assert why in ended.stderr
    finally:
        os.close(main_end)
        os.close(child_end)


def test_f86_an_answer_is_not_lost_with_a_file_that_cannot_be_written(
    qknorm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sound_one.py").write_text(
        "from qknorm.nn import Attention, AttentionConfig\n"
        "import torch\n"
        "def make():\n"
        "    return Attention(AttentionConfig(dim=16, num_heads=2)), torch.randn(2, 8, 16)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for option in ("--html", "--sarif"):
        ended = qknorm("audit", "sound_one:make", "--json", option, tmp_path / "no" / "file")
        assert ended.code == 2
        assert ended.json["passed"] is True
        assert ended.err.count("\n") == 1


def test_f70_a_page_that_cannot_be_written_does_not_cost_the_results(
    qknorm: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(runs: Any, path: Path) -> None:
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr("qknorm.cli.compare.write_report", full)
    arguments = ("compare", tmp_path / "grid", *SIZE, "--data", text, "--steps", 2, "--lr", 0.02)
    ended = qknorm(*arguments, "--json")
    assert ended.code == 2
    assert [run["arm"] for run in ended.json["runs"]] == ["none", "qk"]
    assert ended.json["report"] is None
    assert ended.err.count("\n") == 1
    assert "report.html" in ended.err


@pytest.mark.parametrize("columns", [60, 100])
def test_f86_tables_lose_nothing_in_a_narrow_terminal(
    qknorm: Any,
    text: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(console.out, "_width", columns)
    (tmp_path / "sound_two.py").write_text(
        "from qknorm.nn import Attention, AttentionConfig\n"
        "import torch\n"
        "def make():\n"
        "    return Attention(AttentionConfig(dim=16, num_heads=2)), torch.randn(2, 8, 16)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    last = {"compare": "verdict", "watch": "forecast", "env": "reference"}
    options = ("--steps", 2, "--lr", 0.02, "--arm", "none", "--arm", "qk+off-by-one")
    for arguments in (
        ("compare", tmp_path / "grid", *SIZE, "--data", text, *options),
        ("watch", trained, "--once"),
        ("audit", "sound_two:make"),
        ("env",),
        ("--help",),
        ("train", "--help"),
    ):
        ended = qknorm(*arguments)
        assert ended.code == 0, ended.err
        assert "\u2026" not in ended.out, arguments  # what was cut off
        if arguments[0] in last:
            assert re.search(rf"\b{last[arguments[0]]}\b", ended.out), arguments
        tables = [line for line in ended.out.splitlines() if re.search("[\u2500-\u257f]", line)]
        assert all(len(line) <= columns for line in tables), arguments
    summary = json.loads((tmp_path / "grid" / "summary.json").read_text())
    assert len(summary) == 2

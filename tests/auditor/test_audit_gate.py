"""`qknorm audit` as a gate in CI: exit code and stdout, whatever a target does (F74, F83)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from mutants import HEALTHY, MUTANTS
from qknorm.auditor import audit
from qknorm.auditor.summary import grouped, layer_kinds, verdict
from qknorm.auditor.targets import looks_trained
from qknorm.cli import app

RAISES = {
    "an exception": "raise RuntimeError('no weights here')",
    "an exit that claims success": "raise SystemExit(0)",
    "sys.exit without a code": "import sys; sys.exit()",
    "an exception of no usual kind": "raise type('Odd', (BaseException,), {})('odd')",
    "an error of several lines": "raise ValueError('first\\nsecond')",
    "what is no module": "return 'text'",
    "a model that raises an exception of no usual kind": (
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        raise type('Odd', (BaseException,), {})('odd')\n"
        "return Model(), torch.ones(1, 2)"
    ),
    "a question": "input('run the custom code? [y/N] ')",
}


def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A target whose factory has this body."""
    name = f"made_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "def make():\n" + "".join(f"    {x}\n" for x in body.split("\n"))
    )
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:make"


@pytest.mark.parametrize("what", RAISES)
def test_f74_whatever_a_factory_raises_is_one_line_and_exit_code_2(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = factory(tmp_path, monkeypatch, RAISES[what])
    monkeypatch.setattr(sys, "argv", ["qknorm", "audit", target])
    from qknorm.cli import main

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    assert shown.err.strip().count("\n") == 0, shown.err
    assert target in shown.err


def test_f74_what_a_target_prints_never_reaches_the_json(tmp_path: Path) -> None:
    """By Python, past Python, and by a child process."""
    here = Path(__file__).parent
    (tmp_path / "loud.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(here)!r})\n"
        "from mutants import HEALTHY\n"
        "def make():\n"
        "    print('by Python')\n"
        "    os.write(1, b'past Python\\n')\n"
        "    os.system('echo by a child')\n"
        "    return HEALTHY[0].build(), HEALTHY[0].inputs()\n"
    )
    command = [sys.executable, "-m", "qknorm", "audit", "loud:make", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["passed"] is True
    for text in ("by Python", "past Python", "by a child"):
        assert text in ended.stderr


def test_f74_no_code_of_a_checkpoint_is_run_and_nobody_is_asked(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "own_kind",
                "auto_map": {
                    "AutoConfig": "configuration.Config",
                    "AutoModel": "modeling.Model",
                },
            }
        )
    )
    witness = tmp_path / "witness"
    for name in ("configuration", "modeling"):
        (tmp_path / f"{name}.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    command = [sys.executable, "-m", "qknorm", "audit", str(tmp_path)]
    main_end, child_end = os.openpty()  # a terminal, at which a question could be asked
    try:
        ended = subprocess.run(
            command, stdin=child_end, capture_output=True, text=True, timeout=120, cwd="/"
        )
    finally:
        os.close(main_end)
        os.close(child_end)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "[y/N]" not in ended.stdout + ended.stderr
    assert not witness.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!"),
        ("model.safetensors", b""),
        ("pytorch_model.bin", b"\x80\x04not a pickle"),
    ],
)
def test_f74_broken_weights_are_one_line_and_exit_code_2(
    name: str, content: bytes, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    ended = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert isinstance(ended.exception, ValueError)  # which `main` turns into one line and exit code 2
    assert "\n" not in str(ended.exception)
    assert str(tmp_path) in str(ended.exception)


def test_f83_the_verdict_counts_what_is_listed() -> None:
    faulty = next(m for m in MUTANTS if m.name == "fused-v_normed")
    report = audit(faulty.build(), faulty.inputs())
    rows = grouped(report.findings)
    assert len({one.layer for one in report.at_least("warning")}) == 2  # one finding for two layers
    failing = [rows for rows in rows if rows[0].severity != "info"]
    assert len(failing) == 1
    text = verdict(report, "it", "warning")
    assert text == f"it: failed, {len(rows)} findings, 1 of severity warning or above"
    assert verdict(report, "it", "error") == f"it: passed, {len(rows)} findings below error"


def test_f83_one_finding_is_no_findings() -> None:
    sound = HEALTHY[0]
    report = audit(sound.build(), sound.inputs())
    only = next(iter(grouped(report.findings)), None)
    kept = SimpleNamespace(findings=only or [], at_least=lambda level: [])
    expected = "passed, 1 finding below warning" if only else "passed, nothing found"
    assert verdict(kept, "it", "warning") == f"it: {expected}"  # type: ignore[arg-type]


def test_f83_a_model_without_norm_has_dashes_in_its_row() -> None:
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama(transformers))
    report = audit(model)
    row = layer_kinds(report)[0]
    assert "None" not in " ".join(row)
    assert row[1:4] == ("-", "-", "-")


def llama(transformers: Any) -> Any:
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.final = nn.RMSNorm(8), nn.RMSNorm(8)


def test_f83_weights_that_were_never_trained_are_not_taken_for_trained() -> None:
    model = Normed()
    assert not looks_trained(model)
    with torch.no_grad():
        model.final.weight[0] += 0.1
    assert looks_trained(model)
    assert looks_trained(nn.Linear(2, 2, bias=False))  # nothing tells


def test_f83_a_checkpoint_saved_a_second_ago_has_no_gain_that_was_lost(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    codes = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path), "--json"]).stdout)["findings"]
    assert "QK020" not in {one["code"] for one in codes}
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)  # of a model that was trained
    model.save_pretrained(tmp_path)
    codes = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path), "--json"]).stdout)["findings"]
    assert "QK020" in {one["code"] for one in codes}

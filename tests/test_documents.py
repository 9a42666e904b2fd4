"""What README and docs show runs as it stands there, and their command lines exist."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn

import qknorm
from qknorm.cli import app

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
}
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The tutorial has a test of its own.
WITH_CODE = [p for p, text in PAGES.items() if BLOCK.search(text) and p != "docs/tutorial.md"]

# Blocks that are not run. Each says so in its title, where the reader sees it.
NOT_RUN = {"docs/integrate/torchtitan.md": 2}
# Blocks that need an extra, by what stands in them.
EXTRAS = {
    "import wandb": "wandb",
    "TensorBoard(": "tensorboard",
    "transformers": "transformers",
    "lightning": "lightning",
}


def given(page: str) -> dict[str, Any]:
    """What a page takes for granted that the reader has."""
    if page == "docs/monitor.md":
        model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        return {"model": model, "data": range(3), "optimizer": torch.optim.SGD(model.parameters())}
    if page == "docs/audit.md":
        return {"model": Named(), "inputs": torch.randint(32, (2, 12)), "optimizer": None}
    return {}


class Named(nn.Module):
    """One attention, where a Hugging Face model has its first."""

    def __init__(self) -> None:
        super().__init__()
        config = qknorm.nn.AttentionConfig(dim=16, num_heads=2, sink="logit", scale=1 / 64)
        block = nn.ModuleDict({"self_attn": qknorm.nn.Attention(config)})
        self.tokens = nn.Embedding(32, 16)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([block])})
        for name, parameter in self.named_parameters():
            if "gain" in name:  # as trained
                nn.init.uniform_(parameter, 0.5, 2.0)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.get_submodule("model.layers.0.self_attn")(self.tokens(tokens))
        return out


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    names, missing, left_out = {"__name__": page} | given(page), [], 0
    for number, (title, block) in enumerate(BLOCK.findall(PAGES[page])):
        if "Not run by the tests: " in title:
            left_out += 1
            continue
        extra = next((e for word, e in EXTRAS.items() if word in block), None)
        if extra is not None and importlib.util.find_spec(extra) is None:
            missing.append(extra)
            continue
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert left_out == NOT_RUN.get(page, 0)
    for name, value in list(names.items()):
        if name.startswith("test_"):  # a test that the page shows
            from qknorm.auditor.testing import assert_qk_norm

            value(assert_qk_norm)
    if missing:
        pytest.skip(f"the rest of the page ran; this extra is not installed: {', '.join(missing)}")


def test_the_readme_shows_layer_operator_monitor_and_the_way_into_a_model() -> None:
    assert len(BLOCK.findall(PAGES["README.md"])) == 4


def test_the_tutorial_shows_a_run_that_fails_and_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its sentences say of the output. The digits are another processor's."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _, block in BLOCK.findall(PAGES["docs/tutorial.md"]):
        exec(compile(block, "docs/tutorial.md", "exec"), names)
    assert "QM010" in {alert.code for alert in names["said"] if alert.severity == "alarm"}
    assert names["record"].max_logit > 100
    assert not [alert for alert in names["normed_said"] if alert.severity == "alarm"]
    assert names["normed"].max_logit <= max(layer.bound for layer in names["normed"].layers.values())
    assert names["normed_loss"] < names["loss"] - 0.2
    for folder in ("runs/first", "runs/normed"):
        assert (tmp_path / folder / "attention.rank00000.jsonl").stat().st_size > 0


def command_lines() -> list[tuple[str, list[str]]]:
    """The lines of blocks without a language that call qknorm."""
    found = []
    for page, text in PAGES.items():
        for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if line.startswith("qknorm "):
                    found.append((page, shlex.split(line, comments=True)[1:]))
    return found


def test_the_commands_that_the_pages_show_exist_with_their_options() -> None:
    group = typer.main.get_command(app)
    lines = command_lines()
    assert {words[0] for _, words in lines} >= {
        "compare",
        "train",
        "sample",
        "watch",
        "report",
        "env",
        "audit",
    }
    for page, (verb, *words) in lines:
        command = group.commands[verb]  # type: ignore[attr-defined]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        asked = {word.split("=")[0] for word in words if word.startswith("--")}
        assert asked <= options, f"{page}: qknorm {verb} has no {asked - options}"


def test_the_links_of_the_pages_beside_the_code_lead_to_files() -> None:
    """Those below docs/ are checked by `make docs`."""
    for page in ROOT.glob("*.md"):
        for address in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if not address.startswith("http"):
                assert (ROOT / address.split("#")[0]).exists(), f"{page.name}: {address}"


def test_what_is_wrong_with_a_site_is_named(tmp_path: Path) -> None:
    faults = runpy.run_path(str(ROOT / "docs/check_site.py"))["faults"]
    (tmp_path / "api").mkdir()
    (tmp_path / "api/index.html").write_text("<h1 id='here'></h1><a href='../'>up</a>")
    (tmp_path / "index.html").write_text(
        "<a href='api/#here'></a><a href='https://example.org/'></a><link rel='canonical' href='https://x.org'>"
    )
    assert faults(tmp_path) == []
    (tmp_path / "index.html").write_text(
        "<a href='gone/'></a><a href='api/#gone'></a><script src='https://x.org/a.js'></script>"
        "<style>@import 'https://x.org/a.css'; p { background: url(//x.org/b.png) }</style>"
    )
    found = "\n".join(faults(tmp_path))
    for word in ("gone/,", "api/#gone,", "a.js", "a.css", "b.png"):
        assert word in found
    assert len(faults(tmp_path)) == 5

"""After `pip install .`, every command works and prints nothing that is not its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import qknorm
from commands import SIZE, Ended, words

EXTRA = ("numpy", "plotly", "transformers", "tokenizers", "safetensors", "tensorboard", "tqdm", "gguf")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that the project requires, and with those that they require."""
    folder = tmp_path_factory.mktemp("packages")
    wanted, seen = ["torch", "typer", "rich"], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops - {path.name for path in folder.iterdir()}:
            (folder / top).symlink_to(found.locate_file(top))
        requirements = [Requirement(text) for text in found.requires or ()]
        wanted += [r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    for name in EXTRA:
        assert not (folder / name).exists()
    return folder


@pytest.fixture(scope="module")
def plain(packages: Path) -> Any:
    """Runs the program where only those packages are installed."""
    source = Path(qknorm.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (source, packages))),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }

    def run(*arguments: Any, columns: int = 100, cwd: Path | None = None) -> Ended:
        ended = subprocess.run(
            [sys.executable, "-S", "-m", "qknorm", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd,
            env=environment | {"COLUMNS": str(columns)},
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


MISSING = "no page will be written, since the report needs an extra: pip install 'qknorm[report]'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text: Path, plain: Any) -> Path:
    """A comparison that the plain install has made."""
    folder = tmp_path_factory.mktemp("plain") / "both"
    ended = plain("compare", folder, *SIZE, "--data", text, "--steps", 20, "--lr", 0.02)
    assert ended.code == 0, ended.err
    first, *progress = ended.err.splitlines()
    assert first == MISSING  # said before the first step
    assert all(" step " in line for line in progress)
    said = words(ended.out)
    for record in json.loads((folder / "summary.json").read_text()):
        assert f"{record['arm']} " in said
        assert f"{record['final_loss']:.3f}" in said
    assert "qk ended" in said
    assert not (folder / "report.html").exists()
    return folder


def test_f70_compare_gives_table_sentence_and_json(folder: Path, plain: Any, text: Path) -> None:
    ended = plain("compare", folder / "2", *SIZE, "--data", text, "--steps", 3, "--lr", 0.02, "--json")
    assert ended.code == 0
    assert ended.json["report"] is None
    assert ended.json["runs"] == json.loads((folder / "2" / "summary.json").read_text())
    assert ended.err.splitlines() == [MISSING]


def test_f70_f73_every_other_command_works_and_prints_nothing_that_is_not_its_own(
    folder: Path, plain: Any, text: Path, tmp_path: Path
) -> None:
    run = folder / "qk-lr0.02-seed0"
    (tmp_path / "mine.py").write_text(
        "from qknorm.nn import Attention, AttentionConfig\n"
        "import torch\n"
        "def make():\n"
        "    return Attention(AttentionConfig(dim=16, num_heads=2)), torch.randn(2, 8, 16)\n"
    )
    commands = {
        ("train", tmp_path / "run", *SIZE, "--data", text, "--steps", 20, "--lr", 0.02, "--json"): 0,
        ("sample", run, "--tokens", 4): 0,
        ("watch", run, "--once"): 0,
        ("env",): 0,
        ("report", run): 2,
        ("audit", "mine:make"): 0,
        ("audit", run): 2,
    }
    for command, code in commands.items():
        ended = plain(*command, cwd=tmp_path)
        assert ended.code == code, (command, ended.err)
        assert (ended.out == "") == (code == 2), command
        if code == 0:
            assert ended.err == "", command
        else:
            assert ended.err.startswith("error: "), command
            assert ended.err.count("\n") == 1, command

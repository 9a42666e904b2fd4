"""The program as a shell runs it, a text, and a run that learned something."""

import os
import subprocess
import sys

import pytest

from commands import SIZE, TEXT, Ended
from qknorm.cli import main


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

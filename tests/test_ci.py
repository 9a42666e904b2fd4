"""What continuous integration installs before the tests, and what it does where it may not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parent.parent / ".ci"
NEEDED = ("bash", "env")  # what the script itself runs on


def run(folder: Path, programs: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script with no programs but these, and what was called of them."""
    log = folder / "log"
    for name in NEEDED:
        (folder / name).symlink_to(
            next(p / name for p in map(Path, ("/usr/bin", "/bin")) if (p / name).exists())
        )
    for name, answer in programs.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> "{log}"\n{answer}\n')
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [CI / "browser"], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60
    )
    return done, log.read_text().splitlines() if log.exists() else []


ROOT, USER = {"id": "echo 0"}, {"id": "echo 1000"}


def test_f51_root_installs_chromium_with_apt_get(tmp_path):
    done, calls = run(tmp_path, ROOT | {"apt-get": "exit 0"})
    assert done.returncode == 0
    assert [call for call in calls if call.startswith("apt-get")] == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends chromium",
    ]
    assert not done.stderr


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_f51_a_browser_that_is_there_is_taken(tmp_path, name):
    done, calls = run(tmp_path, ROOT | {"apt-get": "exit 0", name: "exit 0"})
    assert (done.returncode, calls) == (0, [])


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        (ROOT, "none can be installed here"),
        (USER | {"apt-get": "exit 0"}, "none can be installed here"),
        (ROOT | {"apt-get": "exit 100"}, "could not be installed"),
        (ROOT | {"apt-get": '[ "$1" = update ]'}, "could not be installed"),
    ],
    ids=["no apt-get", "no root", "no network", "no package"],
)
def test_f51_where_it_may_not_it_says_so_and_goes_on(tmp_path, programs, words):
    done, _ = run(tmp_path, programs)
    assert done.returncode == 0
    assert words in done.stderr
    assert "skipped" in done.stderr


def test_f51_continuous_integration_asks_for_the_browser_before_the_tests():
    lines = (CI / "run").read_text().splitlines()
    assert lines.index(".ci/browser") < lines.index("make test")
    assert os.access(CI / "browser", os.X_OK)

"""What a release holds: one version, an sdist with every file, wheels named for what is in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import qknorm

ROOT = Path(__file__).parent.parent
# Of what a working copy holds, what is made and not kept; see .gitignore.
MADE = {".venv", ".git", "runs", "build", "dist", "site"}
MADE_ENDINGS = {".so", ".pyc", ".o"}
# Stands in for g++: it makes the file that it is asked for, and that file is empty.
COMPILER = """#!/bin/sh
for last in "$@"; do
    if [ "$before" = "-o" ]; then : > "$last"; fi
    before=$last
done
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the cpu backend needs Linux")


def kept(root: Path) -> set[str]:
    """The files of the project below a folder, as paths."""
    found = set()
    for folder, names, files in os.walk(root):
        names[:] = [
            name
            for name in names
            if name not in MADE
            and not name.endswith(("_cache", "__pycache__", ".egg-info", ".hypothesis"))
        ]
        found |= {
            str((Path(folder) / name).relative_to(root))
            for name in files
            if Path(name).suffix not in MADE_ENDINGS and name not in MADE
        }
    return found


def build(source: Path, what: str, into: Path, **environment: str) -> Path:
    """The sdist or wheel that the build backend makes of a folder."""
    code = f"import setuptools.build_meta as b; print(b.build_{what}({str(into)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    copy = folder / "copy"
    for name in kept(ROOT):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    (copy / "src/qknorm/ops/backends/_qknorm_cpu.so").write_text("left from a build in place")
    return build(copy, "sdist", folder)


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    with tarfile.open(sdist) as file:
        file.extractall(sdist.parent / "unpacked", filter="data")
    return next((sdist.parent / "unpacked").iterdir())


def test_the_sdist_is_the_whole_repository_and_nothing_that_was_built(unpacked: Path) -> None:
    assert kept(unpacked) - {"PKG-INFO", "setup.cfg"} == kept(ROOT)
    assert not list(unpacked.rglob("*.so"))


def test_the_version_stands_in_one_file(unpacked: Path) -> None:
    assert f"\nVersion: {qknorm.__version__}\n" in (unpacked / "PKG-INFO").read_text()
    stated = re.compile(r"""^(__version__|version)\s*[=:]\s*["']?\d""", re.MULTILINE)
    files = [
        *ROOT.glob("src/**/*.py"),
        *(ROOT / name for name in ("pyproject.toml", "setup.py", "CITATION.cff")),
    ]
    assert [f.relative_to(ROOT) for f in files if stated.search(f.read_text())] == [
        Path("src/qknorm/__init__.py")
    ]


def test_the_changelog_has_the_version_and_room_for_the_next() -> None:
    headings = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == qknorm.__version__
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings[1:])


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_is_named_for_what_is_in_it(unpacked: Path, tmp_path: Path, has_compiler: bool) -> None:
    compiler = tmp_path / "g++"
    if has_compiler:
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
    source = tmp_path / "source"
    shutil.copytree(unpacked, source)
    wheel = build(source, "wheel", tmp_path, CXX=str(compiler))
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        described = file.read(next(n for n in names if n.endswith(".dist-info/WHEEL"))).decode()
    assert ("qknorm/ops/backends/_qknorm_cpu.so" in names) == has_compiler
    assert {
        "qknorm/__init__.py",
        "qknorm/py.typed",
        "qknorm/lab/report.html",
        "pytest_qknorm.py",
    } <= set(names)
    assert not any(name.startswith(("tests", "docs")) or ".data/" in name for name in names)
    tag = "py3-none-linux_x86_64" if has_compiler else "py3-none-any"
    assert wheel.name == f"qknorm-{qknorm.__version__}-{tag}.whl"
    assert f"Tag: {tag}\n" in described
    assert f"Root-Is-Purelib: {str(not has_compiler).lower()}\n" in described

"""How setup.py reads the environment when it builds the library of the cpu backend."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import setuptools
from setuptools.dist import Distribution

ROOT = Path(__file__).parent.parent
# Notes its arguments, one a line, with its own name first, and makes the file that is asked for.
COMPILER = """#!/bin/sh
printf '%s\\n' "$0" "$@" END >> "$LOG"
for last in "$@"; do
    if [ "$before" = "-o" ]; then : > "$last"; fi
    before=$last
done
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the cpu backend needs Linux")


class Build:
    """One build with compilers of our own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.log = folder, patch, folder / "log"
        patch.setattr(setuptools, "setup", lambda **kwargs: None)
        patch.setattr("platform.machine", lambda: "x86_64")
        patch.setenv("LOG", str(self.log))
        for name in ("CXX", "QKNORM_CXXFLAGS"):
            patch.delenv(name, raising=False)
        patch.chdir(ROOT)
        self.code = runpy.run_path(str(ROOT / "setup.py"))

    def program(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(COMPILER)
        path.chmod(0o755)
        return path

    def __call__(self, **environment: str) -> list[list[str]]:
        """The commands that were run, the last of which links."""
        for name, value in environment.items():
            self.patch.setenv(name, value)
        self.log.unlink(missing_ok=True)
        command = self.code["BuildLibrary"](Distribution({"name": "x", "version": "0"}))
        command.build_lib, command.build_temp = str(self.folder / "lib"), str(self.folder / "made")
        command.ensure_finalized()
        command.build_extension(setuptools.Extension(self.code["NAME"], sources=[]))
        self.made = (self.folder / "lib/qknorm/ops/backends/_qknorm_cpu.so").exists()
        if not self.log.exists():
            return []
        commands = self.log.read_text().split("END\n")[:-1]
        return [command.splitlines() for command in commands]


@pytest.fixture
def build(tmp_path, monkeypatch):
    return Build(tmp_path, monkeypatch)


def test_f49_the_compiler_is_split_as_a_shell_would(build):
    cache, compiler = build.program("ccache"), build.program("g++")
    build.patch.setenv("PATH", f"{build.folder}:{os.environ['PATH']}")
    for value, wanted in {
        "ccache g++": [str(cache), "g++"],
        "g++": [str(compiler)],
        "g++ -m64 -DNAME='a b'": [str(compiler), "-m64", "-DNAME=a b"],
        f"'{cache}' {compiler}": [str(cache), str(compiler)],
    }.items():
        commands = build(CXX=value)
        assert build.made
        assert len(commands) == len(build.code["FLAGS"]) + 1
        assert {tuple(command[: len(wanted)]) for command in commands} == {tuple(wanted)}, value
        assert commands[0][len(wanted)] == "-O3"
        assert commands[-1][len(wanted)] == "-shared"


def test_f49_a_path_with_a_space_is_one_word_quoted_or_not(build):
    compiler = build.program("my tools/g++")
    for value in (
        str(compiler),
        f"'{compiler}'",
        str(compiler).replace(" ", "\\ "),
        f'"{compiler}" -m64',
    ):
        commands = build(CXX=value)
        assert {command[0] for command in commands} == {str(compiler)}
        assert build.made


def test_f49_flags_are_split_as_a_shell_would(build):
    build.program("g++")
    build.patch.setenv("PATH", f"{build.folder}:{os.environ['PATH']}")
    commands = build(QKNORM_CXXFLAGS="""-DA="b c" -I'/x y' -g""")
    for command in commands:
        assert {"-DA=b c", "-I/x y", "-g"} <= set(command)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CXX", "g++ 'open", "CXX cannot be split into words: No closing quotation"),
        ("QKNORM_CXXFLAGS", '-DA="b', "QKNORM_CXXFLAGS cannot be split into words"),
        ("CXX", "/nowhere/g++", "/nowhere/g++"),
    ],
)
def test_f49_what_cannot_be_run_builds_without_the_backend_and_says_why(
    build, capsys, name, value, words
):
    build.program("g++")
    build.patch.setenv("PATH", f"{build.folder}:{os.environ['PATH']}")
    assert build(**{name: value}) == []
    assert not build.made
    assert f"no cpu backend was built: {words}" in capsys.readouterr().err.replace(
        "[Errno 2] No such file or directory: '", ""
    )


def test_without_a_compiler_the_build_says_so(build, capsys):
    build.patch.setenv("PATH", str(build.folder))
    assert build() == []
    assert "there is no C++ compiler" in capsys.readouterr().err

"""Builds the library of the `cpu` backend where there is a C++ compiler, and succeeds without one.

The library is plain C: it links neither Python nor torch, so one build serves every release of both.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/qknorm/csrc")
NAME = "qknorm.ops.backends._qknorm_cpu"
COMMON = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]]
FLAGS = {
    "library": [],
    "isa_avx2": AVX2,
    "isa_avx512": AVX512,
    "isa_avx512_bf16": [*AVX512, "-mavx512bf16"],
    "isa_amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


class BuildLibrary(build_ext):
    """Compiles each file with the flags of its instruction set.

    CXX names the compiler, and QKNORM_CXXFLAGS adds flags; both are split as a shell would.
    """

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            self._compile(target)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            print(f"qknorm: no cpu backend was built: {error}", file=sys.stderr)

    def _compile(self, target: Path) -> None:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise OSError("it needs Linux on x86-64")
        compiler, extra = _compiler(), _words("QKNORM_CXXFLAGS")
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        made = []
        for name, flags in FLAGS.items():
            made.append(str(objects / f"{name}.o"))
            source = str(SOURCES / f"{name}.cpp")
            subprocess.run(
                [*compiler, *COMMON, *flags, *extra, "-c", source, "-o", made[-1]], check=True
            )
        subprocess.run([*compiler, "-shared", *extra, "-o", str(target), *made], check=True)

    def get_ext_filename(self, fullname: str) -> str:
        """One name for all Pythons: nothing in it depends on one."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


def _compiler() -> list[str]:
    """The compiler and what belongs to it, such as the name of a cache in front."""
    named = os.environ.get("CXX", "")
    if shutil.which(named):  # a path with a space in it
        return [named]
    found = _words("CXX") or list(filter(shutil.which, ("g++", "clang++", "c++")))[:1]
    if not found:
        raise OSError("there is no C++ compiler (g++ or clang++)")
    return found


def _words(variable: str) -> list[str]:
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise ValueError(f"{variable} cannot be split into words: {error}") from error


class Wheel(bdist_wheel):
    """A wheel for every Python: of this platform if it holds the library, and of any platform if not."""

    def run(self) -> None:
        self.run_command("build")
        if not self.get_finalized_command("build_ext").get_outputs():
            self.distribution.ext_modules = None
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(NAME, sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)

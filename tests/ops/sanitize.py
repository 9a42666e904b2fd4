"""`make sanitize`: the C++ backend under AddressSanitizer, UndefinedBehaviorSanitizer and valgrind.

The sources are copied, so that the library of the working tree stays as it is. In the copy every piece
of the workspace gets a poisoned gap behind it: an overrun from one piece into the next is an error too.
First each tool has to find a planted error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TESTS = [f"tests/ops/{name}.py" for name in ("test_cpu", "test_cpu_decode", "test_cpu_hostile")]
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
COPY = "QKNORM_SANITIZED_COPY"

TAKEN = "    used += n * (int64_t)sizeof(T);\n"
WITH_GAP = """    used += n * (int64_t)sizeof(T);
    if (base) __asan_poison_memory_region(base + used, 128);
    used += 128;
"""
POISON = 'extern "C" void __asan_poison_memory_region(void const volatile *, size_t);\n'

# A workspace of half the size: its end is overrun.
PLANTED = """
import torch, qknorm
from qknorm.ops.backends import cpu_library
whole = cpu_library.Library._workspace
cpu_library.Library._workspace = lambda self, size: whole(self, size // 2)
qknorm.attention(*(torch.ones(1, 2, 70, 16) for _ in range(3)), backend="cpu")
"""


def pytest_configure() -> None:
    """As a plugin of the tests: they run the copy, and every call gets a workspace of its own."""
    from qknorm.ops.backends import cpu_library

    assert str(cpu_library.FILE).startswith(os.environ[COPY]), cpu_library.FILE
    assert not isinstance(cpu_library.LIBRARY, str), cpu_library.LIBRARY
    cpu_library.KEPT_BYTES = 0


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        sys.exit("sanitize: there is no g++")
    return compiler


def _runtime(name: str) -> str:
    """Where the compiler has a library of its own."""
    command = [*shlex.split(_compiler()), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _build(copy: Path, flags: str, *, gaps: bool = False) -> Path:
    """The library of a copy of the sources, with more compiler flags."""
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    if gaps:
        plan = copy / "src/qknorm/csrc/plan.h"
        text = plan.read_text()
        assert text.count(TAKEN) == 1, "Arena::take has changed: put the gaps elsewhere"
        plan.write_text(text.replace(TAKEN, WITH_GAP))
        for source in plan.parent.glob("isa_*.cpp"):
            source.write_text("#include <cstddef>\n" + POISON + source.read_text())
    env = {**os.environ, "QKNORM_CXXFLAGS": flags, "CXX": _compiler()}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=copy, env=env, check=True)
    library = copy / "src/qknorm/ops/backends/_qknorm_cpu.so"
    if not library.exists():
        sys.exit("sanitize: the library was not built")
    return library


def _run(name: str, command: list[str], env: dict[str, str], **options: object) -> tuple[int, str]:
    """Its exit code and the last line of what it printed; everything if it failed."""
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    lines = done.stdout.strip().splitlines() or [""]
    last = lines[-1].strip("= ")
    print(
        f"{name}: exit code {done.returncode}, {time.perf_counter() - start:.0f} s: {last}", flush=True
    )
    return done.returncode, done.stdout


def _address_and_undefined(copy: Path) -> bool:
    _build(copy, SANITIZE, gaps=True)
    logs = copy / "logs"
    logs.mkdir()
    log = f"log_path={logs}/report"
    env = {
        **os.environ,
        # Python links no libstdc++, without which the sanitizer cannot see torch's exceptions.
        "LD_PRELOAD": f"{_runtime('libasan.so')} {_runtime('libstdc++.so')}",
        "PYTHONPATH": f"{copy / 'src'}:{HERE}",
        # Python and torch leave memory to the end of the process.
        "ASAN_OPTIONS": f"detect_leaks=0:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
        "OMP_NUM_THREADS": "1",
        COPY: str(copy),
    }

    def reports() -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(logs.iterdir()))

    code, output = _run("planted overrun, sanitizers", [sys.executable, "-c", PLANTED], env)
    if code == 0 or "qk_" not in reports() or "AddressSanitizer" not in reports():
        print(output, reports(), "sanitize: the planted overrun was not found", sep="\n")
        return False
    for path in logs.iterdir():
        path.unlink()
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "sanitize", "-p", "no:cacheprovider"]
    jobs = ["-n", os.environ.get("TEST_JOBS", "2")]
    code, output = _run("tests, sanitizers", [*pytest, *jobs, *sys.argv[1:], *TESTS], env)
    if code != 0 or reports():
        print(output, reports(), sep="\n")
    return code == 0 and not reports()


def _valgrind(copy: Path) -> bool:
    if shutil.which("valgrind") is None:
        sys.exit("sanitize: there is no valgrind")
    library = _build(copy, "-g1")
    driver = copy / "driver"
    source = HERE / "valgrind_driver.cpp"
    include = f"-I{copy / 'src/qknorm/csrc'}"
    subprocess.run(
        [
            *shlex.split(_compiler()),
            "-std=c++17",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            include,
            source,
            "-o",
            driver,
            "-ldl",
        ],
        check=True,
    )
    memcheck = [
        "valgrind",
        "--quiet",
        "--error-exitcode=9",
        "--leak-check=full",
        str(driver),
        str(library),
    ]
    code, output = _run("planted overrun, valgrind", [*memcheck, "planted"], dict(os.environ))
    if code != 9 or "Invalid read" not in output:
        print(output, "sanitize: the planted overrun was not found", sep="\n")
        return False
    code, output = _run("grid of calls, valgrind", [*memcheck, "grid"], dict(os.environ))
    if code != 0:
        print(output)
    return code == 0


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="qknorm-sanitize-") as name:
        folder = Path(name)
        for part in ("valgrind", "sanitizers"):
            (folder / part).mkdir()
        good = _valgrind(folder / "valgrind")
        good = _address_and_undefined(folder / "sanitizers") and good
    print("sanitize: no errors" if good else "sanitize: ERRORS")
    sys.exit(not good)


if __name__ == "__main__":
    main()

"""What every test runs under: poisoned memory, a fixed seed, one thread per worker."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from torch_settings import precision

# Triton decides when it is imported whether its kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every run: a failure here must be the change's, not the dice's.
settings.register_profile(
    "qknorm",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("qknorm")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Inductor's cache outlives a change of what our operators return: what an earlier version of them left
# there must not be found. Workers inherit the folder.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="qknorm-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name


# `torch.device("meta")` as a context remembers, when it is first entered, which functions make tensors:
# that must not be while those below stand in for them.
with torch.device("cpu"):
    torch.empty(0)


def _wide_patterns() -> list[re.Pattern[str]]:
    lines = Path(__file__).with_name("wide.txt").read_text("utf-8").splitlines()
    return [re.compile(line) for line in lines if line and not line.startswith("#")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `wide.txt`. A pattern that matches none of the tests of a file is an error."""
    matched = set()
    patterns = _wide_patterns()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for pattern in patterns:
            if pattern.search(name):
                item.add_marker(pytest.mark.wide)
                matched.add(pattern)
    is_whole = len({item.path for item in items}) > 50  # and not some files or tests that were named
    unmatched = [pattern.pattern for pattern in patterns if pattern not in matched]
    if is_whole and unmatched:
        raise pytest.UsageError(f"tests/wide.txt: no test is called {' or '.join(unmatched)}")


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        if x.dtype.is_floating_point and x.device.type != "meta":
            with torch.no_grad():
                x.fill_(torch.nan)
        return x

    return empty


@pytest.fixture(autouse=True)
def nan_in_unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote reads as NaN, so that relying on it cannot pass by luck."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def nothing_stays_watched() -> Iterator[None]:
    """A monitor that a test forgets to detach would be met by the tests that follow."""

    def watched() -> set[Any]:
        functional = sys.modules.get("qknorm.monitor.taps.functional")
        forward = sys.modules.get("qknorm.monitor.forward")
        transformers = sys.modules.get("qknorm.monitor.taps.transformers")
        found = set() if functional is None else set(functional._Patched.users)
        found |= set() if forward is None else set(forward.REPLACED)
        return found | (
            {"transformers"} if transformers is not None and transformers._Wrapped.users else set()
        )

    before = watched()
    yield
    assert watched() <= before, "a monitor is still attached: detach it"


@pytest.fixture(autouse=True)
def settings_are_as_they_were() -> Iterator[None]:
    """A setting of torch that a test leaves behind would be met by the tests that follow."""

    def found() -> tuple[Any, ...]:
        return *precision(), torch.get_default_dtype(), torch.get_num_threads()

    before = found()
    yield
    assert found() == before, "a setting of torch was left changed: undo it in the test"


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)

"""What the tests of the C++ backend share."""

from __future__ import annotations

import pytest

from qknorm.ops.backends import cpu_library


@pytest.fixture(params=cpu_library.INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test on every instruction set that this processor has."""
    library = cpu_library.LIBRARY
    if isinstance(library, str):
        pytest.skip(f"no cpu backend: {library}")
    if request.param not in library.instruction_sets:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv(cpu_library.FORCE, request.param)
    return request.param

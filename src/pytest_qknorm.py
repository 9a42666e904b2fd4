"""The pytest plug-in: a fixture `assert_qk_norm`.

A module of its own so that test runs that do not use it import nothing of qknorm, nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def assert_qk_norm() -> Callable[..., Any]:
    """`qknorm.auditor.testing.assert_qk_norm`: fails with one line for each finding."""
    from qknorm.auditor.testing import assert_qk_norm

    return assert_qk_norm

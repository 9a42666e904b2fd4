"""The formula read back from released architectures equals the one written down from their source."""

from __future__ import annotations

from functools import partial

import pytest

from architectures import ARCHITECTURES
from qknorm.auditor import audit
from readback import assert_read_back


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.timeout(60)
def test_the_formula_is_read_back(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make()
    architecture.randomise_(model, 1)
    report = audit(model)
    assert_read_back(report, architecture.expected, partial(architecture.gain, model))

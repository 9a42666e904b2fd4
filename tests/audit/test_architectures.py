"""The formula read back from released architectures equals the one written down from their source."""

from __future__ import annotations

import math

import pytest
import torch

from architectures import ARCHITECTURES
from qknorm.audit import audit

TOLERANCE = {"eps": 0.02, "scale": 1e-3, "softcap": 1e-2}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.timeout(60)
def test_the_formula_is_read_back(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make()
    architecture.randomise_(model, 1)
    report = audit(model)
    assert set(report.formulas) == set(architecture.expected), report.not_probed
    for path, expected in architecture.expected.items():
        formula = report.formulas[path]
        for field, wanted in vars(expected).items():
            found = getattr(formula, field)
            if isinstance(wanted, float):
                assert math.isclose(found, wanted, rel_tol=TOLERANCE[field]), (
                    path,
                    field,
                    found,
                    wanted,
                )
            else:
                assert found == wanted, (path, field)
        for side, found in (("q", formula.q_gain_values), ("k", formula.k_gain_values)):
            stored = architecture.gain(model, path, side)
            assert (found is None) == (stored is None), (path, side)
            if found is not None:
                torch.testing.assert_close(found, stored.double(), rtol=2e-3, atol=2e-3)

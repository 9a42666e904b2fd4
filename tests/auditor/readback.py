"""Whether a report reads every layer back as it was written down by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qknorm.auditor import Report

TOLERANCE = {"eps": 0.02, "scale": 1e-3, "softcap": 1e-2}


def assert_read_back(
    report: Report, expected: Mapping[str, Any], gain: Callable[[str, str], Tensor | None]
) -> None:
    """`expected` formulas by path, and the effective gain `[H, D]` of a path and "q" or "k"."""
    assert set(report.formulas) == set(expected), report.not_probed
    for path, written in expected.items():
        formula = report.formulas[path]
        for field, wanted in vars(written).items():
            found = getattr(formula, field)
            where = (path, field, found, wanted)
            if isinstance(wanted, float):
                assert found is not None, where
                assert math.isclose(found, wanted, rel_tol=TOLERANCE[field]), where
            else:
                assert found == wanted, where
        for side, values in (("q", formula.q_gain_values), ("k", formula.k_gain_values)):
            stored = gain(path, side)
            assert (values is None) == (stored is None), (path, side)
            if values is not None:
                torch.testing.assert_close(values, stored.double(), rtol=2e-3, atol=2e-3)

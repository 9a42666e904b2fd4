"""For tests: `assert_qk_norm(model)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from qknorm.auditor.auditor import audit
from qknorm.auditor.findings import Report, Severity


def assert_qk_norm(
    model: nn.Module,
    inputs: Any = None,
    *,
    fail_on: Severity = "warning",
    optimizer: torch.optim.Optimizer | None = None,
    trained: bool = False,
    expect: Mapping[str, object] | None = None,
    suppress: Mapping[str, str] | None = None,
) -> Report:
    """Fail unless every attention of the model is normed on q and k, and nothing is wrong with it.

    Args are those of `audit`. Raises AssertionError with a line for each finding.
    """
    __tracebackhide__ = True
    report = audit(model, inputs, optimizer=optimizer, trained=trained, expect=expect, suppress=suppress)
    lines = [
        f"{one.code} {one.layer or 'model'}: {one.message}. {one.mend}"
        for one in report.at_least(fail_on)
    ]
    lines += [f"not probed: {sentence}" for sentence in report.not_probed]
    bare = [path for path, f in report.formulas.items() if f.q_norm is None and f.k_norm is None]
    lines += [
        f"QK001 {path}: q and k are not normed" for path in bare if "QK001" not in (suppress or {})
    ]
    if lines:
        raise AssertionError("\n".join(["QK-norm is not as it should be:", *lines]))
    return report

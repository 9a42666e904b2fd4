"""An assertion for tests: `assert_qk_norm(model)`."""

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
    """Fail unless every attention of the model has QK-norm and the audit finds no mistake.

    Args:
        model: the model, as for `audit`.
        inputs: the arguments of the model, as for `audit`.
        fail_on: the lowest severity of a finding that fails.
        optimizer: the optimizer of the model, as for `audit`.
        trained: whether the weights come from training, as for `audit`.
        expect: the expected formula, as for `audit`.
        suppress: reasons by code for findings that are accepted, as for `audit`. With "QK001" in it, an
            attention without a norm does not fail.

    Returns:
        The report of the audit.

    Raises:
        AssertionError: something was found, could not be probed, or has no norm. The message has a line
            for each.
        ValueError: the model cannot be audited, see `audit`.
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

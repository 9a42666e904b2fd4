"""An audit finds the same whatever settings of torch belong to the whole process, and leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from architectures import ARCHITECTURES
from mutants import HEALTHY, MUTANTS
from qknorm.auditor import Report, audit
from qknorm.ops.products import rounds
from torch_settings import SWITCHES, default_dtype, precision, switched

FAULTY = next(m for m in MUTANTS if m.name == "split-v_normed_scale_of_hidden")


def told(report: Report) -> Any:
    """Codes by layer, and what was read."""
    formulas = {
        path: {k: v for k, v in vars(f).items() if not k.endswith("values")}
        for path, f in report.formulas.items()
    }
    return sorted((one.code, str(one.layer)) for one in report.findings), formulas, report.not_probed


def assert_same(found: Report, wanted: Report) -> None:
    one, other = told(found), told(wanted)
    assert (one[0], one[2]) == (other[0], other[2])
    for path, fields in other[1].items():
        for name, value in fields.items():
            got = one[1][path][name]
            is_close = isinstance(value, float) and math.isclose(got, value, rel_tol=1e-2)
            assert is_close or got == value, (path, name, got, value)
        for side in ("q_gain_values", "k_gain_values"):
            values = [getattr(report.formulas[path], side) for report in (found, wanted)]
            torch.testing.assert_close(*values, atol=1e-3, rtol=1e-3)


def audits() -> list[Callable[[], Report]]:
    """A sound layer and faulty ones, with inputs of their own or with those that are made for them."""
    made: list[Callable[[], Report]] = []
    for mutant in (HEALTHY[0], FAULTY):
        model, inputs = mutant.build(), mutant.inputs()
        made.append(lambda model=model, inputs=inputs: audit(model, inputs, trained=True))
    for name in ("vit", "gpt_oss"):
        made.append(lambda model=ARCHITECTURES[name].make(): audit(model))
    return made


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_f1_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    for run in audits():
        wanted = run()
        with default_dtype(default):
            found = run()
            assert torch.get_default_dtype() == default
        assert_same(found, wanted)


def test_f1_the_default_device_changes_nothing() -> None:
    mutant = HEALTHY[0]
    model, inputs = mutant.build(), mutant.inputs()
    wanted = audit(model, inputs, expect={"causal": True})
    with torch.device("meta"):
        found = audit(Here(model), inputs, expect={"causal": True})
    assert found.codes == wanted.codes == set()
    assert len(found.formulas) == 2


class Here(nn.Module):
    """What the model itself makes is made on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return self.model(*args, **kwargs)


class Rounding(TorchFunctionMode):
    """Stands for kernels that round fp32 products where they are allowed to: not all processors do."""

    products = ("matmul", "__matmul__", "linear", "scaled_dot_product_attention", "bmm", "addmm")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.__name__ in self.products and out.dtype == torch.float32:
            return out.bfloat16().float()
        return out


def test_f2_products_that_may_be_rounded_change_nothing() -> None:
    runs = [audits()[0], audits()[-1]]
    wanted = [run() for run in runs]
    with Rounding():
        assert runs[0]().codes, "the stand-in rounds"
    for name in SWITCHES:
        with switched(name), Rounding() if rounds("cpu") else nullcontext():
            before = precision()
            found = [run() for run in runs]
            assert precision() == before
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)

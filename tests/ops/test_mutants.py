"""The suite can fail: each invisible mistake, seeded in the oracle, is rejected on a fixed problem."""

from __future__ import annotations

import pytest
import torch

import oracle
from conformance import as_attention_fn, check, expected
from problems import HARD, Problem

HALF = (torch.bfloat16, torch.float16)


def rejecting_problem(fault: str, dtype: torch.dtype) -> str | None:
    """The first problem on which the faulty oracle is caught."""
    for name, problem in HARD.items():
        try:
            check(as_attention_fn(fault), problem, dtype)
        except AssertionError:
            return name
    return None


def test_there_are_enough_faults() -> None:
    assert len(oracle.FAULTS) >= 30
    assert len(set(oracle.FAULTS + oracle.ROUNDING_FAULTS)) == len(
        oracle.FAULTS + oracle.ROUNDING_FAULTS
    )
    assert len(HARD) >= 24


@pytest.mark.parametrize("fault", oracle.FAULTS)
def test_fault_is_rejected_in_float64(fault: str) -> None:
    assert rejecting_problem(fault, torch.float64) is not None


# The tolerances of half precision are the widest, and all that a GPU kernel is ever tested with.
@pytest.mark.parametrize("fault", oracle.FAULTS + oracle.ROUNDING_FAULTS)
def test_fault_is_rejected_in_bfloat16(fault: str) -> None:
    assert rejecting_problem(fault, torch.bfloat16) is not None


@pytest.mark.parametrize("fault", oracle.ROUNDING_FAULTS)
def test_rounding_fault_is_rejected_in_float16(fault: str) -> None:
    assert rejecting_problem(fault, torch.float16) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("problem", HARD.values(), ids=HARD.keys())
def test_oracle_passes_its_own_suite(problem: Problem, dtype: torch.dtype) -> None:
    check(as_attention_fn(), problem, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("problem", HARD.values(), ids=HARD.keys())
def test_budget_is_a_few_ulps_of_the_magnitude(problem: Problem, dtype: torch.dtype) -> None:
    # Were the magnitudes too small somewhere, the budget would explode and the suite accept anything.
    assert max(expected(problem, dtype).budget_ulps.values()) <= 2.0


def test_check_rejects_an_output_of_another_dtype() -> None:
    def widened(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        out, stats = as_attention_fn()(q, k, v, **options)
        return out.float(), stats

    with pytest.raises(AssertionError, match="out is"):
        check(widened, HARD["plain"], torch.bfloat16)


def test_unwritten_memory_reads_as_nan() -> None:
    like = torch.ones(3)
    made = (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,)))
    assert all(x.isnan().all() for x in made)

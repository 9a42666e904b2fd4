"""Every backend against the oracle: out, all gradients, all statistics, in every dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import qknorm
from conformance import DTYPES, check
from problems import BOUNDARY, HARD, Problem, make_inputs, problems
from qknorm.ops.backends import flash_blocks, stock

BACKENDS = ("reference", "stock")
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def backend(name: str) -> Callable[..., Any]:
    return functools.partial(qknorm.attention, backend=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("problem", HARD.values(), ids=HARD.keys())
def test_hard_problem(problem: Problem, name: str, dtype: torch.dtype) -> None:
    check(backend(name), problem, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=80)
@given(problem=problems())
def test_any_problem(name: str, dtype: torch.dtype, problem: Problem) -> None:
    check(backend(name), problem, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("problem", BOUNDARY.values(), ids=BOUNDARY.keys())
def test_block_boundary(problem: Problem, dtype: torch.dtype) -> None:
    assert max(problem.Tq, problem.Tk) > stock.ROWS, "a single block has no boundary"
    check(backend("stock"), problem, dtype)


@pytest.fixture
def plain_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code of devices without a flash kernel, cut so small that every problem has many pieces."""
    calls = []
    plain_forward, plain_backward = flash_blocks._plain_forward, flash_blocks._plain_backward

    def counted(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(fn)
            return fn(*args)

        return call

    monkeypatch.setattr(flash_blocks, "uses_flash", lambda q, k: False)
    monkeypatch.setattr(flash_blocks, "SCORE_BUDGET", 700)
    monkeypatch.setattr(flash_blocks, "_plain_forward", counted(plain_forward))
    monkeypatch.setattr(flash_blocks, "_plain_backward", counted(plain_backward))
    yield
    assert plain_forward in calls, "the test did not reach the plain forward"
    assert plain_backward in calls, "the test did not reach the plain backward"


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("problem", HARD.values(), ids=HARD.keys())
@pytest.mark.usefixtures("plain_blocks")
def test_plain_blocks_on_hard_problem(problem: Problem, dtype: torch.dtype) -> None:
    check(backend("stock"), problem, dtype)


@pytest.mark.parametrize(
    "name", ["257_causal", "513_window", "513_documents", "513_chunk_window", "600_more_queries"]
)
@pytest.mark.usefixtures("plain_blocks")
def test_plain_blocks_at_block_boundary(name: str) -> None:
    check(backend("stock"), BOUNDARY[name], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("problem_name", ["everything", "sink_token", "chunk", "plain"])
def test_each_gradient_alone_equals_that_of_all(
    problem_name: str, name: str, dtype: torch.dtype
) -> None:
    problem = HARD[problem_name]

    def run(wanted: list[str]) -> list[torch.Tensor]:
        inputs = make_inputs(problem, dtype)
        for leaf_name, leaf in inputs.leaves.items():
            leaf.requires_grad_(leaf_name in wanted)
        out = backend(name)(inputs.q, inputs.k, inputs.v, **inputs.options)
        return list(torch.autograd.grad(out, [inputs.leaves[n] for n in wanted], inputs.d_out))

    every = list(make_inputs(problem, dtype).leaves)
    for leaf_name, together in zip(every, run(every), strict=True):
        assert torch.equal(run([leaf_name])[0], together), leaf_name


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("problem_name", ["everything", "sink_token", "chunk", "own_key_heads"])
def test_strides_of_the_incoming_gradient_do_not_matter(
    problem_name: str, name: str, dtype: torch.dtype
) -> None:
    inputs = make_inputs(HARD[problem_name], dtype)
    leaves = list(inputs.leaves.values())

    def run(d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = backend(name)(inputs.q, inputs.k, inputs.v, **inputs.options)
        return torch.autograd.grad(out, leaves, d_out)

    # What a projection sends back is [B, T, H, Dv]; what a sum sends back has stride 0.
    permuted = inputs.d_out.transpose(1, 2).contiguous().transpose(1, 2)
    constant = torch.full((), 0.7, dtype=dtype).expand(inputs.d_out.shape)
    for strided in (permuted, constant):
        for actual, wanted in zip(run(strided), run(strided.contiguous()), strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_computes_the_same_bits(mode: Callable[[], Any], name: str) -> None:
    inputs = make_inputs(HARD["everything"], torch.bfloat16)
    wanted, _ = backend(name)(inputs.q, inputs.k, inputs.v, **inputs.options, stats=True)
    with mode():
        out, _ = backend(name)(inputs.q, inputs.k, inputs.v, **inputs.options, stats=True)
    assert not out.requires_grad
    assert torch.equal(out, wanted)

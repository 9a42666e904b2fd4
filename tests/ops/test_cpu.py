"""The C++ backend: the conformance suite on every instruction set, and what only it promises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import qknorm
from conformance import check
from problems import BOUNDARY, HARD, Problem, make_inputs, problems
from qknorm import Mask
from qknorm.ops.backends import cpu_library
from qknorm.ops.backends.call import Call
from qknorm.ops.backends.fused import HEADS, NONE, ROWS, Inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
_LIBRARY = cpu_library.LIBRARY
pytestmark = pytest.mark.skipif(isinstance(_LIBRARY, str), reason=f"no cpu backend: {_LIBRARY}")

# Sinks whose logit differs by query are not this backend's.
SERVED = {name: p for name, p in {**HARD, **BOUNDARY}.items() if p.sink != "token"}


def cpu(*args: Any, **kwargs: Any) -> Any:
    return qknorm.attention(*args, backend="cpu", **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("problem", SERVED.values(), ids=SERVED.keys())
def test_problem_on_every_instruction_set(problem: Problem, dtype: torch.dtype, isa: str) -> None:
    check(cpu, problem, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@settings(max_examples=60)
@given(problem=problems().filter(lambda p: p.sink != "token"))
def test_any_problem(isa: str, dtype: torch.dtype, problem: Problem) -> None:
    check(cpu, problem, dtype)


@pytest.mark.parametrize("D", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
def test_every_head_width(D: int, dtype: torch.dtype, isa: str) -> None:
    check(cpu, Problem(B=1, Hq=2, Hk=1, Tq=70, Tk=70, D=D, Dv=D // 2, R=D // 2), dtype)


def _step(threads: int, dtype: torch.dtype, name: str) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = make_inputs(SERVED[name], dtype)
        leaves = list(inputs.leaves.values())
        out = cpu(inputs.q, inputs.k, inputs.v, **inputs.options)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.d_out)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["everything", "513_documents", "600_packed", "513_chunk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
def test_the_bits_do_not_depend_on_the_number_of_threads(
    name: str, dtype: torch.dtype, isa: str
) -> None:
    for one, two in zip(_step(1, dtype, name), _step(2, dtype, name), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_inf_in_one_row_stay_in_that_row(poison: float, dtype: torch.dtype, isa: str) -> None:
    q, k, v = (torch.randn(1, 2, 90, 32).to(dtype) for _ in range(3))
    clean, stats = cpu(q, k, v, stats="rows")
    q[0, 1, 40, 3] = poison
    out, found = cpu(q, k, v, stats="rows")
    assert out[0, 1, 40].isnan().all()
    assert found.rows.lse[0, 1, 40].isnan()
    keep = torch.ones(1, 2, 90, dtype=torch.bool)
    keep[0, 1, 40] = False
    assert torch.equal(out[keep], clean[keep])
    assert torch.equal(found.rows.entropy_nats[keep], stats.rows.entropy_nats[keep])


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0), (1, 2, 0, 0)], ids=str)
def test_empty_tensors_give_empty_or_zero_results(shape: tuple[int, ...], isa: str) -> None:
    B, H, Tq, Tk = shape
    q = torch.randn(B, H, Tq, 16, requires_grad=True)
    k, v = (torch.randn(B, H, Tk, 16, requires_grad=True) for _ in range(2))
    out, stats = cpu(q, k, v, mask=Mask(), stats=True)
    assert out.shape == (B, H, Tq, 16)
    assert not out.any()
    assert int(stats.row_count) == 0
    out.sum().backward()
    assert not q.grad.any()


def test_document_ids_beyond_32_bits_are_told_apart(isa: str) -> None:
    q, k, v = (torch.randn(1, 1, 6, 16) for _ in range(3))
    small = torch.tensor([[0, 0, 1, 1, 2, -1]])
    large = torch.where(small < 0, small, small + 2**40)
    for a, b in zip(
        cpu(q, k, v, mask=Mask(causal=True, documents=small)),
        cpu(q, k, v, mask=Mask(causal=True, documents=large)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_what_it_cannot_do_is_refused_by_name_and_served_by_auto() -> None:
    q, k, v = (torch.randn(1, 2, 5, 16, dtype=torch.float64) for _ in range(3))
    with pytest.raises(qknorm.UnsupportedError, match=r"'cpu' does not support float64.*stock"):
        cpu(q, k, v)
    token = qknorm.SinkToken(torch.randn(2, 16), torch.randn(2, 16))
    q, k, v = q.float(), k.float(), v.float()
    with pytest.raises(qknorm.UnsupportedError, match=r"differs by query.*stock"):
        cpu(q, k, v, sink=token)
    assert qknorm.attention(q, k, v, sink=token).shape == q.shape


def test_second_derivatives_are_refused() -> None:
    q, k, v = (torch.randn(1, 1, 5, 16, requires_grad=True) for _ in range(3))
    (once,) = torch.autograd.grad(cpu(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(once.sum(), q)


@pytest.mark.parametrize("stats", [NONE, HEADS, ROWS])
def test_opcheck(stats: int) -> None:
    inputs = make_inputs(SERVED["everything"], torch.float32)
    options = inputs.options | {"scale": 0.3}
    call = Call(q=inputs.q, k=inputs.k, v=inputs.v, stats=False, **options)
    x = Inputs(*(t.detach() if isinstance(t, torch.Tensor) else t for t in Inputs.of(call)))
    torch.library.opcheck(torch.ops.qknorm.cpu_forward.default, (*x, stats))
    out, lse, *_ = torch.ops.qknorm.cpu_forward(*x, stats)
    torch.library.opcheck(torch.ops.qknorm.cpu_backward.default, (torch.ones_like(out), out, lse, *x))


@pytest.mark.parametrize("stats", [False, True])
def test_the_whole_call_compiles_into_one_graph(stats: bool) -> None:
    inputs = make_inputs(SERVED["everything"], torch.float32)
    call: Callable[..., Any] = functools.partial(cpu, **inputs.options, stats=stats)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = [f(inputs.q, inputs.k, inputs.v) for f in (call, compiled)]
    wanted, actual = ([r] if not stats else [r[0], r[1].max_logit, r[1].entropy_nats] for r in results)
    for a, b in zip(actual, wanted, strict=True):
        assert torch.equal(a, b)

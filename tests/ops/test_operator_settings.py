"""The operator and its statistics under the settings of torch that belong to the whole process.

Default dtypes (F1), the two interfaces to the precision of fp32 products (F2, F4), autocast (F3). Right
values are those of the oracle, or those without the setting, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qknorm
from conformance import check
from problems import HARD, Problem, make_inputs
from qknorm import Mask
from qknorm.ops.backends import BACKENDS
from qknorm.ops.backends.call import Case
from qknorm.ops.backends.cpu_library import LIBRARY, Args
from qknorm.ops.products import exact_matmul, rounds
from torch_settings import SWITCHES, default_dtype, precision, switched

AVAILABLE = [
    name
    for name in ("reference", "stock", "cpu", "triton")
    if not BACKENDS[name].refuses(Case(device="cpu", dtype=torch.float32, head_dim=8, value_dim=8))
]
SMALL = Problem(B=2, Hq=2, Hk=1, Tq=9, Tk=11, D=8, Dv=8, R=4, sink="learnable", documents="packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", AVAILABLE)
def test_f1_the_default_dtype_changes_nothing(
    backend: str, default: torch.dtype, dtype: torch.dtype
) -> None:
    if backend == "triton" and dtype == torch.bfloat16:
        dtype = torch.float16  # numpy, on which the interpreter stands, has no bf16
    if BACKENDS[backend].refuses(Case(device="cpu", dtype=dtype, head_dim=8, value_dim=8)):
        dtype = torch.float32
    problem = HARD["everything"] if backend != "triton" else SMALL

    def run(*args: Any, **options: Any) -> Any:
        with default_dtype(default):
            return qknorm.attention(*args, **options, backend=backend)

    def backward_too(fn: Callable[..., Any]) -> list[Tensor]:
        inputs = make_inputs(problem, dtype)
        with default_dtype(default):
            out, _ = fn(inputs.q, inputs.k, inputs.v, **inputs.options, stats=True)
            return torch.autograd.grad(out, list(inputs.leaves.values()), inputs.d_out)

    check(run, problem, dtype)
    plain = make_inputs(problem, dtype)
    out = qknorm.attention(plain.q, plain.k, plain.v, **plain.options, backend=backend)
    wanted = torch.autograd.grad(out, list(plain.leaves.values()), plain.d_out)
    for a, w in zip(backward_too(run), wanted, strict=True):
        assert torch.equal(a, w)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_f1_functions_beside_the_operator_under_a_default_dtype(default: torch.dtype) -> None:
    inputs = make_inputs(SMALL, torch.float32)
    o = inputs.options
    norm = {name: o[name] for name in ("q_gain", "k_gain", "rope", "eps")}

    def results() -> list[Tensor]:
        stats = qknorm.logit_stats(inputs.q, inputs.k, **o, sample=5)
        tops = [stats.max_logit, stats.entropy_nats, stats.entropy_ratio, stats.sink_mass]
        bounds = [
            qknorm.logit_bound(o["q_gain"], o["k_gain"], rope=o["rope"]),
            qknorm.logit_bound(o["q_gain"], o["k_gain"]),
        ]
        return [*tops, *bounds, *qknorm.qk_norm_rope(inputs.q, inputs.k, **norm)]

    wanted = results()
    with default_dtype(default):
        for a, w in zip(results(), wanted, strict=True):
            assert a.dtype == w.dtype
            assert torch.equal(a, w)


@pytest.mark.skipif(isinstance(LIBRARY, str), reason=f"no cpu backend: {LIBRARY}")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lse", torch.zeros(2, 1, 2, 3, dtype=torch.float64)),
        ("dq_gain", torch.zeros(1, 2, 8, dtype=torch.bfloat16)),
        ("dq_gain", torch.zeros(1, 2, 7)),
        ("row_counts", torch.zeros(2, dtype=torch.int32)),
        ("out", torch.zeros(1, 2, 3, 8, device="meta")),
        ("out", torch.zeros(1, 2, 8, 3).mT),
    ],
)
def test_f1_a_buffer_of_another_kind_never_reaches_the_library(name: str, tensor: Tensor) -> None:
    args = Args()
    args.B, args.Hq, args.Hk, args.Tq, args.Tk, args.D, args.Dv = 1, 2, 1, 3, 3, 8, 8
    with pytest.raises(RuntimeError, match=name):
        args.point(**{name: tensor})


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("backend", AVAILABLE)
def test_f2_f4_statistics_and_the_definition_stay_exact(backend: str, switch: str) -> None:
    problem = SMALL if backend == "triton" else HARD["everything"]

    def run(*args: Any, **options: Any) -> Any:
        before = precision()
        result = qknorm.attention(*args, **options, backend=backend)
        assert precision() == before
        return result

    with switched(switch):
        check(run, problem, torch.float32)


@pytest.mark.parametrize("switch", SWITCHES)
def test_f2_logit_stats_are_those_without_the_switch(switch: str) -> None:
    q, k = torch.randn(2, 4, 300, 64) * 4, torch.randn(2, 2, 300, 64) * 4
    wanted = qknorm.logit_stats(q, k)
    with switched(switch):
        before = precision()
        found = qknorm.logit_stats(q, k)
        assert precision() == before
    torch.testing.assert_close(found.max_logit, wanted.max_logit, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.entropy_nats, wanted.entropy_nats, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("switch", SWITCHES)
def test_f4_exact_products_are_not_rounded_and_their_gradient_is_not(switch: str) -> None:
    a, b = torch.randn(3, 65, 64, requires_grad=True), torch.randn(3, 64, 67, requires_grad=True)
    exact = (a.double() @ b.double()).float()
    d = torch.randn_like(exact)
    wanted = torch.autograd.grad((a.double() @ b.double()), (a, b), d.double())
    with switched(switch):
        assert rounds("cpu") or rounds("cuda")
        found = exact_matmul(a, b)
        grads = torch.autograd.grad(found, (a, b), d)
    for x, w in zip((found, *grads), (exact, *wanted), strict=True):
        torch.testing.assert_close(x, w, rtol=1e-5, atol=1e-5)


def test_f3_logit_stats_under_autocast_are_those_of_the_given_q_and_k() -> None:
    q, k = torch.randn(1, 2, 64, 32) * 3, torch.randn(1, 2, 64, 32) * 3
    exact = (q.double() @ k.double().mT) * 32**-0.5
    visible = Mask(causal=True).visible(64, 64, q.device)
    wanted = exact.masked_fill(~visible, -torch.inf).amax((0, 2, 3)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = qknorm.logit_stats(q, k)
        token = qknorm.SinkToken(torch.randn(2, 32), torch.randn(2, 32))
        with_token = qknorm.logit_stats(q, k, sink=token)
    torch.testing.assert_close(found.max_logit, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        with_token.sink_mass, qknorm.logit_stats(q, k, sink=token).sink_mass, rtol=0, atol=0
    )
    gains = torch.rand(2, 32) + 0.5, torch.rand(2, 32) + 0.5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bound = qknorm.logit_bound(*gains)
    assert torch.equal(bound, qknorm.logit_bound(*gains))

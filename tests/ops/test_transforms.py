"""The operator under `torch.func`: gradients, batches, and what has no derivative of that kind (F15).

Shapes: N examples, B batch, Hq / Hk heads, T tokens, D head width.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

import qknorm
from qknorm import Mask, Rope, UnsupportedError
from qknorm.ops.backends import BACKENDS
from qknorm.ops.backends.call import Case

N, B, HQ, HK, T, D = 3, 2, 4, 2, 9, 16
NAMES = ("q", "k", "v", "q_gain", "k_gain", "sink")
HAS_CPU = (
    BACKENDS["cpu"].refuses(Case(device="cpu", dtype=torch.float32, head_dim=D, value_dim=D)) is None
)
FAST = [
    pytest.param("cpu", marks=pytest.mark.skipif(not HAS_CPU, reason="no cpu backend on this machine")),
    "stock",
]


@pytest.fixture(autouse=True)
def no_fallback_of_vmap() -> Any:
    """torch warns where it loops over examples for want of a rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


def examples() -> tuple[Tensor, ...]:
    """N of each input, all different."""
    return (
        *(torch.randn(N, B, H, T, D) for H in (HQ, HK, HK)),
        *(torch.rand(N, H, D) + 0.5 for H in (HQ, HK)),
        torch.randn(N, HQ),
    )


def loss(*inputs: Tensor, backend: str, mask: Mask = Mask(causal=True)) -> Tensor:
    named = dict(zip(NAMES, inputs, strict=True))
    out, stats = qknorm.attention(**named, mask=mask, rope=table(), backend=backend, stats=True)
    return out.square().sum() + 0.0 * stats.max_logit.sum()


@functools.cache
def table() -> Rope:
    angle = torch.arange(T)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    return Rope(angle.cos(), angle.sin(), "half")


@pytest.mark.parametrize("backend", FAST)
def test_f15_gradients_by_torch_func_are_those_of_autograd(backend: str) -> None:
    inputs = [x[0].requires_grad_() for x in examples()]
    fn = functools.partial(loss, backend=backend)
    wanted = torch.autograd.grad(fn(*inputs), inputs)
    for a, w in zip(grad(fn, argnums=tuple(range(6)))(*inputs), wanted, strict=True):
        assert torch.equal(a, w)


@pytest.mark.parametrize("batched", ["all", "q", "k", "gain", "sink", "documents"])
@pytest.mark.parametrize("backend", FAST)
def test_f15_gradients_per_example(backend: str, batched: str) -> None:
    inputs = examples()
    documents = torch.arange(T).expand(N, B, T) // torch.tensor([2, 3, 4])[:, None, None]
    over = {"all": NAMES, "gain": ("q_gain", "k_gain"), "documents": ("q",)}.get(batched, (batched,))
    dims = tuple(0 if name in over else None for name in NAMES)
    some = [x if dim == 0 else x[0] for x, dim in zip(inputs, dims, strict=True)]
    ids, ids_dim = (documents, 0) if batched == "documents" else (documents[0], None)

    def one(ids: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        fn = functools.partial(loss, backend=backend, mask=Mask(causal=True, documents=ids))
        return grad(fn, argnums=tuple(range(6)))(*inputs)

    found = vmap(one, in_dims=(ids_dim, *dims))(ids, *some)
    for n in range(N):
        single = [x[n] if dim == 0 else x for x, dim in zip(some, dims, strict=True)]
        wanted = one(ids[n] if ids_dim == 0 else ids, *single)
        for a, w in zip(found, wanted, strict=True):
            torch.testing.assert_close(a[n], w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stats", [True, "rows"])
@pytest.mark.parametrize("backend", FAST)
def test_f15_statistics_per_example_and_nested(backend: str, stats: Any) -> None:
    q, k, v, *_ = examples()

    def one(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        out, found = qknorm.attention(q, k, v[0], stats=stats, backend=backend)
        return out, found.max_logit, found.entropy_nats, found.row_count

    found = vmap(vmap(one, in_dims=(0, None)), in_dims=(None, 0))(q, k)  # every q with every k
    for i in range(N):
        for j in range(N):
            for a, w in zip(found, one(q[j], k[i]), strict=True):
                torch.testing.assert_close(a[i, j], w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", FAST)
def test_f15_jacobians(backend: str) -> None:
    inputs = [x[0] for x in examples()]

    def of_sink(sink: Tensor, backend: str) -> Tensor:
        return qknorm.attention(*inputs[:3], sink=sink, backend=backend).sum((0, 2))

    found, wanted = (
        jacrev(functools.partial(of_sink, backend=b))(inputs[5]) for b in (backend, "reference")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
def test_f15_forward_mode_is_the_references(backend: str) -> None:
    inputs = [x[0] for x in examples()]

    def of_q(q: Tensor, backend: str) -> Tensor:
        return loss(q, *inputs[1:], backend=backend)

    with pytest.raises(UnsupportedError, match=r"forward-mode.*use reference"):
        jvp(functools.partial(of_q, backend=backend), (inputs[0],), (inputs[0],))
    direction = torch.randn_like(inputs[0])
    # `auto` goes to the reference, and the derivative is that of the gradient.
    _, along = jvp(functools.partial(of_q, backend="auto"), (inputs[0],), (direction,))
    gradient = grad(functools.partial(of_q, backend=backend))(inputs[0])
    torch.testing.assert_close(along, (gradient * direction).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", FAST)
def test_f15_a_second_derivative_is_refused_and_not_zero(backend: str) -> None:
    inputs = [x[0] for x in examples()]
    fn = functools.partial(loss, backend=backend)
    with pytest.raises(RuntimeError, match=r"no second derivative.*reference"):
        grad(lambda q: grad(fn)(q, *inputs[1:]).square().sum())(inputs[0])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_f5_tables_of_cos_and_sin_get_their_gradient(layout: str) -> None:
    q, k, v, q_gain, k_gain, _ = (x[0] for x in examples())
    angle = torch.arange(T)[:, None] * torch.tensor([1.0, 0.1, 0.01])

    def gradients(backend: str, dtype: torch.dtype) -> list[Tensor]:
        cos, sin = (x.to(dtype).requires_grad_() for x in (angle.cos(), angle.sin()))
        named = {"q_gain": q_gain.to(dtype), "k_gain": k_gain.to(dtype), "rope": Rope(cos, sin, layout)}
        out = qknorm.attention(*(x.to(dtype) for x in (q, k, v)), **named, backend=backend)
        return list(torch.autograd.grad(out.square().sum(), (cos, sin)))

    wanted = gradients("reference", torch.float64)
    for a, w in zip(gradients("auto", torch.float32), wanted, strict=True):
        assert w.norm() > 1
        torch.testing.assert_close(a.double(), w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["cos", "sin"])
@pytest.mark.parametrize("backend", ["cpu", "triton", "compose"])
def test_f5_a_backend_that_does_not_differentiate_a_table_refuses_it(backend: str, which: str) -> None:
    case = Case(
        device="cpu" if backend == "cpu" else "cuda",
        dtype=torch.float16,
        head_dim=64,
        value_dim=64,
        is_dense=True,
        table_has_gradient=True,
    )
    assert BACKENDS[backend].refuses(case) is not None
    if backend == "cpu" and HAS_CPU:
        q, k, v, *_ = (x[0] for x in examples())
        parts = {"cos": torch.ones(T, 2), "sin": torch.zeros(T, 2)}
        parts[which].requires_grad_()
        rope = Rope(**parts, layout="half")
        with pytest.raises(UnsupportedError, match=r"gradient of cos and sin.*stock"):
            qknorm.attention(q, k, v, rope=rope, backend=backend)
        with torch.no_grad():
            qknorm.attention(q, k, v, rope=rope, backend=backend)

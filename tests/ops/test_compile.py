"""The operator under torch's machinery: compile, checkpoint, autocast, opcheck, and what it stores.

Shapes: B batch, T tokens, Hq / Hk heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import qknorm
from problems import HARD, make_inputs
from qknorm import Mask, Rope
from qknorm.ops.backends.fused import HEADS, NONE, ROWS, Inputs

PER_HEAD = ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def gradients(fn: Callable[..., Any], name: str, dtype: torch.dtype) -> tuple[list[Tensor], Any]:
    """out and all gradients, and the statistics, of one hard problem."""
    inputs = make_inputs(HARD[name], dtype)
    out, stats = fn(inputs.q, inputs.k, inputs.v, **inputs.options, stats="rows")
    grads = torch.autograd.grad(out, list(inputs.leaves.values()), inputs.d_out)
    return [out.detach(), *grads], stats


@pytest.mark.parametrize("name", ["everything", "sink_token", "plain"])
def test_inductor_compiles_the_whole_call(name: str) -> None:
    compiled = torch.compile(qknorm.attention, fullgraph=True)
    actual, actual_stats = gradients(compiled, name, torch.float32)
    wanted, wanted_stats = gradients(qknorm.attention, name, torch.float32)
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-4, atol=1e-5)
    for field in PER_HEAD:
        torch.testing.assert_close(
            getattr(actual_stats, field), getattr(wanted_stats, field), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("backend", ["reference", "stock"])
@pytest.mark.parametrize("name", list(HARD)[::4])
def test_traced_call_equals_the_eager_one(name: str, backend: str) -> None:
    fn = functools.partial(qknorm.attention, backend=backend)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    actual, actual_stats = gradients(compiled, name, torch.bfloat16)
    wanted, wanted_stats = gradients(fn, name, torch.bfloat16)
    # The same kernels run, but aot may fold casts: one ulp of bf16.
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=2**-7, atol=2**-7 * float(w.abs().amax()))
    for field in PER_HEAD:
        torch.testing.assert_close(
            getattr(actual_stats, field),
            getattr(wanted_stats, field),
            rtol=1e-5,
            atol=1e-5,
            equal_nan=True,
        )


def test_new_lengths_compile_once_more_at_most() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Any:
        rope = Rope(cos, sin, "half")
        out, stats = qknorm.attention(
            q, k, v, q_gain=gain, k_gain=gain[:2], rope=rope, stats=True, sink="off_by_one"
        )
        return out, stats.max_logit, stats.entropy_nats

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    gain = torch.rand(4, 16) + 0.5
    for T in (40, 56, 63, 100, 257, 300):
        q, k, v = (torch.randn(2, H, T, 16, requires_grad=True) for H in (4, 2, 2))
        angle = torch.arange(T)[:, None] * torch.tensor([1.0, 0.1])
        args = (q, k, v, gain, angle.cos(), angle.sin())
        for actual, wanted in zip(compiled(*args), step(*args), strict=True):
            torch.testing.assert_close(actual, wanted)
        compiled(*args)[0].sum().backward()
    assert counter.frame_count <= 2


MASKS: dict[str, tuple[Any, ...]] = {
    "none": (None, None, False, None, 0.3),
    "causal": (None, None, True, None, 0.3),
    "window": (None, None, True, 5, 0.3),
    "padding": (None, torch.arange(19).expand(2, 19) < 15, True, None, 0.3),
    "documents": ((torch.arange(19) // 6).expand(2, 19).contiguous(), None, False, None, 0.3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_logit_stats_is_a_correct_operator(mask: tuple[Any, ...], dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, H, 19, 8).to(dtype) for H in (4, 2))
    torch.library.opcheck(torch.ops.qknorm.logit_stats.default, (q, k, None, *mask))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_stock_pair_are_correct_operators(
    mask: tuple[Any, ...], dtype: torch.dtype, with_sink: bool
) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (torch.randn(2, H, 19, 8).to(dtype) for H in (4, 2, 2))
    sink = (torch.randn(4, 1, dtype=wide), torch.randn(4, 8).to(dtype)) if with_sink else (None,) * 2
    documents, key_padding, causal, window, scale = mask
    inputs = Inputs(
        *(q, k, v, None, None, *sink, None, None, documents, key_padding),
        causal=causal,
        window=window,
        scale=scale,
    )
    for stats in (NONE, HEADS, ROWS):
        torch.library.opcheck(torch.ops.qknorm.stock_forward.default, (*inputs, stats))
    out, lse, *_ = torch.ops.qknorm.stock_forward(*inputs, NONE)
    d_out = torch.randn_like(out)
    torch.library.opcheck(torch.ops.qknorm.stock_backward.default, (d_out, out, lse, *inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["reference", "stock"])
def test_checkpoint_gives_the_same_gradients(
    backend: str, use_reentrant: bool, dtype: torch.dtype
) -> None:
    fn = functools.partial(qknorm.attention, backend=backend)

    def saved(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        calls.append(1)
        return fn(q, k, v, **options)

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        gain_q, gain_k, sink = (options.pop(name) for name in ("q_gain", "k_gain", "sink"))

        # The reentrant form sees only positional tensors.
        def body(q: Tensor, k: Tensor, v: Tensor, gq: Tensor, gk: Tensor, s: Tensor) -> Tensor:
            return saved(q, k, v, q_gain=gq, k_gain=gk, sink=s, **options)[0]

        return checkpoint(body, q, k, v, gain_q, gain_k, sink, use_reentrant=use_reentrant), None

    inputs = make_inputs(HARD["everything"], dtype)
    calls: list[int] = []
    wanted, _ = gradients(fn, "everything", dtype)
    out, _ = run(inputs.q, inputs.k, inputs.v, **inputs.options, stats=True)
    out.backward(inputs.d_out)
    assert len(calls) == 2, "the forward was not recomputed: nothing was checkpointed"
    actual = [out.detach(), *(leaf.grad for leaf in inputs.leaves.values())]
    for a, w in zip(actual, wanted, strict=True):
        assert torch.equal(a, w)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "stock"])
def test_autocast_casts_qkv_and_keeps_the_norm_in_fp32(backend: str, low: torch.dtype) -> None:
    inputs = make_inputs(HARD["everything"], torch.float32)
    options = {**inputs.options, "stats": True, "backend": backend}
    with torch.autocast("cpu", dtype=low):
        out, stats = qknorm.attention(inputs.q, inputs.k, inputs.v, **options)
    low_qkv = (x.to(low) for x in (inputs.q, inputs.k, inputs.v))
    wanted, wanted_stats = qknorm.attention(*low_qkv, **options)
    assert out.dtype == low
    assert torch.equal(out, wanted)
    for field in PER_HEAD:
        assert torch.equal(getattr(stats, field), getattr(wanted_stats, field)), field
    leaves = list(inputs.leaves.values())
    for actual, leaf in zip(torch.autograd.grad(out, leaves, out), leaves, strict=True):
        assert actual.dtype == torch.float32
        assert actual.isfinite().all()
        assert leaf.shape == actual.shape


def test_autocast_leaves_fp64_alone() -> None:
    inputs = make_inputs(HARD["plain"], torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = qknorm.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    wanted = qknorm.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert out.dtype == torch.float64
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("leaf", ["q", "k", "v", "sink"])
def test_second_derivatives_are_refused(leaf: str) -> None:
    """Also where d_out needs no gradient: dq still depends on q, and a constant would be wrong."""
    inputs = make_inputs(HARD["sink_5"], torch.float32)
    out = qknorm.attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend="stock")
    (once,) = torch.autograd.grad(out, inputs.leaves[leaf], inputs.d_out, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*reference"):
        torch.autograd.grad(once.sum(), inputs.leaves[leaf])


def saved_elements(backend: str, T: int, stats: bool) -> list[int]:
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    q, k, v = (torch.randn(1, H, T, 8, requires_grad=True) for H in (2, 1, 1))
    gains = (torch.rand(2, 8, requires_grad=True), torch.rand(1, 8, requires_grad=True))
    mask = Mask(causal=True, window=T // 2, key_padding=torch.arange(T)[None] < T - 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        qknorm.attention(
            q, k, v, q_gain=gains[0], k_gain=gains[1], mask=mask, stats=stats, backend=backend
        )
    return sizes


@pytest.mark.parametrize("stats", [False, True])
def test_nothing_of_size_t_by_t_is_saved(stats: bool) -> None:
    T = 512
    assert max(saved_elements("stock", T, stats)) < T * T // 8
    # The reference is dense by design, which shows that the measurement sees what it should.
    assert max(saved_elements("reference", T, stats)) >= T * T


def peak_bytes(fn: Callable[[], Any]) -> int:
    """Largest sum of live allocations of torch's CPU allocator while `fn` runs."""
    fn()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fn()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    "mask",
    [
        Mask(causal=True),
        Mask(),
        Mask(causal=True, window=1000, key_padding=torch.arange(4096)[None] < 4000),
    ],
    ids=["causal", "none", "window_padding"],
)
@pytest.mark.parametrize("backend", ["stock", "auto"])
def test_statistics_cost_less_than_16_mb_at_4096_tokens(mask: Mask, backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 4096, 64) for _ in range(3))
    gain = torch.rand(2, 64) + 0.5
    options = {"q_gain": gain, "k_gain": gain, "mask": mask}
    silent = peak_bytes(lambda: qknorm.attention(q, k, v, **options, backend=backend))
    watched = peak_bytes(lambda: qknorm.attention(q, k, v, **options, stats=True, backend=backend))
    alone = peak_bytes(lambda: qknorm.logit_stats(q, k, **options))
    # The stock backend also makes q_hat; the C++ one keeps it in cache.
    made = 2 if backend == "stock" else 1
    assert silent > made * q.nbytes, "the measurement misses what was made"
    assert watched - silent < 16e6
    # q_hat and k_hat are 4 MB together; a T x T buffer of two heads would be 134 MB.
    assert alone < 20e6


def test_the_memory_measurement_sees_a_dense_buffer() -> None:
    q, k, v = (torch.randn(1, 2, 2048, 8) for _ in range(3))
    assert peak_bytes(lambda: qknorm.attention(q, k, v, backend="reference")) > 2 * 2048 * 2048 * 4

"""The Triton backend in Triton's interpreter, fp32 and fp16, against the float64 oracle.

bf16 is left out: the interpreter of Triton 3.9.0 multiplies the bit patterns of bf16 as integers.
Speed and bf16 belong to benchmarks/gpu.sh, registers and spills to test_triton_budgets.py.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import qknorm
from conformance import check, compare
from problems import BOUNDARY, HARD, Problem, make_inputs, problems
from qknorm import Mask
from qknorm.ops.backends import BACKENDS, choose
from qknorm.ops.backends.call import Call, Case
from qknorm.ops.backends.fused import HEADS, NONE, ROWS, Inputs

pytest.importorskip("triton", reason="the Triton backend needs the package triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("with a GPU the kernels run on it: benchmarks/gpu.sh", allow_module_level=True)

from qknorm.ops.backends.triton import launch, problem
from qknorm.ops.backends.triton import tiles as sizes
from qknorm.ops.logit_stats import rows_by_stream

DTYPES = (torch.float32, torch.float16)
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
SERVED = {name: p for name, p in HARD.items() if p.sink != "token"}
triton_attention = functools.partial(qknorm.attention, backend="triton")


# Ids of tokens leave no block that is visible as a whole: there the loop over whole blocks is absent.
WITHOUT_IDS = {n: p for n, p in SERVED.items() if p.documents is None and p.key_padding is None}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every problem has many, whole, cut and hidden ones."""
    make_tiles_small(monkeypatch, full_loop=True)


def make_tiles_small(monkeypatch: pytest.MonkeyPatch, full_loop: bool) -> None:
    small = sizes.Tiles(16, 16, 4, 1, full_loop)
    monkeypatch.setattr(sizes, "tiles", lambda *args, **kwargs: small)
    monkeypatch.setattr(sizes, "ID_CHUNK", 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("problem", SERVED.values(), ids=SERVED.keys())
def test_hard_problem(problem: Problem, dtype: torch.dtype) -> None:
    check(triton_attention, problem, dtype)


@pytest.mark.parametrize("problem", SERVED.values(), ids=SERVED.keys())
@pytest.mark.usefixtures("small_tiles")
def test_hard_problem_in_small_tiles(problem: Problem) -> None:
    # The interpreter runs one tile after another; a second batch row that is alike shows nothing.
    differ = problem.documents or problem.key_padding or problem.table_per_row
    check(triton_attention, problem if differ else replace(problem, B=1), torch.float32)


@pytest.mark.parametrize("name", list(WITHOUT_IDS)[::3])
def test_whole_blocks_may_be_treated_as_cut_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiles_small(monkeypatch, full_loop=False)
    check(triton_attention, SERVED[name], torch.float32)


@pytest.mark.parametrize("name", ["257_causal", "513_window", "513_documents", "513_chunk_window"])
def test_block_boundary(name: str) -> None:
    check(triton_attention, BOUNDARY[name], torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@settings(max_examples=10)
@given(problem=problems())
def test_any_problem(dtype: torch.dtype, problem: Problem) -> None:
    if problem.sink == "token":
        problem = replace(problem, sink=None)
    check(triton_attention, problem, dtype)


@pytest.mark.parametrize("stats", [True, "rows"])
@pytest.mark.parametrize("name", ["everything", "plain", "decode"])
def test_watching_changes_no_bit(name: str, stats: Any) -> None:
    def run(watch: Any) -> list[torch.Tensor]:
        inputs = make_inputs(HARD[name], torch.float16)
        out = triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options, stats=watch)
        out = out[0] if watch else out
        return [out, *torch.autograd.grad(out, list(inputs.leaves.values()), inputs.d_out)]

    assert all(map(torch.equal, run(stats), run(False)))


@pytest.mark.parametrize("name", ["everything", "chunk", "own_key_heads"])
def test_each_gradient_alone_equals_that_of_all(name: str) -> None:
    def run(wanted: list[str]) -> list[torch.Tensor]:
        inputs = make_inputs(HARD[name], torch.float16)
        for leaf_name, leaf in inputs.leaves.items():
            leaf.requires_grad_(leaf_name in wanted)
        out = triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options)
        return list(torch.autograd.grad(out, [inputs.leaves[n] for n in wanted], inputs.d_out))

    every = list(make_inputs(HARD[name], torch.float16).leaves)
    for leaf_name, together in zip(every, run(every), strict=True):
        assert torch.equal(run([leaf_name])[0], together), leaf_name


def test_views_of_one_projection_are_read_in_place() -> None:
    torch.manual_seed(0)
    B, T, Hq, Hk, D = 2, 21, 4, 2, 16
    packed = torch.randn(B, T, (Hq + 2 * Hk) * D, dtype=torch.float16)
    q, k, v = (
        x.unflatten(-1, (-1, D)).transpose(1, 2) for x in packed.split([Hq * D, Hk * D, Hk * D], -1)
    )
    gains = {"q_gain": torch.rand(Hq, D) + 0.5, "k_gain": torch.rand(Hk, D) + 0.5}
    out = triton_attention(q, k, v, **gains)
    assert torch.equal(out, triton_attention(*(x.contiguous() for x in (q, k, v)), **gains))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("Tq", [1, 40])
def test_a_logit_that_is_no_number_is_not_hidden(Tq: int, bad: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, T, 16).abs() for T in (Tq, 40, 40))
    k[0, 1, 7] = bad
    _, ours = triton_attention(q, k, v, stats=True)
    _, wanted = qknorm.attention(q, k, v, stats=True, backend="reference")
    torch.testing.assert_close(ours.max_logit, wanted.max_logit, equal_nan=True)
    assert not torch.isfinite(ours.max_logit[1])


@pytest.mark.parametrize("backend", ["triton", "stock", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
def test_a_negative_scale(backend: str, dtype: torch.dtype) -> None:
    if BACKENDS[backend].refuses(Case(device="cpu", dtype=dtype, head_dim=16, value_dim=16)):
        pytest.skip(f"no {backend} backend on this machine")
    torch.manual_seed(0)
    leaves = [torch.randn(2, 2, 33, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    results = []
    for name in (backend, "reference"):
        out = qknorm.attention(*leaves, scale=-0.3, backend=name)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=4e-3, atol=4e-3)


def test_a_sink_of_minus_infinity_is_none() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    padding = torch.zeros(1, 20, dtype=torch.bool)
    padding[:, 5:] = True  # the first five see nothing
    sink = torch.full((2,), -torch.inf)
    mask = Mask(causal=True, key_padding=padding)
    out = triton_attention(q, k, v, mask=mask, sink=sink)
    torch.testing.assert_close(out, triton_attention(q, k, v, mask=mask))


# Decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("Tk", [17, 100, 257])
@pytest.mark.parametrize("Tq", [1, 3])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_split_keys_give_what_one_pass_gives(
    mask: str, Tq: int, Tk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(Tk)
    B, Hq, Hk, D = 2, 4, 2, 16
    q, k, v = (torch.randn(B, H, T, D) for H, T in ((Hq, Tq), (Hk, Tk), (Hk, Tk)))
    documents = None
    if mask == "documents":
        documents = (torch.arange(Tk) * 3 // Tk).expand(B, Tk).clone()
        documents[1, : Tk // 2] = -1
    chosen = Mask(causal=True, window=9 if mask == "window" else None, documents=documents)
    options: dict[str, Any] = {"mask": chosen, "sink": torch.randn(Hq), "stats": "rows"}
    monkeypatch.setattr(sizes, "DECODE_KEYS", 40)
    out, stats = triton_attention(q, k, v, **options)
    wanted, rows = qknorm.attention(q.double(), k.double(), v.double(), backend="reference", **options)
    tolerance = torch.tensor(2e-6, dtype=torch.float64)
    compare("out", out, wanted, tolerance)
    for name in ("max_logit", "entropy_sum", "ratio_sum", "sink_sum"):
        compare(name, getattr(stats, name), getattr(rows, name), 20 * tolerance)
    compare("entropy", stats.rows.entropy_nats, rows.rows.entropy_nats, 5 * tolerance)
    assert torch.equal(stats.rows.visible_keys.expand(B, Tq), rows.rows.visible_keys.expand(B, Tq))


# The statistics alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("problem_name", ["plain", "window", "documents", "padding_holes", "chunk"])
@pytest.mark.usefixtures("small_tiles")
def test_the_statistics_alone_equal_the_streamed_ones(problem_name: str, sampled: bool) -> None:
    problem = HARD[problem_name]
    inputs = make_inputs(problem, torch.float32)
    mask: Mask = inputs.options["mask"]
    q, k = inputs.q.detach(), inputs.k.detach()
    tokens = None
    if sampled:
        at = torch.tensor([0, q.shape[2] // 3, q.shape[2] - 1]).unique()
        tokens, q = at + k.shape[2] - q.shape[2], q[:, :, at]
    arguments = (q, k, tokens, mask.documents, mask.key_padding, mask.causal, mask.window, -0.3)
    for name, actual, wanted in zip(
        ("max", "log_sum", "entropy", "first_logit", "keys", "first_key"),
        launch.logit_stats(*arguments),
        rows_by_stream(*arguments),
        strict=True,
    ):
        compare(name, actual, wanted.double(), 4e-6 * (1 + wanted.double().abs().nan_to_num(0, 0, 0)))


def test_a_sample_of_rows_is_those_rows() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    documents = (torch.arange(50) // 20).expand(2, 50).contiguous()
    mask = Mask(causal=True, documents=documents)
    every = qknorm.logit_stats(q, k, mask=mask, stats="rows")
    some = qknorm.logit_stats(q, k, mask=mask, stats="rows", sample=7)
    assert every.rows is not None
    assert some.rows is not None
    at = [0, 9, 17, 25, 33, 41, 49]
    torch.testing.assert_close(some.rows.max_logit, every.rows.max_logit[:, :, at])
    torch.testing.assert_close(some.rows.entropy_nats, every.rows.entropy_nats[:, :, at])
    assert torch.equal(some.rows.visible_keys, every.rows.visible_keys[:, at])
    assert int(some.row_count) == 2 * 7
    assert int(qknorm.logit_stats(q, k, mask=mask, sample=50).row_count) == 2 * 50
    with pytest.raises(ValueError, match="sample must be at least 1"):
        qknorm.logit_stats(q, k, sample=0)


# Norm and RoPE before another kernel ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "sink_5", "whole_half", "partial_interleaved"])
def test_compose_equals_stock(name: str) -> None:
    inputs = make_inputs(HARD[name], torch.float16)
    options = inputs.options | {"mask": Mask(causal=True)}

    def run(backend: str) -> list[torch.Tensor]:
        out = qknorm.attention(inputs.q, inputs.k, inputs.v, **options, backend=backend)
        return [out, *torch.autograd.grad(out, list(inputs.leaves.values()), inputs.d_out)]

    for actual, wanted in zip(run("compose"), run("stock"), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=4e-3, atol=4e-3)


# Registration --------------------------------------------------------------------------------------


def inputs_of(name: str) -> Inputs:
    inputs = make_inputs(HARD[name], torch.float32)
    options = {"q_gain": None, "k_gain": None, "eps": 1e-6, "rope": None, "sink": None}
    options |= {"mask": Mask(causal=True)} | inputs.options | {"scale": 0.3}
    return Inputs.of(Call(q=inputs.q, k=inputs.k, v=inputs.v, stats=False, **options))


@pytest.mark.parametrize("name", ["everything", "plain"])
def test_operators_are_correct(name: str) -> None:
    ops = torch.ops.qknorm
    x = Inputs(*(t.detach() if isinstance(t, torch.Tensor) else t for t in inputs_of(name)))
    for stats in (NONE, HEADS, ROWS):
        torch.library.opcheck(ops.triton_forward.default, (*x, stats))
    out, lse, *_ = ops.triton_forward(*x, NONE)
    torch.library.opcheck(ops.triton_backward.default, (torch.ones_like(out), out, lse, *x))
    prepared = (x.q, x.k, x.q_gain, x.k_gain, x.cos, x.sin, x.layout, x.eps)
    torch.library.opcheck(ops.triton_prepare.default, prepared)
    hats = (torch.ones_like(x.q), torch.ones_like(x.k))
    torch.library.opcheck(ops.triton_unprepare.default, (*hats, *prepared))


@pytest.mark.parametrize("stats", [False, True])
def test_compiles_as_one_graph(stats: bool) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(HARD["everything"], torch.float32)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = triton_attention(q, k, v, **inputs.options, stats=stats)
        out, found = out if stats else (out, None)
        return (out * inputs.d_out).sum() + (0.0 if found is None else 0.0 * found.max_logit.amax())

    leaves = [inputs.q, inputs.k, inputs.v]
    compiled = torch.compile(loss, fullgraph=True)
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for actual, expected in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        torch.testing.assert_close(actual, expected)


def test_second_derivatives_are_refused() -> None:
    inputs = make_inputs(HARD["plain"], torch.float32)
    out = triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    (once,) = torch.autograd.grad(out.sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(once.sum(), inputs.q)


# The choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 300}, "wider than 256"),
        ({"sink_by_row": True}, "differs by query"),
        ({"zero_scale": True}, "scale of 0"),
        ({"batch": 70_000}, "65535"),
    ],
)
def test_what_it_cannot_do_is_named(case: dict[str, Any], why: str) -> None:
    usual = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, "value_dim": 64}
    assert why in (BACKENDS["triton"].refuses(Case(**(usual | case))) or "")
    assert BACKENDS["triton"].refuses(Case(**usual)) is None


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ({"keys": 1024, "queries": 1024}, "triton"),
        ({"keys": 16_384, "queries": 16_384}, "compose"),
        ({"keys": 16_384, "queries": 16_384, "is_dense": False}, "triton"),
        ({"keys": 16_384, "queries": 1}, "triton"),
        ({"keys": 16_384, "queries": 16_384, "dtype": torch.float32}, "triton"),
        ({"keys": 1024, "queries": 1024, "dtype": torch.float64}, "stock"),
    ],
)
def test_auto_on_a_gpu_follows_the_table(case: dict[str, Any], name: str) -> None:
    usual = {
        "device": "cuda", "dtype": torch.bfloat16, "head_dim": 128, "value_dim": 128,
        "is_dense": True,
    }  # fmt: skip
    assert choose("auto", Case(**(usual | case))).name == name


def test_auto_on_a_cpu_is_never_the_interpreter() -> None:
    case = Case(device="cpu", dtype=torch.float32, head_dim=64, value_dim=64)
    assert choose("auto", case).name in ("cpu", "stock")


def test_f14_gradients_of_tokens_that_lie_far_apart() -> None:
    """Offsets within a tile are kept in 32 bits: what lies 2**24 elements apart is copied first."""
    inputs = make_inputs(HARD["plain"], torch.float16)
    out = triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    B, H, T, D = out.shape
    room = torch.zeros((T - 1) * 2**24 + B * H * D, dtype=torch.float16)  # pages that nobody touches
    far = room.as_strided((B, H, T, D), (H * D, D, 2**24, 1))
    far.copy_(inputs.d_out)
    leaves = list(inputs.leaves.values())
    wanted = torch.autograd.grad(out, leaves, inputs.d_out, retain_graph=True)
    assert problem.readable(far).is_contiguous()
    for a, w in zip(torch.autograd.grad(out, leaves, far), wanted, strict=True):
        assert torch.equal(a, w)

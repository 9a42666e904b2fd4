"""The C++ backend on few queries against many keys, and on many key heads: work that is split by other
rules than a long sequence is.

Decoding splits the keys into pieces of 512 or more and merges them; blocks hold 64 keys, or 128 where a
head is wider than 64. With 8 key heads for each thread, a thread keeps a key head for itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qknorm
from conformance import check
from problems import Problem, make_inputs
from qknorm import Mask
from qknorm.ops.backends import cpu_library
from qknorm.ops.stats import Rows, Stats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
_LIBRARY = cpu_library.LIBRARY
pytestmark = [
    pytest.mark.skipif(isinstance(_LIBRARY, str), reason=f"no cpu backend: {_LIBRARY}"),
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)

QUERIES = (1, 2, 5, 16)
# One below, on and one above the edges of blocks of 64 and 128 keys and of splits of 512.
KEYS = (33, *(64 * n + d for n in (1, 2, 8, 16, 24, 32) for d in (-1, 0, 1)), 3000, 4097)


def cpu(*args: Any, **kwargs: Any) -> Any:
    return qknorm.attention(*args, backend="cpu", **kwargs)


def negated(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The same function by the other sign: -q and -scale."""
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    return cpu(-q, k, v, **{**options, "scale": -scale})


def _one(**changes: Any) -> Problem:
    return Problem(**{"B": 2, "Hq": 4, "Hk": 2, "Tq": 5, "Tk": 1100, "D": 16, "Dv": 16, **changes})


DECODE: dict[str, Problem] = {
    "plain": _one(Tq=1),
    "neither_norm_nor_rope": _one(normed=False),
    "rope_only": _one(normed=False, R=8),
    "norm_and_rope": _one(R=16, Tq=2),
    "interleaved_table_per_row": _one(R=8, layout="interleaved", table_per_row=True),
    "own_key_heads": _one(Hq=2, Hk=2, Tq=16),
    "four_per_key_head": _one(Hq=4, Hk=1, Tq=16, R=8),
    "eight_per_key_head": _one(Hq=8, Hk=1, Tq=16, B=1),  # 128 rows, the most there are
    "two_sided": _one(causal=False, Tq=16),
    "window_of_one": _one(window=1, Tq=16),
    "window_inside_a_block": _one(window=9, Tq=16, R=8),
    "window_over_splits": _one(window=1000, Tq=16, Tk=2100, sink="learnable"),
    "window_two_sided": _one(window=700, Tq=16, causal=False),
    "documents": _one(documents="packed", Tq=16),
    "documents_padded": _one(documents="padded", Tq=16, sink="learnable"),
    "documents_two_sided": _one(documents="ragged", Tq=16, causal=False, R=8),
    "padding_tail": _one(key_padding="tail", Tq=16),
    "padding_head": _one(key_padding="head", Tq=5, sink="off_by_one"),
    "padding_holes": _one(key_padding="holes", Tq=2, window=600),
    "padding_of_one_entry": _one(key_padding="whole", Tq=5),
    "padding_of_one_entry_sink": _one(key_padding="whole", Tq=5, sink="learnable", sink_level=2.0),
    "nothing_visible": _one(key_padding="whole", B=1),
    "off_by_one": _one(sink="off_by_one"),
    "sink_far_above": _one(sink="learnable", sink_level=30.0, R=8),
    "sink_far_below": _one(sink="learnable", sink_level=-40.0),
    "large_scale": _one(scale=10.0, sink="learnable", sink_level=30.0),
    "large_inputs": _one(amplitude=200.0, R=8),
    "narrow_values": _one(Dv=5),
    "wide_values": _one(D=8, Dv=40, Tq=2),
    "most_splits": _one(B=1, Hq=1, Hk=1, Tq=1, Tk=17000, D=8, Dv=8, R=8),
    "everything": _one(
        **{"window": 900, "documents": "padded", "key_padding": "holes", "sink": "learnable"},
        **{"sink_level": 2.0, "R": 8, "Tq": 16, "Dv": 24, "table_per_row": True},
    ),
}
# More key heads than 8 for each of two threads, between 8 for one and 8 for two, and decoding.
MANY_HEADS: dict[str, Problem] = {
    "16_key_heads": Problem(B=2, Hq=16, Hk=8, Tq=40, Tk=40, D=8, Dv=8, R=8, sink="learnable"),
    "17_entries": Problem(B=17, Hq=2, Hk=1, Tq=33, Tk=33, documents="padded", Dv=24),
    "8_key_heads": Problem(B=1, Hq=16, Hk=8, Tq=35, Tk=70, window=30, key_padding="holes"),
    "20_key_heads_two_sided": Problem(B=4, Hq=5, Hk=5, Tq=130, Tk=70, D=8, Dv=8, causal=False),
    "18_key_heads_decode": Problem(B=3, Hq=12, Hk=6, Tq=2, Tk=1030, D=8, Dv=8, R=8, sink="learnable"),
}


def _is_decoding(p: Problem) -> bool:
    return p.Tq <= 16 and p.Tk > 2 * p.Tq and p.Hq // p.Hk * p.Tq <= 128


def test_the_problems_are_of_this_kind() -> None:
    assert all(map(_is_decoding, DECODE.values()))
    assert sum(map(_is_decoding, MANY_HEADS.values())) == 1
    assert {p.B * p.Hk >= 16 for p in MANY_HEADS.values()} == {True, False}


@each_dtype
@pytest.mark.parametrize("problem", DECODE.values(), ids=DECODE.keys())
def test_problem(problem: Problem, dtype: torch.dtype, isa: str) -> None:
    check(cpu, problem, dtype)


@each_dtype
@pytest.mark.parametrize(("at", "Tk"), list(enumerate(KEYS)), ids=map(str, KEYS))
def test_every_number_of_keys(at: int, Tk: int, dtype: torch.dtype, isa: str) -> None:
    # Neighbours in KEYS differ by one key; Tq and G turn at other rates, so that they mix.
    Tq, G = QUERIES[(at + at // 3) % 4], (1, 4, 8)[(at + DTYPES.index(dtype)) % 3]
    check(cpu, Problem(B=1, Hq=G, Hk=1, Tq=Tq, Tk=Tk, D=8, Dv=8, R=8 * (at % 2)), dtype)


@each_dtype
@pytest.mark.parametrize("Tk", [127, 128, 129, 1023, 1024, 1025])
@pytest.mark.parametrize("Tq", [1, 16])
def test_blocks_of_128_keys(Tq: int, Tk: int, dtype: torch.dtype, isa: str) -> None:
    check(cpu, Problem(B=1, Hq=2, Hk=1, Tq=Tq, Tk=Tk, D=72, Dv=16, normed=Tq == 1), dtype)


@each_dtype
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("D", [16, 32, 64, 80, 128, 256])
def test_every_head_width(D: int, normed: bool, dtype: torch.dtype, isa: str) -> None:
    problem = Problem(B=1, Hq=2, Hk=1, Tq=2, Tk=200, D=D, Dv=D // 2, normed=normed, R=D // 2 * normed)
    check(cpu, problem, dtype)


@st.composite
def decode_problems(draw: st.DrawFn) -> Problem:
    """Any decoding call; the longest come with one batch entry."""
    Tq = draw(st.sampled_from(QUERIES))
    Tk = draw(st.sampled_from([t for t in (33, 64, 100, 127, 513, 1025, 1600) if t > 2 * Tq]))
    Hk = draw(st.sampled_from([1, 2]))
    return Problem(
        B=draw(st.sampled_from([1, 2, 3] if Tk < 500 else [1])),
        Hk=Hk,
        Hq=Hk * draw(st.sampled_from([1, 2, 3, 8] if Tk < 500 else [1, 3])),
        Tq=Tq,
        Tk=Tk,
        D=draw(st.sampled_from([8, 16, 72])),
        Dv=draw(st.sampled_from([5, 16, 40])),
        R=draw(st.sampled_from([0, 2, 8])),
        layout=draw(st.sampled_from(["half", "interleaved"])),
        table_per_row=draw(st.booleans()),
        normed=draw(st.booleans()),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 9, 70, 600])),
        documents=draw(st.sampled_from([None, None, "packed", "padded", "ragged"])),
        key_padding=draw(st.sampled_from([None, None, "tail", "head", "holes", "whole"])),
        sink=draw(st.sampled_from([None, "off_by_one", "learnable"])),
        sink_level=draw(st.sampled_from([0.0, 5.0, 30.0, -5.0])),
        scale=draw(st.sampled_from([None, None, 1.0, 10.0])),
        memory=draw(st.sampled_from(["packed", "permuted", "contiguous"])),
        seed=draw(st.integers(0, 7)),
    )


@each_dtype
@settings(max_examples=15)
@given(problem=decode_problems(), negative=st.booleans())
def test_any_decoding_call(isa: str, dtype: torch.dtype, problem: Problem, negative: bool) -> None:
    check(negated if negative else cpu, problem, dtype)


@each_dtype
@pytest.mark.parametrize("name", ["plain", "norm_and_rope", "documents_padded", "everything"])
def test_negative_scale(name: str, dtype: torch.dtype, isa: str) -> None:
    check(negated, DECODE[name], dtype)


class _Threads:
    """torch's number of threads, for a while."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.number)

    def __exit__(self, *_: Any) -> None:
        torch.set_num_threads(self.before)


def _row_values(rows: Rows) -> list[Tensor]:
    return [rows.max_logit, rows.log_sum, rows.entropy_nats, rows.visible_keys]


def _head_values(stats: Stats) -> list[Tensor]:
    sums = [stats.max_logit, stats.entropy_sum, stats.ratio_sum, stats.sink_sum]
    return [*sums, stats.row_count, stats.ratio_count]


def _step(problem: Problem, dtype: torch.dtype, threads: int) -> list[Tensor]:
    """Everything that a call gives: out, statistics, gradients."""
    with _Threads(threads):
        inputs = make_inputs(problem, dtype)
        out, stats = cpu(inputs.q, inputs.k, inputs.v, **inputs.options, stats="rows")
        grads = torch.autograd.grad(out, list(inputs.leaves.values()), inputs.d_out)
    return [out.detach(), *_head_values(stats), *_row_values(stats.rows), *grads]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN where the other is NaN."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
    )


@each_dtype
@pytest.mark.parametrize(
    "problem",
    [
        *(DECODE[n] for n in ("plain", "window_over_splits", "everything", "most_splits")),
        *MANY_HEADS.values(),
    ],
    ids=["plain", "window_over_splits", "everything", "most_splits", *MANY_HEADS],
)
def test_the_bits_do_not_depend_on_the_number_of_threads(
    problem: Problem, dtype: torch.dtype, isa: str
) -> None:
    one, two = (_step(problem, dtype, threads) for threads in (1, 2))
    assert all(map(_same_bits, one, two))


@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("problem", MANY_HEADS.values(), ids=MANY_HEADS.keys())
def test_many_key_heads(problem: Problem, threads: int, dtype: torch.dtype, isa: str) -> None:
    with _Threads(threads):
        check(cpu, problem, dtype)


@each_dtype
@pytest.mark.parametrize("name", ["window_over_splits", "nothing_visible", "everything"])
def test_the_requests_for_statistics_agree(name: str, dtype: torch.dtype, isa: str) -> None:
    inputs = make_inputs(DECODE[name], dtype)
    call = (inputs.q, inputs.k, inputs.v)
    with torch.no_grad():
        out = cpu(*call, **inputs.options)
        out_heads, heads = cpu(*call, **inputs.options, stats=True)
        out_rows, rows = cpu(*call, **inputs.options, stats="rows")
    assert torch.equal(out, out_heads)
    assert torch.equal(out, out_rows)
    assert heads.rows is None
    for a, b in zip(_head_values(heads), _head_values(rows), strict=True):
        assert _same_bits(a, b)
    reduced = Stats.from_rows(rows.rows)
    for a, b in zip(_head_values(heads), _head_values(reduced), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, check_dtype=False)
    wanted = Stats.from_rows(rows.rows.merge_keys())
    torch.testing.assert_close(heads.entropy_nats, wanted.entropy_nats, equal_nan=True)


@each_dtype
@pytest.mark.parametrize(
    "mask", [Mask(causal=True), Mask(causal=True, window=700)], ids=["all", "window"]
)
@pytest.mark.parametrize("key", [0, 500, 1090, 1099])
def test_nan_in_one_key_reaches_the_rows_that_see_it(
    key: int, mask: Mask, dtype: torch.dtype, isa: str
) -> None:
    Tq, Tk = 16, 1100
    q, k, v = (torch.randn(2, h, t, 16).to(dtype) for h, t in ((4, Tq), (2, Tk), (2, Tk)))
    clean, stats = cpu(q, k, v, mask=mask, stats="rows")
    k[0, 1, key, 3] = torch.nan
    out, found = cpu(q, k, v, mask=mask, stats="rows")
    sees = torch.zeros(2, 4, Tq, dtype=torch.bool)
    sees[0, 2:] = mask.visible(Tq, Tk, q.device)[0, :, key]
    assert bool(sees.any()) == (mask.window is None or key >= 400)
    assert out[sees].isnan().all()
    assert torch.equal(out[~sees], clean[~sees])
    for a, b in zip(_row_values(found.rows)[:3], _row_values(stats.rows)[:3], strict=True):
        assert a[sees].isnan().all()
        assert torch.equal(a[~sees], b[~sees])
    assert torch.equal(found.max_logit.isnan(), sees.any(-1).any(0))


def _normed(dtype: torch.dtype, heads: int, keys: int, D: int) -> dict[str, Any]:
    angle = torch.rand(1100, D // 4)
    return {
        "q_gain": torch.rand(heads, D) + 0.5,
        "k_gain": torch.rand(keys, D) + 0.5,
        "rope": qknorm.Rope(angle.cos(), angle.sin(), "half"),
    }


def _gradients(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, options: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, stats = cpu(*leaves, **options, stats="rows")
    return [out.detach(), *_row_values(stats.rows), *torch.autograd.grad(out, leaves, d_out)]


@each_dtype
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("layout", ["cache", "odd", "odd_offset", "fused", "reversed_heads"])
def test_strides_change_no_bit(layout: str, normed: bool, dtype: torch.dtype, isa: str) -> None:
    B, Hq, Hk, Tq, Tk, D = 2, 4, 2, 5, 1100, 32
    options = _normed(dtype, Hq, Hk, D) if normed else {}
    q, k, v = (torch.randn(B, h, t, D).to(dtype) for h, t in ((Hq, Tq), (Hk, Tk), (Hk, Tk)))
    d_out = torch.randn(B, Hq, Tq, D).to(dtype)
    views = [q, k, v]
    if layout == "cache":  # longer than what is in it; the rest must not be read
        for i in (1, 2):
            buffer = torch.full((B, 1500, Hk, D), torch.nan, dtype=dtype)
            views[i] = buffer[:, :Tk].transpose(1, 2)
    elif layout in ("odd", "odd_offset"):
        for i, x in enumerate((q, k, v)):
            b, h, t, _ = x.shape
            step = D + 1 if layout == "odd" else D + 2
            buffer = torch.full((b * h * t * step + 1,), torch.nan, dtype=dtype)
            views[i] = buffer.as_strided(x.shape, (h * t * step, t * step, step, 1), 1)
    elif layout == "fused":
        buffer = torch.full((B, Tk, (Hq + 2 * Hk) * D), torch.nan, dtype=dtype)
        parts = buffer.split([Hq * D, Hk * D, Hk * D], -1)
        views = [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in parts]
        views[0] = views[0][:, :, Tk - Tq :]
    else:  # two key heads in the other order in memory
        for i in (1, 2):
            views[i] = torch.full((Hk, Tk, B, D), torch.nan, dtype=dtype).permute(2, 0, 1, 3)
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    wanted = _gradients(q, k, v, d_out, options)
    for a, b in zip(_gradients(*views, d_out, options), wanted, strict=True):
        assert torch.equal(a, b)


@each_dtype
def test_one_query_after_the_other_gives_what_all_at_once_give(dtype: torch.dtype, isa: str) -> None:
    D = 32
    q, k, v = (torch.randn(1, h, 1100, D).to(dtype) for h in (4, 2, 2))
    options = _normed(dtype, 4, 2, D)
    whole = cpu(q, k, v, **options)
    rope = options.pop("rope")
    for n, Tq in itertools.product((40, 600, 1100), (1, 16)):
        table = dataclasses.replace(rope, cos=rope.cos[:n], sin=rope.sin[:n])
        part = cpu(q[:, :, n - Tq : n], k[:, :, :n], v[:, :, :n], **options, rope=table)
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(part, whole[:, :, n - Tq : n], rtol=4 * ulp, atol=4 * ulp)

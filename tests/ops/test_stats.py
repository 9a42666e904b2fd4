"""Statistics: they merge exactly, stream exactly, stay accurate at large logits and change nothing.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk heads, D head width.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import qknorm
from conformance import DTYPES
from problems import HARD, Problem, make_inputs
from qknorm import Mask, Stats
from qknorm.ops import online_softmax

BACKENDS = ("reference", "stock")
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
PER_HEAD = ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass")
COUNTS = ("row_count", "ratio_count")
PER_ROW = ("lse", "max_logit", "entropy_nats")
BATCHED = (
    Problem(B=5, Tq=33, Tk=33, R=8, sink="learnable", sink_level=3.0),
    Problem(B=5, Tq=20, Tk=33, key_padding="tail", sink="off_by_one"),
    Problem(B=5, Tq=33, Tk=33, documents="padded", key_padding="holes", window=9),
    Problem(B=3, key_padding="whole", sink="token"),
)


def assert_same(actual: Stats, wanted: Stats, tolerance: float) -> None:
    for name in COUNTS:
        assert torch.equal(getattr(actual, name), getattr(wanted, name)), name
    for name in PER_HEAD:
        torch.testing.assert_close(
            getattr(actual, name),
            getattr(wanted, name),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def of_batch(options: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The arguments of a micro-batch."""
    mask = options["mask"]
    part = dict(options)
    part["mask"] = Mask(
        mask.causal,
        mask.window,
        None if mask.documents is None else mask.documents[rows],
        None if mask.key_padding is None else mask.key_padding[rows],
    )
    return part


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", BATCHED)
def test_micro_batches_merge_to_the_whole(problem: Problem, backend: str) -> None:
    inputs = make_inputs(problem, torch.float32)

    def stats(rows: slice) -> Stats:
        options = of_batch(inputs.options, rows)
        qkv = (x[rows] for x in (inputs.q, inputs.k, inputs.v))
        return qknorm.attention(*qkv, **options, stats=True, backend=backend)[1]

    # Unequal parts: a mean of means would show.
    parts = [stats(slice(0, 1)), stats(slice(1, problem.B - 1)), stats(slice(problem.B - 1, None))]
    whole = stats(slice(None))
    assert whole.row_count > 0
    assert_same(parts[0].merge(*parts[1:]), whole, 1e-6)
    assert_same(parts[2].merge(parts[0]).merge(parts[1]), whole, 1e-6)


def offset_inputs(offset: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q, k in fp32 whose logits are `offset` plus multiples of 1/64, exact in fp32, at scale 1."""
    generator = torch.Generator().manual_seed(seed)

    def eighths(*shape: int) -> Tensor:
        return (8 * torch.randn(*shape, generator=generator)).round() / 8

    q, k = eighths(2, 4, 37, 8), eighths(2, 2, 50, 8)
    k[:, 1] *= 2
    q[..., -1], k[..., -1] = 1.0, offset
    return q, k


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("edges", [(0, 25, 50), (0, 1, 7, 50), (0, 49, 50)])
def test_key_slices_merge_to_the_whole(edges: tuple[int, ...], offset: float) -> None:
    q, k = offset_inputs(offset)
    sink = torch.tensor([offset, offset + 9.0, offset - 3.0, 1.0])
    options = {"mask": Mask(), "scale": 1.0, "stats": "rows"}
    whole = qknorm.logit_stats(q, k, sink=sink, **options)
    parts = [
        # The sink is carried once.
        qknorm.logit_stats(q, k[:, :, lo:hi], sink=sink if lo == 0 else None, **options)
        for lo, hi in itertools.pairwise(edges)
    ]
    merged = parts[0].merge_keys(*parts[1:])
    assert_same(merged, whole, 1e-6)
    for name in PER_ROW:
        actual, wanted = getattr(merged.rows, name), getattr(whole.rows, name)
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
    # [B or 1, Tq]: either is right.
    assert (merged.rows.visible_keys == whole.rows.visible_keys).all()


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_keys_hidden_by_padding_merge_to_the_whole(offset: float) -> None:
    q, k = offset_inputs(offset)
    options = {"scale": 1.0, "stats": "rows"}
    whole = qknorm.logit_stats(q, k, mask=Mask(), **options)
    first = torch.arange(50).expand(2, 50) < 20
    parts = [qknorm.logit_stats(q, k, mask=Mask(key_padding=own), **options) for own in (first, ~first)]
    for one, other in (parts, parts[::-1]):
        merged = one.merge_keys(other)
        for name in PER_ROW:
            actual, wanted = getattr(merged.rows, name), getattr(whole.rows, name)
            torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
        # The union of the splits has no padding: every row counts.
        assert_same(merged, whole, 1e-6)


def test_merging_a_key_split_that_sees_nothing_changes_nothing() -> None:
    q, k = offset_inputs(1000.0)
    options = {"scale": 1.0, "stats": "rows"}
    whole = qknorm.logit_stats(q, k, mask=Mask(), **options)
    nothing = Mask(key_padding=torch.zeros(2, 50, dtype=torch.bool))
    merged = whole.merge_keys(qknorm.logit_stats(q, k, mask=nothing, **options))
    assert_same(merged, whole, 1e-6)


def test_merging_key_splits_needs_rows() -> None:
    q, k = offset_inputs(0.0)
    stats = qknorm.logit_stats(q, k, mask=Mask())
    with pytest.raises(ValueError, match="rows"):
        stats.merge_keys(stats)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [None, "off_by_one"])
def test_no_counted_row_gives_minus_infinity_and_nan(backend: str, sink: str | None) -> None:
    inputs = make_inputs(Problem(B=2), torch.float32)
    nothing = Mask(causal=True, key_padding=torch.zeros(2, 13, dtype=torch.bool))
    options = {**inputs.options, "mask": nothing, "sink": sink, "stats": True}
    _, empty = qknorm.attention(inputs.q, inputs.k, inputs.v, **options, backend=backend)
    assert empty.row_count == 0
    assert empty.ratio_count == 0
    assert (empty.max_logit == -torch.inf).all()
    for name in ("entropy_nats", "entropy_ratio", "sink_mass"):
        assert getattr(empty, name).isnan().all(), name
    # A part without rows must not poison the merge.
    options["mask"] = Mask(causal=True)
    _, full = qknorm.attention(inputs.q, inputs.k, inputs.v, **options, backend=backend)
    assert full.row_count == 26
    assert_same(empty.merge(full), full, 0.0)
    assert_same(full.merge(empty), full, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("name", HARD)
def test_logit_stats_equals_the_statistics_of_attention(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(HARD[name], dtype)
    alone = qknorm.logit_stats(inputs.q, inputs.k, **inputs.options, stats="rows")
    for backend in BACKENDS:
        _, within = qknorm.attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, stats="rows", backend=backend
        )
        # At a scale of 10 the logits reach hundreds and are rounded to fp32: allow their rounding.
        tolerance = 1e-6 * max(1.0, float(alone.rows.max_logit.nan_to_num(0, 0, 0).abs().amax()))
        assert_same(alone, within, 0.0 if backend == "stock" else tolerance)


@pytest.mark.parametrize(("key_block", "score_budget"), [(1, 1), (3, 100), (7, 4000), (64, 1 << 19)])
@pytest.mark.parametrize(
    "name", ["everything", "padding_holes", "documents_padded", "decode", "window", "scale_1"]
)
def test_block_sizes_do_not_change_the_statistics(
    name: str, key_block: int, score_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(HARD[name], torch.float32)
    whole = qknorm.logit_stats(inputs.q, inputs.k, **inputs.options, stats="rows")
    monkeypatch.setitem(online_softmax.KEY_BLOCK, "cpu", key_block)
    monkeypatch.setitem(online_softmax.SCORE_BUDGET, "cpu", score_budget)
    blocks = qknorm.logit_stats(inputs.q, inputs.k, **inputs.options, stats="rows")
    assert_same(blocks, whole, 2e-6)
    for field in PER_ROW:
        actual, wanted = getattr(blocks.rows, field), getattr(whole.rows, field)
        torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=2e-6)
    assert torch.equal(blocks.rows.visible_keys, whole.rows.visible_keys)


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0, 8000.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_keeps_fp32_accuracy_at_any_logit_offset(backend: str, offset: float) -> None:
    q, k = offset_inputs(offset)
    options = {"mask": Mask(), "scale": 1.0, "stats": "rows"}
    _, exact = oracle.attention(q, k, k, **options)
    _, stats = qknorm.attention(q, k, k, **options, backend=backend)
    # The logits are exact, so nothing but the entropy's own arithmetic can be off.
    assert torch.equal(stats.max_logit.double(), exact["max_logit"])
    error = (stats.rows.entropy_nats - exact["rows"]["entropy_nats"]).abs().amax()
    assert error < 2e-6
    # The formula that cancels would miss this by two orders of magnitude.
    p = torch.softmax(q @ k.repeat_interleave(2, 1).mT, -1)
    lse = torch.logsumexp(q @ k.repeat_interleave(2, 1).mT, -1)
    cancelled = lse - (p * (q @ k.repeat_interleave(2, 1).mT)).sum(-1)
    if offset == 8000.0:
        assert (cancelled - exact["rows"]["entropy_nats"]).abs().amax() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["everything", "sink_token", "sink_5", "plain", "padding_head", "nothing_counted"]
)
def test_statistics_carry_no_gradient(name: str, backend: str) -> None:
    inputs = make_inputs(HARD[name], torch.float32)
    out, stats = qknorm.attention(
        inputs.q, inputs.k, inputs.v, **inputs.options, stats="rows", backend=backend
    )
    assert out.requires_grad
    for field in (*PER_HEAD, "entropy_sum", "ratio_sum", "sink_sum"):
        assert not getattr(stats, field).requires_grad, field
    for field in (*PER_ROW, "key_lse"):
        assert not getattr(stats.rows, field).requires_grad, field


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_are_fp32_or_fp64_per_query_head(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(HARD["everything"], dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    _, stats = qknorm.attention(
        inputs.q, inputs.k, inputs.v, **inputs.options, stats=True, backend=backend
    )
    for field in PER_HEAD:
        assert getattr(stats, field).dtype == wide, field
        assert getattr(stats, field).shape == (4,), field
    assert stats.rows is None, "row values are kept only on request"


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HARD)
def test_watching_changes_no_bit(name: str, backend: str, dtype: torch.dtype) -> None:
    def run(stats: bool | str) -> list[Tensor]:
        inputs = make_inputs(HARD[name], dtype)
        found = qknorm.attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, stats=stats, backend=backend
        )
        out = found[0] if stats else found
        return [out, *torch.autograd.grad(out, list(inputs.leaves.values()), inputs.d_out)]

    silent = run(False)
    for stats in (True, "rows"):
        for watched, plain in zip(run(stats), silent, strict=True):
            assert torch.equal(watched, plain)


def test_an_unknown_request_is_refused() -> None:
    q, k = offset_inputs(0.0)
    with pytest.raises(ValueError, match="stats"):
        qknorm.attention(q, k, k, mask=Mask(), stats="row")


@pytest.mark.parametrize("carriers", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_f19_a_sink_counts_once_whichever_part_carries_it(carriers: tuple[int, ...]) -> None:
    q, k = offset_inputs(0.0)
    sink = torch.tensor([0.0, 9.0, -3.0, 12.0])
    options = {"mask": Mask(), "scale": 1.0, "stats": "rows"}
    whole = qknorm.logit_stats(q, k, sink=sink, **options)
    edges = (0, 7, 25, 50)
    parts = [
        qknorm.logit_stats(q, k[:, :, lo:hi], sink=sink.clone() if i in carriers else None, **options)
        for i, (lo, hi) in enumerate(itertools.pairwise(edges))
    ]
    merged = parts[0].merge_keys(*parts[1:])
    assert whole.sink_mass.max() > 0.5
    assert_same(merged, whole, 1e-6)
    torch.testing.assert_close(merged.rows.lse, whole.rows.lse, rtol=1e-6, atol=1e-6)


def test_f19_parts_with_different_sinks_are_refused() -> None:
    q, k = offset_inputs(0.0)
    options = {"mask": Mask(), "scale": 1.0, "stats": "rows"}
    one, other = (qknorm.logit_stats(q, k, sink=torch.full((4,), s), **options) for s in (1.0, 2.0))
    with pytest.raises(ValueError, match="different sinks"):
        one.merge_keys(other)


def test_f16_statistics_compare_by_their_values() -> None:
    q, k = offset_inputs(0.0)
    one, same = (qknorm.logit_stats(q, k, stats="rows") for _ in range(2))
    assert one == same
    assert one != qknorm.logit_stats(q + 1, k, stats="rows")
    assert one != "something else"

"""The statistics of rows and the partial sums of heads, computed from m, l and t of the rows."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.tiles import key_range


@triton.jit
def visible_count(
    query_token, rows, is_row, counts_ptr, Tk, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Return the number of visible keys of each row, and whether the row counts.

    With ids the kernel `visible_keys` has counted before, and stored a negative number for a query that
    is padding.
    """
    if IDS:
        stored = tl.load(counts_ptr + rows, mask=is_row, other=-1)
        return tl.where(stored < 0, -1 - stored, stored), is_row & (stored > 0)
    else:
        lo, hi = key_range(query_token, query_token, Tk, window, CAUSAL, WINDOW)
        count = tl.maximum(hi - lo, 0)
        return count, is_row & (count > 0)


@triton.jit
def row_maximum(m, l, scale):  # noqa: E741
    """Return the maximum of the logits, or NaN if one of them is NaN and none is +inf.

    A NaN never enters m but always enters l. A logit of +inf makes l NaN too, but then m is +inf.
    """
    return tl.where((l != l) & (m < float("inf")), l, m * scale)


@triton.jit
def row_entropy(log2_l, l, t):  # noqa: E741
    """Return the entropy in nats, at least 0. For a row with one key rounding can give -1e-7."""
    LN2: tl.constexpr = 0.6931471805599453
    entropy = tl.where(l > 0.0, (log2_l - t / l) * LN2, l * 0.0)
    return tl.where(entropy < 0.0, 0.0, entropy)


@triton.jit
def write_statistics(
    m, l, t, sink_mass, count, counted, is_row, scale, c,  # noqa: E741
    heads_ptr,  # [4, parts, H] at this part and head
    heads_s0,
    rows_ptr,  # [3, B, H, Tq] at this batch row, head and tile
    rows_s0,
    rows,
    STATS: tl.constexpr,  # 1 writes the statistics of heads, 2 those of rows as well
):  # fmt: skip
    """Write the statistics of a tile. scale is positive here.

    For the head these are the max logit and the sums of entropy, entropy / ln(visible keys) and sink
    mass over the rows that count. For each row they are the max logit, the log of the sum and the
    entropy.
    """
    LN2: tl.constexpr = 0.6931471805599453
    seen = l > 0.0
    top = row_maximum(m, l, scale)
    log2_l = tl.log2(l)
    entropy = row_entropy(log2_l, l, t)
    choice = counted & (count > 1)
    ratio = entropy / (tl.log2(tl.maximum(count, 2).to(tl.float32)) * LN2)
    # tl.max ignores NaN, so NaN is handled separately.
    broken = tl.max((counted & (top != top)).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(counted, top, float("-inf")), 0)
    tl.store(heads_ptr, tl.where(broken, float("nan"), largest))
    tl.store(heads_ptr + heads_s0, tl.sum(tl.where(counted, entropy, 0.0), 0))
    tl.store(heads_ptr + 2 * heads_s0, tl.sum(tl.where(choice, ratio, 0.0), 0))
    tl.store(heads_ptr + 3 * heads_s0, tl.sum(tl.where(counted, sink_mass, 0.0), 0))
    if STATS == 2:
        # l is relative to the rounded product c m, but the maximum that is written is scale * m.
        gap = tl.where(seen, (m * c) * LN2 - top, 0.0)
        tl.store(rows_ptr + rows, top, mask=is_row)
        tl.store(rows_ptr + rows_s0 + rows, log2_l * LN2 + gap, mask=is_row)
        tl.store(rows_ptr + 2 * rows_s0 + rows, entropy, mask=is_row)

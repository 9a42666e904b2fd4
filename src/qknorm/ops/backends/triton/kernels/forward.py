"""The forward pass of attention. One program computes one tile of queries of one head."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.softmax import add_sink, attend
from qknorm.ops.backends.triton.kernels.statistics import visible_count, write_statistics
from qknorm.ops.backends.triton.kernels.tiles import key_blocks, load_hat, load_tile


@triton.jit(do_not_specialize=["Tq", "Tk", "window"])
def attention_forward(
    q, q_sb, q_sh, q_st,
    k, k_sb, k_sh, k_st,
    v, v_sb, v_sh, v_st,
    gain_ptr, cos_ptr, sin_ptr, rope_sb,  # of q, if it is normalised here; cos at the first query
    sink_ptr,  # [Hq]
    query_ids_ptr, key_ids_ptr,  # [B, Tq], [B, Tk]
    ranges_ptr,  # [B, tiles, 2]: keys whose ids may occur in the tile
    counts_ptr,  # [B, Tq], see visible_count
    out_ptr,  # [B, Hq, Tq, V]
    lse_ptr,  # [2, B, Hq, Tq]: exponent and log2 of the sum
    heads_ptr, rows_ptr,  # statistics
    Hq, Hk, Tq, Tk, window, eps, scale, c,
    D: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, NEGATIVE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr, SINK: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute out, lse and the statistics. Grid: (tiles of queries, Hq, B).

    scale is the absolute value of the scale. NEGATIVE says that it is negative, and then q changes its
    sign.
    """
    # Under a causal mask the last tiles have the most keys, so they start first.
    tiles = tl.num_programs(0)
    tile = tiles - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    kh = h // (Hq // Hk)
    b64 = b.to(tl.int64)
    start = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    is_row = start + rows < Tq
    query_token = start + rows + (Tk - Tq)

    q_at = q + b64 * q_sb + h.to(tl.int64) * q_sh + start.to(tl.int64) * q_st
    if NORM or ROPE != 0:
        at = b64 * rope_sb + start.to(tl.int64) * (R // 2)
        q_hat = load_hat(
            q_at, q_st, gain_ptr + h * D, cos_ptr + at, sin_ptr + at, rows, is_row, eps,
            D, R, NORM, ROPE, BLOCK_D,
        ).to(q.dtype.element_ty)  # fmt: skip
    else:
        q_hat = load_tile(q_at, rows, tl.arange(0, BLOCK_D), q_st, is_row, D, BLOCK_D)
    if NEGATIVE:
        q_hat = -q_hat

    first = start + (Tk - Tq)
    last = tl.minimum(start + BLOCK_M, Tq) - 1 + (Tk - Tq)
    query_id = 0
    if IDS:
        query_id = tl.load(query_ids_ptr + b64 * Tq + start + rows, mask=is_row, other=-2)
    lo, a, b_full, hi = key_blocks(
        first, last, ranges_ptr + (b64 * tiles + tile) * 2, Tk, window, CAUSAL, WINDOW, IDS, BLOCK_N,
        not IDS,
    )  # fmt: skip
    key_ids = key_ids_ptr + b64 * Tk
    acc, m, l, t = attend(  # noqa: E741
        q_hat,
        k + b64 * k_sb + kh.to(tl.int64) * k_sh, k_st,
        v + b64 * v_sb + kh.to(tl.int64) * v_sh, v_st,
        key_ids, lo, a, b_full, hi, query_token, query_id, Tk, window, c,
        D, V, CAUSAL, WINDOW, IDS, STATS > 0, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
    )  # fmt: skip

    sink = 0.0
    if SINK:
        sink = tl.load(sink_ptr + h)
    out, top, log2_total, sink_mass = add_sink(acc, m, l, sink, c, SINK)
    row0 = (b64 * Hq + h) * Tq + start
    v_cols = tl.arange(0, BLOCK_V)
    tl.store(
        out_ptr + row0 * V + rows[:, None] * V + v_cols[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (v_cols < V)[None, :],
    )
    lse_s0 = tl.num_programs(2).to(tl.int64) * Hq * Tq
    tl.store(lse_ptr + row0 + rows, top, mask=is_row)
    tl.store(lse_ptr + lse_s0 + row0 + rows, log2_total, mask=is_row)
    if STATS > 0:
        count, counted = visible_count(
            query_token, rows, is_row, counts_ptr + b64 * Tq + start, Tk, window, CAUSAL, WINDOW, IDS
        )
        part = b64 * tiles + tile
        heads_s0 = tl.num_programs(2).to(tl.int64) * Hq * tiles
        write_statistics(
            m, l, t, sink_mass, count, counted, is_row, scale, c,
            heads_ptr + part * Hq + h, heads_s0, rows_ptr + row0, lse_s0, rows, STATS,
        )  # fmt: skip

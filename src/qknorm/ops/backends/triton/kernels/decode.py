"""Attention for few queries and a long cache: programs share the keys, and the parts are merged.

The G query heads of a key head share one tile, so K and V are read once for all of them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.softmax import add_sink, attend
from qknorm.ops.backends.triton.kernels.statistics import visible_count, write_statistics
from qknorm.ops.backends.triton.kernels.tiles import full_key_range, key_range, split_range


@triton.jit(do_not_specialize=["Tq", "Tk", "window", "splits", "keys_per_split"])
def decode_split(
    q, q_sb, q_sh, q_st,  # q_hat
    k, k_sb, k_sh, k_st,
    v, v_sb, v_sh, v_st,
    query_ids_ptr, key_ids_ptr,
    acc_ptr,  # [B, Hk, splits, BLOCK_M, V] fp32, not divided
    mlt_ptr,  # [3, B, Hk, splits, BLOCK_M] fp32
    Hq, Hk, Tq, Tk, window, c, keys_per_split,
    D: tl.constexpr, V: tl.constexpr, NEGATIVE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of one split. Grid: (splits, Hk, B).

    Row r of the tile is query r % Tq of head r // Tq of the group.
    """
    split = tl.program_id(0)
    kh = tl.program_id(1)
    b = tl.program_id(2)
    G = Hq // Hk
    b64 = b.to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    g = rows // Tq
    i = rows % Tq
    is_row = rows < G * Tq
    cols = tl.arange(0, BLOCK_D)
    offsets = (kh * G + g).to(tl.int64) * q_sh + i * q_st
    q_tile = tl.load(
        q + b64 * q_sb + offsets[:, None] + cols[None, :],
        mask=is_row[:, None] & (cols < D)[None, :], other=0.0,
    )  # fmt: skip
    if NEGATIVE:
        q_tile = -q_tile
    query_token = i + (Tk - Tq)
    first = split * 0 + (Tk - Tq)
    last = split * 0 + Tk - 1
    lo, hi = key_range(first, last, Tk, window, CAUSAL, WINDOW)
    full_lo, full_hi = full_key_range(first, last, Tk, window, CAUSAL, WINDOW)
    # Rounded to whole blocks, as keys_per_split is. A block that begins in another split would count
    # twice.
    lo = tl.maximum(lo // BLOCK_N * BLOCK_N, split * keys_per_split)
    hi = tl.maximum(lo, tl.minimum(hi, (split + 1) * keys_per_split))
    query_id = 0
    if IDS:
        query_id = tl.load(query_ids_ptr + b64 * Tq + i, mask=is_row, other=-2)
    lo, a, b_full = split_range(lo, hi, full_lo, full_hi, BLOCK_N, not IDS)
    acc, m, l, t = attend(  # noqa: E741
        q_tile, k + b64 * k_sb + kh.to(tl.int64) * k_sh, k_st,
        v + b64 * v_sb + kh.to(tl.int64) * v_sh, v_st,
        key_ids_ptr + b64 * Tk, lo, a, b_full, hi, query_token, query_id, Tk, window, c,
        D, V, CAUSAL, WINDOW, IDS, ENTROPY, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
    )  # fmt: skip
    part = (b64 * Hk + kh) * tl.num_programs(0) + split
    v_cols = tl.arange(0, BLOCK_V)
    tl.store(
        acc_ptr + part * BLOCK_M * V + rows[:, None] * V + v_cols[None, :], acc,
        mask=(rows >= 0)[:, None] & (v_cols < V)[None, :],
    )  # fmt: skip
    s0 = tl.num_programs(2).to(tl.int64) * Hk * tl.num_programs(0) * BLOCK_M
    tl.store(mlt_ptr + part * BLOCK_M + rows, m)
    tl.store(mlt_ptr + s0 + part * BLOCK_M + rows, l)
    tl.store(mlt_ptr + 2 * s0 + part * BLOCK_M + rows, t)


@triton.jit(do_not_specialize=["Tq", "Tk", "window", "splits"])
def decode_merge(
    acc_ptr, mlt_ptr, sink_ptr, counts_ptr,
    out_ptr, lse_ptr, heads_ptr, rows_ptr,
    Hq, Hk, Tq, Tk, splits, window, scale, c,
    V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
    SINK: tl.constexpr, STATS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # Tq rounded up
    SPLIT_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge the splits of the queries of one head, in a fixed order. Grid: (Hq, B)."""
    h = tl.program_id(0)
    b = tl.program_id(1)
    G = Hq // Hk
    b64 = b.to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    is_row = i < Tq
    v_cols = tl.arange(0, BLOCK_V)
    row = (h % G) * Tq + i  # in the tile of its key head
    here = is_row[:, None] & (v_cols < V)[None, :]
    s0 = tl.num_programs(1).to(tl.int64) * Hk * splits * SPLIT_M
    m = tl.full([BLOCK_T], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_T], tl.float32)  # noqa: E741
    t = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for split in tl.range(0, splits):
        part = (b64 * Hk + h // G) * splits + split
        at = mlt_ptr + part * SPLIT_M + row
        m_part = tl.load(at, mask=is_row, other=float("-inf"))
        l_part = tl.load(at + s0, mask=is_row, other=0.0)
        t_part = tl.load(at + 2 * s0, mask=is_row, other=0.0)
        m_new = tl.maximum(m, m_part)
        mc_new = tl.where(m_new == float("-inf"), 0.0, m_new * c)
        down = tl.where(m == float("-inf"), float("-inf"), m * c) - mc_new  # see attend_block
        down_part = tl.where(m_part == float("-inf"), float("-inf"), m_part * c) - mc_new
        alpha, beta = tl.exp2(down), tl.exp2(down_part)
        t = alpha * (t + tl.where(l > 0.0, l * down, 0.0))
        t += beta * (t_part + tl.where(l_part > 0.0, l_part * down_part, 0.0))
        l = l * alpha + l_part * beta  # noqa: E741
        part_at = acc_ptr + (part * SPLIT_M + row)[:, None] * V + v_cols[None, :]
        acc = acc * alpha[:, None] + tl.load(part_at, mask=here, other=0.0) * beta[:, None]
        m = m_new
    sink = 0.0
    if SINK:
        sink = tl.load(sink_ptr + h)
    out, top, log2_total, sink_mass = add_sink(acc, m, l, sink, c, SINK)
    row0 = (b64 * Hq + h) * Tq
    tl.store(
        out_ptr + row0 * V + i[:, None] * V + v_cols[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=here,
    )
    lse_s0 = tl.num_programs(1).to(tl.int64) * Hq * Tq
    tl.store(lse_ptr + row0 + i, top, mask=is_row)
    tl.store(lse_ptr + lse_s0 + row0 + i, log2_total, mask=is_row)
    if STATS > 0:
        count, counted = visible_count(
            i + (Tk - Tq), i, is_row, counts_ptr + b64 * Tq, Tk, window, CAUSAL, WINDOW, IDS
        )
        write_statistics(
            m, l, t, sink_mass, count, counted, is_row, scale, c,
            heads_ptr + b64 * Hq + h, tl.num_programs(1).to(tl.int64) * Hq,
            rows_ptr + row0, lse_s0, i, STATS,
        )  # fmt: skip

"""The backward pass of attention, without atomics: one pass for dQ, and one for dK and dV.

In the second pass one program adds up dK and dV of a tile of keys over all query heads of its key head.
Both passes compute P = exp2(s - lse) again. Since lse and delta = rowsum(dO * O) include the sink,
neither pass has to know about it.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.tiles import (
    full_query_range,
    key_blocks,
    load_tile,
    query_range,
    split_range,
    visible_pairs,
)


@triton.jit(do_not_specialize=["Tq"])
def delta_and_sink(
    d_out, do_sb, do_sh, do_st,
    out_ptr,  # [B, Hq, Tq, V]
    lse_ptr, sink_ptr,
    delta_ptr,  # [B, Hq, Tq]
    d_sink_ptr,  # [B * tiles, Hq]
    Hq, Tq,
    V: tl.constexpr, SINK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute delta of each row and, for each tile, d_sink = -sum exp(sink - lse) delta.

    Grid: (tiles of queries, Hq, B).
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    b64 = b.to(tl.int64)
    start = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    is_row = start + rows < Tq
    v_cols = tl.arange(0, BLOCK_V)
    row0 = (b64 * Hq + h) * Tq + start
    do_at = d_out + b64 * do_sb + h.to(tl.int64) * do_sh + start.to(tl.int64) * do_st
    do = load_tile(do_at, rows, v_cols, do_st, is_row, V, BLOCK_V).to(tl.float32)
    o = load_tile(out_ptr + row0 * V, rows, v_cols, V, is_row, V, BLOCK_V).to(tl.float32)
    delta = tl.sum(do * o, 1)
    tl.store(delta_ptr + row0 + rows, delta, mask=is_row)
    if SINK:
        lse_s0 = tl.num_programs(2).to(tl.int64) * Hq * Tq
        top = tl.load(lse_ptr + row0 + rows, mask=is_row, other=0.0)
        log2_total = tl.load(lse_ptr + lse_s0 + row0 + rows, mask=is_row, other=0.0)
        weight = tl.exp2((tl.load(sink_ptr + h) * LOG2E - top) - log2_total)
        total = tl.sum(tl.where(is_row, weight * delta, 0.0), 0)
        tl.store(d_sink_ptr + (b64 * tl.num_programs(0) + tile) * Hq + h, -total)


@triton.jit
def dq_block(
    dq, q, do, top, log2_total, delta, k, k_st, v, v_st, key_ids, start, query_token, query_id,
    Tk, window, c,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of keys to dq `[M, D]`, which is not scaled yet."""
    keys = start + tl.arange(0, BLOCK_N)
    own = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_V)
    is_key = keys < Tk
    k_tile = load_tile(k + start.to(tl.int64) * k_st, own, d_cols, k_st, is_key, D, BLOCK_D)
    v_tile = load_tile(v + start.to(tl.int64) * v_st, own, v_cols, v_st, is_key, V, BLOCK_V)
    s = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * c
    p = tl.exp2((s - top[:, None]) - log2_total[:, None])
    if MASKED:
        key_id = 0
        if IDS:
            key_id = tl.load(key_ids + keys, mask=is_key, other=-1)
        visible = visible_pairs(query_token, keys, query_id, key_id, Tk, window, CAUSAL, WINDOW, IDS)
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(do, tl.trans(v_tile), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["Tq", "Tk", "window"])
def attention_dq(
    d_out, do_sb, do_sh, do_st,
    q, q_sb, q_sh, q_st,
    k, k_sb, k_sh, k_st,
    v, v_sb, v_sh, v_st,
    lse_ptr, delta_ptr, query_ids_ptr, key_ids_ptr, ranges_ptr,
    dq_ptr,  # [B, Hq, Tq, D]
    Hq, Hk, Tq, Tk, window, scale, c,  # here c = scale * log2(e) has the sign of scale
    D: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FULL_LOOP: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q_hat from q_hat and k_hat. Grid: (tiles of queries, Hq, B)."""
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
    d_cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_V)
    row0 = (b64 * Hq + h) * Tq + start
    lse_s0 = tl.num_programs(2).to(tl.int64) * Hq * Tq

    q_at = q + b64 * q_sb + h.to(tl.int64) * q_sh + start.to(tl.int64) * q_st
    do_at = d_out + b64 * do_sb + h.to(tl.int64) * do_sh + start.to(tl.int64) * do_st
    q_tile = load_tile(q_at, rows, d_cols, q_st, is_row, D, BLOCK_D)
    do = load_tile(do_at, rows, v_cols, do_st, is_row, V, BLOCK_V)
    top = tl.load(lse_ptr + row0 + rows, mask=is_row, other=0.0)
    log2_total = tl.load(lse_ptr + lse_s0 + row0 + rows, mask=is_row, other=0.0)
    delta = tl.load(delta_ptr + row0 + rows, mask=is_row, other=0.0)

    first = start + (Tk - Tq)
    last = tl.minimum(start + BLOCK_M, Tq) - 1 + (Tk - Tq)
    query_id = 0
    if IDS:
        query_id = tl.load(query_ids_ptr + b64 * Tq + start + rows, mask=is_row, other=-2)
    lo, a, b_full, hi = key_blocks(
        first, last, ranges_ptr + (b64 * tiles + tile) * 2, Tk, window, CAUSAL, WINDOW, IDS, BLOCK_N,
        FULL_LOOP,
    )  # fmt: skip
    k_at = k + b64 * k_sb + kh.to(tl.int64) * k_sh
    v_at = v + b64 * v_sb + kh.to(tl.int64) * v_sh
    key_ids = key_ids_ptr + b64 * Tk
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if FULL_LOOP:
        for i in tl.range(0, (b_full - a) // BLOCK_N):
            dq = dq_block(
                dq, q_tile, do, top, log2_total, delta, k_at, k_st, v_at, v_st, key_ids, a + i * BLOCK_N,
                query_token, query_id, Tk, window, c,
                D, V, CAUSAL, WINDOW, IDS, False, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    left = (a - lo) // BLOCK_N
    right = tl.maximum(hi - b_full + BLOCK_N - 1, 0) // BLOCK_N
    for j in tl.range(0, left + right):
        at = tl.where(j < left, lo + j * BLOCK_N, b_full + (j - left) * BLOCK_N)
        dq = dq_block(
            dq, q_tile, do, top, log2_total, delta, k_at, k_st, v_at, v_st, key_ids, at,
            query_token, query_id, Tk, window, c,
            D, V, CAUSAL, WINDOW, IDS, True, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    tl.store(
        dq_ptr + row0 * D + rows[:, None] * D + d_cols[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=is_row[:, None] & (d_cols < D)[None, :],
    )


@triton.jit
def dkdv_block(
    dk, dv, k, v, q, q_st, d_out, do_st, lse, lse_s0, delta, query_ids, start, keys, key_id,
    shift, Tq, Tk, window, c,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of queries of one head to dk (not scaled yet) and dv.

    The scores are computed transposed, `[N, M]`, so P and dS need no transposition before their
    products.
    """
    own = tl.arange(0, BLOCK_M)
    rows = start + own
    is_row = rows < Tq
    d_cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_V)
    q_tile = load_tile(q + start.to(tl.int64) * q_st, own, d_cols, q_st, is_row, D, BLOCK_D)
    do = load_tile(d_out + start.to(tl.int64) * do_st, own, v_cols, do_st, is_row, V, BLOCK_V)
    top = tl.load(lse + rows, mask=is_row, other=0.0)
    log2_total = tl.load(lse + lse_s0 + rows, mask=is_row, other=0.0)
    delta_row = tl.load(delta + rows, mask=is_row, other=0.0)
    s = tl.dot(k, tl.trans(q_tile), input_precision="ieee") * c
    p = tl.exp2((s - top[None, :]) - log2_total[None, :])
    if MASKED:
        query_id = 0
        if IDS:
            query_id = tl.load(query_ids + rows, mask=is_row, other=-2)
        visible = visible_pairs(rows + shift, keys, query_id, key_id, Tk, window, CAUSAL, WINDOW, IDS)
        visible = tl.trans(tl.broadcast_to(visible, [BLOCK_M, keys.shape[0]])) & is_row[None, :]
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    ds = p * (dp - delta_row[None, :])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["Tq", "Tk", "window"])
def attention_dkdv(
    d_out, do_sb, do_sh, do_st,
    q, q_sb, q_sh, q_st,
    k, k_sb, k_sh, k_st,
    v, v_sb, v_sh, v_st,
    lse_ptr, delta_ptr, query_ids_ptr, key_ids_ptr,
    ranges_ptr,  # [B, tiles of keys, 2]: rows whose ids may occur in the tile
    dk_ptr, dv_ptr,  # [B, Hk, Tk, D], [B, Hk, Tk, V]
    Hq, Hk, Tq, Tk, window, scale, c,
    D: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FULL_LOOP: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k_hat and v, summed over the G query heads of a key head.

    Grid: (tiles of keys, Hk, B).
    """
    tile = tl.program_id(0)  # under a causal mask the first tiles have the most queries, and start first
    kh = tl.program_id(1)
    b = tl.program_id(2)
    G = Hq // Hk
    b64 = b.to(tl.int64)
    start = tile * BLOCK_N
    own = tl.arange(0, BLOCK_N)
    keys = start + own
    is_key = keys < Tk
    d_cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_V)
    shift = Tk - Tq
    k_at = k + b64 * k_sb + kh.to(tl.int64) * k_sh + start.to(tl.int64) * k_st
    v_at = v + b64 * v_sb + kh.to(tl.int64) * v_sh + start.to(tl.int64) * v_st
    k_tile = load_tile(k_at, own, d_cols, k_st, is_key, D, BLOCK_D)
    v_tile = load_tile(v_at, own, v_cols, v_st, is_key, V, BLOCK_V)

    last = tl.minimum(start + BLOCK_N, Tk) - 1
    lo, hi = query_range(start, last, shift, Tq, window, CAUSAL, WINDOW)
    full_lo, full_hi = full_query_range(start, last, shift, Tq, window, CAUSAL, WINDOW)
    # A tile that extends past the last key has no full part, since its surplus keys must stay hidden.
    full_hi = tl.where(start + BLOCK_N > Tk, 0, full_hi)
    key_id = 0
    if IDS:
        key_id = tl.load(key_ids_ptr + b64 * Tk + keys, mask=is_key, other=-1)
        range_at = ranges_ptr + (b64 * tl.num_programs(0) + tile) * 2
        lo = tl.maximum(lo, tl.load(range_at))
        hi = tl.maximum(lo, tl.minimum(hi, tl.load(range_at + 1)))
    lo, a, b_full = split_range(lo, hi, full_lo, full_hi, BLOCK_M, FULL_LOOP)
    left = (a - lo) // BLOCK_M
    right = tl.maximum(hi - b_full + BLOCK_M - 1, 0) // BLOCK_M
    lse_s0 = tl.num_programs(2).to(tl.int64) * Hq * Tq
    query_ids = query_ids_ptr + b64 * Tq

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for g in tl.range(0, G):
        h = kh * G + g
        q_at = q + b64 * q_sb + h.to(tl.int64) * q_sh
        do_at = d_out + b64 * do_sb + h.to(tl.int64) * do_sh
        row0 = (b64 * Hq + h) * Tq
        if FULL_LOOP:
            for i in tl.range(0, (b_full - a) // BLOCK_M):
                dk, dv = dkdv_block(
                    dk, dv, k_tile, v_tile, q_at, q_st, do_at, do_st, lse_ptr + row0, lse_s0,
                    delta_ptr + row0, query_ids, a + i * BLOCK_M, keys, key_id, shift, Tq, Tk, window, c,
                    D, V, CAUSAL, WINDOW, IDS, False, BLOCK_M, BLOCK_D, BLOCK_V,
                )  # fmt: skip
        for j in tl.range(0, left + right):
            at = tl.where(j < left, lo + j * BLOCK_M, b_full + (j - left) * BLOCK_M)
            dk, dv = dkdv_block(
                dk, dv, k_tile, v_tile, q_at, q_st, do_at, do_st, lse_ptr + row0, lse_s0,
                delta_ptr + row0, query_ids, at, keys, key_id, shift, Tq, Tk, window, c,
                D, V, CAUSAL, WINDOW, IDS, True, BLOCK_M, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    at_key = (b64 * Hk + kh) * Tk + start
    tl.store(
        dk_ptr + at_key * D + own[:, None] * D + d_cols[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=is_key[:, None] & (d_cols < D)[None, :],
    )
    tl.store(
        dv_ptr + at_key * V + own[:, None] * V + v_cols[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=is_key[:, None] & (v_cols < V)[None, :],
    )

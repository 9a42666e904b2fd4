"""The statistics alone, without the product with V."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.softmax import attend
from qknorm.ops.backends.triton.kernels.statistics import row_entropy, row_maximum
from qknorm.ops.backends.triton.kernels.tiles import key_blocks, load_tile


@triton.jit(do_not_specialize=["Tq", "Tk", "window"])
def logit_stats_rows(
    q, q_sb, q_sh, q_st,
    k, k_sb, k_sh, k_st,
    tokens_ptr,  # [Tq] int64: the token of each query, if the queries are a sample
    query_ids_ptr, key_ids_ptr, ranges_ptr,
    rows_ptr,  # [3, B, Hq, rows]: max logit, log of the sum relative to it, entropy
    Hq, Hk, Tq, Tk, window, scale, c,
    D: tl.constexpr, NEGATIVE: tl.constexpr, SAMPLED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of each row. Grid: (tiles of queries, Hq, B).

    scale is the absolute value of the scale. NEGATIVE says that it is negative, and then q changes its
    sign.
    """
    LN2: tl.constexpr = 0.6931471805599453
    tiles = tl.num_programs(0)
    tile = tiles - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    kh = h // (Hq // Hk)
    b64 = b.to(tl.int64)
    start = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    is_row = start + rows < Tq
    if SAMPLED:
        query_token = tl.load(tokens_ptr + start + rows, mask=is_row, other=0).to(tl.int32)
        first = tl.min(tl.where(is_row, query_token, 2**30), 0)
        last = tl.max(tl.where(is_row, query_token, -(2**30)), 0)
    else:
        query_token = start + rows + (Tk - Tq)
        first = start + (Tk - Tq)
        last = tl.minimum(start + BLOCK_M, Tq) - 1 + (Tk - Tq)
    q_at = q + b64 * q_sb + h.to(tl.int64) * q_sh + start.to(tl.int64) * q_st
    q_tile = load_tile(q_at, rows, tl.arange(0, BLOCK_D), q_st, is_row, D, BLOCK_D)
    if NEGATIVE:
        q_tile = -q_tile
    query_id = 0
    if IDS:
        query_id = tl.load(query_ids_ptr + b64 * Tq + start + rows, mask=is_row, other=-2)
    lo, a, b_full, hi = key_blocks(
        first, last, ranges_ptr + (b64 * tiles + tile) * 2, Tk, window, CAUSAL, WINDOW, IDS, BLOCK_N,
        not IDS,
    )  # fmt: skip
    k_at = k + b64 * k_sb + kh.to(tl.int64) * k_sh
    _, m, l, t = attend(  # noqa: E741
        q_tile, k_at, k_st, k_at, k_st, key_ids_ptr + b64 * Tk, lo, a, b_full, hi,
        query_token, query_id, Tk, window, c,
        D, D, CAUSAL, WINDOW, IDS, True, BLOCK_M, BLOCK_N, BLOCK_D, 0,
    )  # fmt: skip
    seen = l > 0.0
    top = row_maximum(m, l, scale)
    gap = tl.where(seen, (m * c) * LN2 - top, 0.0)
    log2_l = tl.log2(l)
    row0 = (b64 * Hq + h) * Tq + start + rows
    rows_s0 = tl.num_programs(2).to(tl.int64) * Hq * Tq
    tl.store(rows_ptr + row0, top, mask=is_row)
    tl.store(rows_ptr + rows_s0 + row0, log2_l * LN2 + gap, mask=is_row)
    tl.store(rows_ptr + 2 * rows_s0 + row0, row_entropy(log2_l, l, t), mask=is_row)

"""Kernels for documents and padding: which keys a tile may see, and how many keys each row sees.

Documents and padding are given as ids of tokens. A pair is visible only if its ids are equal and not
negative. The ids may come in any order.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.tiles import key_range, visible_pairs


@triton.jit(do_not_specialize=["own_T", "other_T"])
def tile_ranges(
    own_ids_ptr, other_ids_ptr, ranges_ptr, own_T, other_T, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Find the other tokens that may be visible to a tile of tokens. Grid: (tiles, B).

    The result is the smallest range `[lo, hi)` that holds all other tokens whose id lies between the
    smallest and the largest id of the tile; `[0, 0)` if there are none. For tiles of queries the other
    tokens are keys, and for tiles of keys they are queries.
    """
    tile = tl.program_id(0)
    b64 = tl.program_id(1).to(tl.int64)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(own_ids_ptr + b64 * own_T + at, mask=at < own_T, other=-1)
    real = own >= 0
    biggest = 2**62
    smallest_id = tl.min(tl.where(real, own, biggest), 0)
    largest_id = tl.max(tl.where(real, own, -1), 0)
    lo = tile * 0 + other_T
    hi = tile * 0
    for start in tl.range(0, other_T, CHUNK):
        other = start + tl.arange(0, CHUNK)
        ids = tl.load(other_ids_ptr + b64 * other_T + other, mask=other < other_T, other=-1)
        near = (ids >= smallest_id) & (ids <= largest_id)
        lo = tl.minimum(lo, tl.min(tl.where(near, other, other_T), 0))
        hi = tl.maximum(hi, tl.max(tl.where(near, other + 1, 0), 0))
    out = ranges_ptr + (b64 * tl.num_programs(0) + tile) * 2
    tl.store(out, tl.minimum(lo, hi))
    tl.store(out + 1, hi)


@triton.jit(do_not_specialize=["Tq", "Tk", "window"])
def visible_keys(
    query_ids_ptr, key_ids_ptr, tokens_ptr, ranges_ptr, counts_ptr, Tq, Tk, window,
    SAMPLED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Count the visible keys of each row, int32 `[B, Tq]`. Grid: (tiles, B).

    A count n is stored as -1 - n if the row's own token is padding.
    """
    tiles = tl.num_programs(0)
    tile = tl.program_id(0)
    b64 = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < Tq
    if SAMPLED:
        token = tl.load(tokens_ptr + rows, mask=is_row, other=0).to(tl.int32)
        first = tl.min(tl.where(is_row, token, 2**30), 0)
        last = tl.max(tl.where(is_row, token, -(2**30)), 0)
    else:
        token = rows + (Tk - Tq)
        first = tile * BLOCK_M + (Tk - Tq)
        last = tl.minimum(tile * BLOCK_M + BLOCK_M, Tq) - 1 + (Tk - Tq)
    query_id = tl.load(query_ids_ptr + b64 * Tq + rows, mask=is_row, other=-2)
    lo, hi = key_range(first, last, Tk, window, CAUSAL, WINDOW)
    range_at = ranges_ptr + (b64 * tiles + tile) * 2
    lo = tl.maximum(lo, tl.load(range_at)) // BLOCK_N * BLOCK_N
    hi = tl.minimum(hi, tl.load(range_at + 1))
    count = tl.zeros([BLOCK_M], tl.int32)
    for start in tl.range(lo, hi, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key_id = tl.load(key_ids_ptr + b64 * Tk + keys, mask=keys < Tk, other=-1)
        seen = visible_pairs(token, keys, query_id, key_id, Tk, window, CAUSAL, WINDOW, True)
        count += tl.sum(seen.to(tl.int32), 1)
    # If Tq > Tk, the tokens of the first queries are not among the keys.
    own_id = tl.load(key_ids_ptr + b64 * Tk + token, mask=is_row & (token >= 0), other=0)
    count = tl.where(own_id < 0, -1 - count, count)
    tl.store(counts_ptr + b64 * Tq + rows, count, mask=is_row)

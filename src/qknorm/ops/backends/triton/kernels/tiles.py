"""Functions that the kernels share: they load, normalise and rotate tiles, and find visible pairs."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(base, rows, cols, stride, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a row-major matrix `[*, WIDTH]` as `[rows, BLOCK]`, with 0 outside."""
    if BLOCK == WIDTH:
        return tl.load(base + rows[:, None] * stride + cols[None, :], mask=is_row[:, None], other=0.0)
    inside = is_row[:, None] & (cols < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def partner(cols, R: tl.constexpr, ROPE: tl.constexpr):
    """Return for each entry of a head how RoPE rotates it.

    The results are the other entry of its pair, the index of its angle, and the sign of the sine.
    """
    if ROPE == 1:  # half: i with i + R/2
        first = cols < R // 2
        return tl.where(first, cols + R // 2, cols - R // 2), cols % (R // 2), tl.where(first, -1.0, 1.0)
    else:  # interleaved: 2i with 2i + 1
        return cols ^ 1, cols // 2, tl.where(cols % 2 == 0, -1.0, 1.0)


@triton.jit
def load_hat(
    x,  # at the first row of the tile
    x_st,
    gain_ptr,  # at the head
    cos_ptr,  # at the first row of the tile
    sin_ptr,
    rows,
    is_row,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,  # 0 none, 1 half, 2 interleaved
    BLOCK_D: tl.constexpr,
):
    """Load a tile and apply RMSNorm, gain and RoPE. Returns fp32 `[M, BLOCK_D]`, not rounded yet.

    The partner of each rotated entry is loaded a second time, from cache, at a permuted column.
    Exchanging columns between registers would cost more.
    """
    cols = tl.arange(0, BLOCK_D)
    y = load_tile(x, rows, cols, x_st, is_row, D, BLOCK_D).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(y * y, 1) / D + eps) if NORM else 1.0
    if NORM:
        gain = tl.load(gain_ptr + cols, mask=cols < D, other=0.0)
        y = y * inverse[:, None] * gain[None, :]
    if ROPE != 0:
        turns = cols < R
        pair, angle, sign = partner(cols, R, ROPE)
        there = is_row[:, None] & turns[None, :]
        z = tl.load(x + rows[:, None] * x_st + pair[None, :], mask=there, other=0.0).to(tl.float32)
        if NORM:
            z = z * inverse[:, None] * tl.load(gain_ptr + pair, mask=turns, other=0.0)[None, :]
        at = rows[:, None] * (R // 2) + angle[None, :]
        cos = tl.load(cos_ptr + at, mask=there, other=1.0)
        sin = tl.load(sin_ptr + at, mask=there, other=0.0)
        y = y * cos + z * (sin * sign[None, :])
    return y


@triton.jit
def visible_pairs(
    query_token,  # [M]
    key_token,  # [N]
    query_id,  # [M], or any number if IDS is False
    key_id,  # [N], or any number if IDS is False
    Tk,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    IDS: tl.constexpr,
):
    """Return which pairs are visible, as a bool that broadcasts to `[M, N]`."""
    visible = (key_token < Tk)[None, :]
    distance = query_token[:, None] - key_token[None, :]
    if CAUSAL:
        visible = visible & (distance >= 0)
    if WINDOW:
        visible = visible & (distance < window)
        if not CAUSAL:
            visible = visible & (distance > -window)
    if IDS:
        visible = visible & (query_id[:, None] == key_id[None, :]) & (key_id >= 0)[None, :]
    return visible


@triton.jit
def key_range(
    first,  # token of the first query
    last,  # token of the last query
    Tk,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the range `[lo, hi)` of keys that at least one of the queries may see by position."""
    lo = first * 0
    hi = first * 0 + Tk
    if CAUSAL:
        hi = tl.minimum(hi, last + 1)
    if WINDOW:
        lo = tl.maximum(lo, first - window + 1)
        hi = tl.minimum(hi, last + window)
    hi = tl.maximum(hi, 0)
    return tl.minimum(lo, hi), hi


@triton.jit
def full_key_range(first, last, Tk, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range `[lo, hi)` of keys that all queries see by position. It is empty if hi <= lo."""
    lo = first * 0
    hi = first * 0 + Tk
    if CAUSAL:
        hi = tl.minimum(hi, first + 1)
    if WINDOW:
        lo = tl.maximum(lo, last - window + 1)
        hi = tl.minimum(hi, first + window)
    return lo, hi


@triton.jit
def query_range(
    first,  # first key
    last,  # last key
    shift,  # Tk - Tq
    Tq,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the range `[lo, hi)` of queries that may see at least one of the keys by position."""
    lo = first * 0
    hi = first * 0 + Tq
    if CAUSAL:
        lo = tl.maximum(lo, first - shift)
    if WINDOW:
        hi = tl.minimum(hi, last + window - shift)
        if not CAUSAL:
            lo = tl.maximum(lo, first - window + 1 - shift)
    hi = tl.maximum(hi, 0)
    return tl.minimum(lo, hi), hi


@triton.jit
def full_query_range(first, last, shift, Tq, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range `[lo, hi)` of queries that see all keys by position. It is empty if hi <= lo."""
    lo = first * 0
    hi = first * 0 + Tq
    if CAUSAL:
        lo = tl.maximum(lo, last - shift)
    if WINDOW:
        hi = tl.minimum(hi, first + window - shift)
        if not CAUSAL:
            lo = tl.maximum(lo, last - window + 1 - shift)
    return lo, hi


@triton.jit
def split_range(lo, hi, full_lo, full_hi, BLOCK: tl.constexpr, HAS_FULL: tl.constexpr):
    """Split the range `[lo, hi)` into blocks with a mask, full blocks, and blocks with a mask.

    Returns lo rounded down to a block, and the bounds of the full part, which is empty without HAS_FULL.
    """
    lo = lo // BLOCK * BLOCK
    if HAS_FULL:
        a = tl.minimum(tl.maximum((full_lo + BLOCK - 1) // BLOCK * BLOCK, lo), hi)
        a = (a + BLOCK - 1) // BLOCK * BLOCK  # hi need not be aligned
        b = tl.maximum(tl.minimum(full_hi, hi) // BLOCK * BLOCK, a)
        return lo, a, b
    else:
        return lo, lo, lo


@triton.jit
def key_blocks(
    first,  # token of the first query of the tile, and of the last
    last,
    ranges,  # at the tile, see documents.tile_ranges
    Tk,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FULL: tl.constexpr,
):
    """Return lo, a, b and hi of a tile of queries.

    The tile may see the keys `[lo, hi)`. The blocks in `[a, b)` are visible to all its rows.
    """
    lo, hi = key_range(first, last, Tk, window, CAUSAL, WINDOW)
    full_lo, full_hi = full_key_range(first, last, Tk, window, CAUSAL, WINDOW)
    if IDS:
        lo = tl.maximum(lo, tl.load(ranges))
        hi = tl.maximum(lo, tl.minimum(hi, tl.load(ranges + 1)))
    lo, a, b = split_range(lo, hi, full_lo, full_hi, BLOCK, HAS_FULL)
    return lo, a, b, hi

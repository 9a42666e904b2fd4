"""QK-norm and RoPE of q and k in one launch, forward and backward.

The inputs q and k may have any strides, as views of one qkv projection do. The results are contiguous.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.tiles import load_hat, load_tile, partner


@triton.jit
def _forward_side(
    x, x_sb, x_sh, x_st, gain_ptr, cos_ptr, sin_ptr, rope_sb, hat_ptr, b64, h, H, T, tile, eps,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start = tile * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    is_row = start + rows < T
    cols = tl.arange(0, BLOCK_D)
    at = b64 * rope_sb + start.to(tl.int64) * (R // 2)
    hat = load_hat(
        x + b64 * x_sb + h.to(tl.int64) * x_sh + start.to(tl.int64) * x_st, x_st, gain_ptr + h * D,
        cos_ptr + at, sin_ptr + at, rows, is_row, eps, D, R, NORM, ROPE, BLOCK_D,
    )  # fmt: skip
    tl.store(
        hat_ptr + ((b64 * H + h) * T + start) * D + rows[:, None] * D + cols[None, :],
        hat.to(hat_ptr.dtype.element_ty),
        mask=is_row[:, None] & (cols < D)[None, :],
    )


@triton.jit(do_not_specialize=["Tq", "Tk"])
def prep_forward(
    q, q_sb, q_sh, q_st, q_gain_ptr, q_hat_ptr, Hq, Tq,
    k, k_sb, k_sh, k_st, k_gain_ptr, k_hat_ptr, Hk, Tk,
    cos_ptr, sin_ptr, rope_sb, eps,
    D: tl.constexpr, R: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate q and k. Grid: (tiles, Hq + Hk, B), with the heads of q first.

    With Hq = 0 q is not computed, and with Hk = 0 k is not.
    """
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b64 = tl.program_id(2).to(tl.int64)
    if h < Hq:
        if tile * BLOCK_T < Tq:
            late = (tile * 0 + (Tk - Tq)).to(tl.int64) * (R // 2)  # queries are the last Tq tokens
            _forward_side(
                q, q_sb, q_sh, q_st, q_gain_ptr, cos_ptr + late, sin_ptr + late, rope_sb, q_hat_ptr,
                b64, h, Hq, Tq, tile, eps, D, R, Q_NORM, ROPE, BLOCK_T, BLOCK_D,
            )  # fmt: skip
    else:
        if tile * BLOCK_T < Tk:
            _forward_side(
                k, k_sb, k_sh, k_st, k_gain_ptr, cos_ptr, sin_ptr, rope_sb, k_hat_ptr,
                b64, h - Hq, Hk, Tk, tile, eps, D, R, K_NORM, ROPE, BLOCK_T, BLOCK_D,
            )  # fmt: skip


@triton.jit
def _backward_side(
    d_hat_ptr, x, x_sb, x_sh, x_st, gain_ptr, cos_ptr, sin_ptr, rope_sb, dx_ptr, d_gain_ptr,
    b64, h, H, T, tile, tiles, eps,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start = tile * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    is_row = start + rows < T
    cols = tl.arange(0, BLOCK_D)
    here = is_row[:, None] & (cols < D)[None, :]
    head_at = ((b64 * H + h) * T + start) * D
    d = tl.load(
        d_hat_ptr + head_at + rows[:, None] * D + cols[None, :], mask=here, other=0.0
    ).to(tl.float32)  # fmt: skip
    if ROPE != 0:
        # The gradient is rotated back, with the opposite sign of the sine.
        turns = cols < R
        pair, angle, sign = partner(cols, R, ROPE)
        there = is_row[:, None] & turns[None, :]
        at = b64 * rope_sb + start.to(tl.int64) * (R // 2)
        offsets = rows[:, None] * (R // 2) + angle[None, :]
        cos = tl.load(cos_ptr + at + offsets, mask=there, other=1.0)
        sin = tl.load(sin_ptr + at + offsets, mask=there, other=0.0)
        other = tl.load(
            d_hat_ptr + head_at + rows[:, None] * D + pair[None, :], mask=there, other=0.0
        ).to(tl.float32)  # fmt: skip
        d = d * cos - other * (sin * sign[None, :])
    if NORM:
        x_at = x + b64 * x_sb + h.to(tl.int64) * x_sh + start.to(tl.int64) * x_st
        y = load_tile(x_at, rows, cols, x_st, is_row, D, BLOCK_D).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(y * y, 1) / D + eps)
        y = y * inverse[:, None]
        gain = tl.load(gain_ptr + h * D + cols, mask=cols < D, other=0.0)
        d_gain = tl.sum(d * y, 0)
        tl.store(d_gain_ptr + ((b64 * tiles + tile) * H + h) * D + cols, d_gain, mask=cols < D)
        d = d * gain[None, :]
        d = inverse[:, None] * (d - y * (tl.sum(d * y, 1) / D)[:, None])
    tl.store(
        dx_ptr + head_at + rows[:, None] * D + cols[None, :], d.to(dx_ptr.dtype.element_ty), mask=here
    )


@triton.jit(do_not_specialize=["Tq", "Tk", "q_tiles", "k_tiles"])
def prep_backward(
    dq_hat_ptr, q, q_sb, q_sh, q_st, q_gain_ptr, dq_ptr, dq_gain_ptr, Hq, Tq, q_tiles,
    dk_hat_ptr, k, k_sb, k_sh, k_st, k_gain_ptr, dk_ptr, dk_gain_ptr, Hk, Tk, k_tiles,
    cos_ptr, sin_ptr, rope_sb, eps,
    D: tl.constexpr, R: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and the gains from those of q_hat and k_hat, which are contiguous.

    The gradients of the gains are partial sums `[B * tiles, H, D]`, which are added in a fixed order
    afterwards. Grid: (tiles, Hq + Hk, B).
    """
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b64 = tl.program_id(2).to(tl.int64)
    if h < Hq:
        if tile < q_tiles:
            late = (tile * 0 + (Tk - Tq)).to(tl.int64) * (R // 2)
            _backward_side(
                dq_hat_ptr, q, q_sb, q_sh, q_st, q_gain_ptr, cos_ptr + late, sin_ptr + late, rope_sb,
                dq_ptr, dq_gain_ptr, b64, h, Hq, Tq, tile, q_tiles, eps,
                D, R, Q_NORM, ROPE, BLOCK_T, BLOCK_D,
            )  # fmt: skip
    else:
        if tile < k_tiles:
            _backward_side(
                dk_hat_ptr, k, k_sb, k_sh, k_st, k_gain_ptr, cos_ptr, sin_ptr, rope_sb,
                dk_ptr, dk_gain_ptr, b64, h - Hq, Hk, Tk, tile, k_tiles, eps,
                D, R, K_NORM, ROPE, BLOCK_T, BLOCK_D,
            )  # fmt: skip

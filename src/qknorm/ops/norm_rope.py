"""RMSNorm of q and k, and RoPE, in fp32 (fp64 for fp64 input) with one rounding at the end.

Shapes: B batch, H heads, T tokens, D head width, R rotary width; x is [B, H, T, D] and its gain [H, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from qknorm import checks, spec
from qknorm.spec import EpsPlace, Rope, Statistic


def rms_normalize(
    x_BHTD: Tensor,
    gain_HD: Tensor | None,
    *,
    eps: float,
    statistic: Statistic = "head",
    eps_place: EpsPlace = "mean",
    centered: bool = False,
) -> Tensor:
    """Compute RMSNorm (Zhang & Sennrich 2019, eq. 4) in the dtype of x, which should be fp32 or fp64.

    The result is `x / sqrt(mean(x^2) + eps) * gain`. At x = 0 its derivative is finite: gain /
    sqrt(eps), or gain / eps with `eps_place="outside"`.

    Args:
        x_BHTD: `[B, H, T, D]`.
        gain_HD: `[H, D]`, or None for a norm without a gain.
        eps: a positive number.
        statistic: takes the mean over D with "head", over H and D with "full".
        eps_place: where eps is added, see `NormDialect`.
        centered: whether the mean is subtracted first, see `NormDialect`.
    """
    axes = (-1,) if statistic == "head" else (1, -1)
    if centered:
        x_BHTD = x_BHTD - x_BHTD.mean(axes, keepdim=True)
    width = x_BHTD.shape[-1] * (1 if statistic == "head" else x_BHTD.shape[1])
    mean_square = x_BHTD.square().mean(axes, keepdim=True)
    if eps_place == "outside":
        x_hat = x_BHTD / (_root(mean_square) + eps)
    else:
        # rsqrt is avoided, because its gradient contains the cube of its result: in fp32, x = 0 with an
        # eps of 1e-26 would give inf * 0, which is NaN.
        share = eps if eps_place == "mean" else eps / width
        x_hat = x_BHTD * (mean_square + share).sqrt().reciprocal()
    return x_hat if gain_HD is None else x_hat * gain_HD.to(x_BHTD.dtype)[:, None]


def _root(x: Tensor) -> Tensor:
    """Return the square root, with a gradient of 0 at 0, where the gradient of `sqrt` is infinite."""
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())


def rotate(x_BHTD: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE (Su et al. 2021, eq. 34) to the first R entries, in the dtype of x.

    The other entries stay as they are. x is `[B, H, T, D]` and the table has T positions.
    """
    R = rope.width
    cos, sin = rope.cos.to(x_BHTD.dtype), rope.sin.to(x_BHTD.dtype)
    if cos.dim() == 3:  # [B, T, R/2] -> [B, 1, T, R/2]
        cos, sin = cos[:, None], sin[:, None]
    turned, rest = x_BHTD[..., :R], x_BHTD[..., R:]
    if rope.layout == "half":
        a, b = turned[..., : R // 2], turned[..., R // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return turned if x_BHTD.shape[-1] == R else torch.cat((turned, rest), dim=-1)


def norm_rope(x_BHTD: Tensor, gain_HD: Tensor | None, eps: float, rope: Rope | None) -> Tensor:
    """Return x `[B, H, T, D]` after the norm and RoPE, rounded once to its dtype.

    Without a gain x is not normalised, and without a table it is not rotated.
    """
    if gain_HD is None and rope is None:
        return x_BHTD
    with torch.autocast(x_BHTD.device.type, enabled=False):
        wide = x_BHTD.to(spec.compute_dtype(x_BHTD.dtype))
        if gain_HD is not None:
            wide = rms_normalize(wide, gain_HD, eps=eps)
        if rope is not None:
            wide = rotate(wide, rope)
        return wide.to(x_BHTD.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise q and k per head, then rotate them.

    Args:
        q: `[B, Hq, Tq, D]`, any strides; fp16, bf16, fp32 or fp64.
        k: `[B, Hk, Tk, D]` in q's dtype; Hq is a multiple of Hk.
        q_gain: `[Hq, D]`, floating point; None leaves q without a norm.
        k_gain: `[Hk, D]`, floating point; None leaves k without a norm.
        eps: added to the mean of squares; positive, and at least 1e-6 for half-precision input.
        rope: the rotary table of all Tk tokens, or None. The queries are the last Tq tokens.

    Returns:
        q_hat `[B, Hq, Tq, D]` and k_hat `[B, Hk, Tk, D]`, computed in fp32 (fp64 for fp64 input) and
        rounded once to the dtype of q and k.

    Raises:
        ValueError: shapes, dtypes or eps do not fit; the message says which.
    """
    checks.check_qk(q, k, q_gain, k_gain, eps, rope)
    return (
        norm_rope(q, q_gain, eps, None if rope is None else rope.last(q.shape[2])),
        norm_rope(k, k_gain, eps, rope),
    )

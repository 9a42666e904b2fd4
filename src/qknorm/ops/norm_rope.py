"""RMSNorm of q and k, and RoPE, in fp32 with one rounding at the end.

x [B, H, T, D]; gain [H, D] (or any shape that broadcasts with [H, 1, D] once `[:, None]` is applied).
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
) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019, eq. 4) in x's own dtype; callers bring fp32 or fp64.

    `x / sqrt(mean(x^2) + eps) * gain`, the mean over D ("head") or over H and D ("full"). At x = 0 the
    gradient is gain / sqrt(eps), or gain / eps where eps stands outside of the root.
    """
    axes = (-1,) if statistic == "head" else (1, -1)
    width = x_BHTD.shape[-1] * (1 if statistic == "head" else x_BHTD.shape[1])
    mean_square = x_BHTD.square().mean(axes, keepdim=True)
    if eps_place == "outside":
        x_hat = x_BHTD / (_root(mean_square) + eps)
    else:
        # Not rsqrt, whose gradient holds the cube of its result: at x = 0 and an eps of 1e-26 it is
        # inf * 0 in fp32.
        share = eps if eps_place == "mean" else eps / width
        x_hat = x_BHTD * (mean_square + share).sqrt().reciprocal()
    return x_hat if gain_HD is None else x_hat * gain_HD.to(x_BHTD.dtype)[:, None]


def _root(x: Tensor) -> Tensor:
    """The square root, with a gradient of 0 at 0, where that of `sqrt` is infinite."""
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())


def rotate(x_BHTD: Tensor, rope: Rope) -> Tensor:
    """RoPE (Su et al. 2021, eq. 34) on the first R entries, in x's own dtype; the rest pass through."""
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
    """Norm, then RoPE, then one rounding to x's dtype. Without a gain there is no norm."""
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
        k: `[B, Hk, Tk, D]`.
        q_gain: `[Hq, D]`; None leaves q without a norm.
        k_gain: `[Hk, D]`; None leaves k without a norm.
        eps: added to the mean of squares; at least 1e-6 in half precision.
        rope: rotations for all Tk tokens; queries are the last Tq of them.

    Returns:
        q and k, normalised and rotated in fp32 (fp64 for fp64 input), rounded once to their dtype.

    Raises:
        ValueError: shapes, dtypes or eps do not fit; the message says which.
    """
    checks.check_qk(q, k, q_gain, k_gain, eps, rope)
    return (
        norm_rope(q, q_gain, eps, None if rope is None else rope.last(q.shape[2])),
        norm_rope(k, k_gain, eps, rope),
    )

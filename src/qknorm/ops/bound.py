"""How large a logit can become, from the gains alone.

After the norm |x_hat_d| = g_d u_d with |u|^2 <= D, so a head's logits are at most
scale * D * (largest singular value of diag(g_q) R diag(g_k)), where R rotates pairs of entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qknorm.spec import Rope, RopeLayout, compute_dtype

# q_hat, k_hat and the stored gain are each rounded once; half an ulp is 2^-9 in bf16, 2^-12 in fp16.
ROUNDING = {torch.bfloat16: (1 + 2.0**-8) ** 3, torch.float16: (1 + 2.0**-11) ** 3}


def arithmetic_rounding(D: int, dtype: torch.dtype) -> float:
    """How far the arithmetic of one logit may carry it past the bound, as a factor above 1.

    The dot product and the two sums of squares under their square roots err by at most 2 D roundoffs
    where they add one term after the other. Every backend adds at least eight chains side by side,
    which leaves D / 4; measured over all backends it is at most D / 5, for equal entries and gains.
    D roundoffs are allowed for, and 6 more for the steps whose number does not depend on D.
    """
    roundoff = torch.finfo(compute_dtype(dtype)).eps / 2
    return 1 + (D + 6) * roundoff


def pair_indices(R: int, layout: RopeLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices `[R/2]` of the first and the second entry of each rotated pair."""
    entries = torch.arange(R, device=device)
    if layout == "half":
        return entries[: R // 2], entries[R // 2 :]
    return entries[0::2], entries[1::2]


def logit_bound(
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    scale: float | None = None,
    rope: Rope | None = None,
    rotary_dim: int | None = None,
    layout: RopeLayout | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The largest |logit| that QK-norm with these gains allows, per query head, from weights alone.

    Without `rope` and `rotary_dim` nothing is known of the rotation, and the bound
    `scale * D * max|g_q| * max|g_k|` holds for any. With `rotary_dim` and `layout` the maximum is
    taken inside each rotated pair; `rotary_dim=0` says that nothing is rotated. With `rope` it is
    the exact supremum over all pairs of positions in the table.

    Args:
        q_gain: `[Hq, D]`, effective gain (for a stored `1 + w`, pass `1 + w`).
        k_gain: `[Hk, D]`.
        scale: of the logits; 1/sqrt(D) if None.
        rope: the table of rotations.
        rotary_dim: R, 0 <= R <= D, if no table is given; its rotations do not stretch.
        layout: pairing of the entries, needed with `rotary_dim` > 0.
        dtype: what q and k are rounded to; fp32 if None, fp64 for fp64 gains. The bound covers this
            rounding and that of the arithmetic.

    Returns:
        `[Hq]`, fp32 (fp64 for fp64 gains).

    Raises:
        ValueError: gains, table or widths do not fit.
    """
    shapes = tuple(q_gain.shape), tuple(k_gain.shape)
    if not all(len(s) == 2 and min(s) > 0 for s in shapes) or (
        shapes[0][1] != shapes[1][1] or shapes[0][0] % shapes[1][0]
    ):
        raise ValueError(
            f"gains must be [Hq, D] and [Hk, D] with Hq a multiple of Hk; got {list(q_gain.shape)} "
            f"and {list(k_gain.shape)}"
        )
    (Hq, D), Hk = shapes[0], shapes[1][0]
    scale = D**-0.5 if scale is None else scale
    wide = torch.promote_types(torch.promote_types(q_gain.dtype, k_gain.dtype), torch.float32)
    a = q_gain.detach().to(wide).abs()
    b = k_gain.detach().to(wide).abs().repeat_interleave(Hq // Hk, dim=0)
    dtype = wide if dtype is None else dtype
    factor = abs(scale) * D * ROUNDING.get(dtype, 1.0) * arithmetic_rounding(D, dtype)

    if rope is not None:
        R, layout = rope.width, rope.layout
    elif rotary_dim is None:
        return factor * a.amax(-1) * b.amax(-1)
    else:
        R = rotary_dim
    if not 0 <= R <= D or R % 2 or (R > 0 and layout is None):
        raise ValueError(
            f"rotary_dim must be even, 0 to D={D}, with a layout if it is not 0; got {R}, {layout}"
        )
    largest = (a * b)[:, R:].amax(-1) if R < D else a.new_zeros(Hq)
    if R > 0 and layout is not None:
        first, second = pair_indices(R, layout, a.device)
        a1, a2, b1, b2 = a[:, first], a[:, second], b[:, first], b[:, second]
        if rope is None:
            pair = torch.maximum(a1, a2) * torch.maximum(b1, b2)
        else:
            pair = _pair_supremum(a1, a2, b1, b2, rope)
        largest = torch.maximum(largest, pair.amax(-1))
    return factor * largest


def _pair_supremum(a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor, rope: Rope) -> Tensor:
    """`[Hq, R/2]`: max over relative angles of the top singular value of diag(a) R(x) diag(b).

    Its square is (F + sqrt(F^2 - 4 det^2)) / 2 with det = a1 a2 b1 b2 and the squared Frobenius norm
    F = cos^2(x) (a1^2 b1^2 + a2^2 b2^2) + sin^2(x) (a1^2 b2^2 + a2^2 b1^2): it grows with F, which
    is linear in cos^2(x), so only the extremes of cos^2 over the table matter. cos^2 = 1 occurs
    (a token and itself). Where the table also stretches (YaRN), both sides are stretched.
    """
    stretch = (rope.cos.double().square() + rope.sin.double().square()).flatten(0, -2).amax(0)
    lowest = _lowest_cos_square(rope).to(a1.dtype)
    aligned = (a1 * b1).square() + (a2 * b2).square()
    crossed = (a1 * b2).square() + (a2 * b1).square()
    frobenius = torch.maximum(aligned, lowest * aligned + (1 - lowest) * crossed)
    det = a1 * a2 * b1 * b2
    root = (frobenius.square() - 4 * det.square()).clamp(min=0).sqrt()
    return ((frobenius + root) / 2).sqrt() * stretch.to(a1.dtype)


def _lowest_cos_square(rope: Rope) -> Tensor:
    """`[R/2]`: min of cos^2(angle_i - angle_j) over the positions i, j of the table.

    cos^2 has period pi and falls to 0 at pi/2, so for each angle the best partners are the two
    sorted neighbours of angle + pi/2 modulo pi.
    """
    angle = torch.atan2(rope.sin.double(), rope.cos.double()).remainder(torch.pi)
    if angle.dim() == 2:
        angle = angle[None]
    angle = angle.transpose(1, 2).contiguous().sort(-1).values  # [B, R/2, T]
    target = (angle + torch.pi / 2).remainder(torch.pi)
    T = angle.shape[-1]
    after = torch.searchsorted(angle, target)
    near = torch.stack([angle.gather(-1, (after + step) % T) for step in (-1, 0)])
    return (near - angle).cos().square().amin((0, 1, 3))

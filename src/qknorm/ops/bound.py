"""The largest logit that the gains of QK-norm allow.

Before the gain a normalised vector u has |u|^2 <= D. A logit is scale * u_q^T diag(g_q) R diag(g_k) u_k,
where R rotates pairs of entries, so it is at most scale * D times the largest singular value of
diag(g_q) R diag(g_k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qknorm.spec import Rope, RopeLayout, compute_dtype

# Factors for rounding to half precision. Three roundings can enlarge a logit: those of q_hat, of k_hat
# and of a stored gain. Half an ulp is at most 2^-8 of the value in bf16 and 2^-11 in fp16.
ROUNDING = {torch.bfloat16: (1 + 2.0**-8) ** 3, torch.float16: (1 + 2.0**-11) ** 3}


def arithmetic_rounding(D: int, dtype: torch.dtype) -> float:
    """Return the factor above 1 by which the arithmetic of one logit may carry it past the bound.

    The dot product and the two sums of squares under square roots err by at most 2 D roundoffs together
    if they add their terms one after the other. Every backend adds at least eight partial sums in
    parallel, which leaves D / 4 roundoffs. The largest error measured over all backends was D / 5, for
    equal entries and gains. The factor allows D roundoffs, and 6 more for the steps whose number does
    not depend on D.
    """
    roundoff = torch.finfo(compute_dtype(dtype)).eps / 2
    return 1 + (D + 6) * roundoff


def pair_indices(R: int, layout: RopeLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the first and of the second entry of each rotated pair, `[R/2]` each."""
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
    """Return the largest absolute logit that QK-norm with these gains allows, per query head.

    The bound follows from the weights alone and holds for every input. How tight it is depends on what
    the caller knows about RoPE:

    * With neither `rope` nor `rotary_dim` it holds for any rotation: `scale * D * max|g_q| * max|g_k|`.
    * With `rotary_dim` and `layout` the maxima are taken within each rotated pair. `rotary_dim=0` states
      that nothing is rotated.
    * With `rope` it is the exact supremum over all pairs of positions in the table.

    Args:
        q_gain: `[Hq, D]`, the effective gain. For a gain that is stored as w but means 1 + w, pass 1 +
            w.
        k_gain: `[Hk, D]`, likewise; Hq is a multiple of Hk.
        scale: factor of the logits; 1/sqrt(D) if None.
        rope: the rotary table that is in use.
        rotary_dim: the even rotary width R, 0 <= R <= D, if no table is given. The rotations are then
            taken to keep lengths, which those of YaRN do not.
        layout: the layout of the rotated pairs, needed with `rotary_dim` > 0.
        dtype: the dtype that q and k are rounded to; fp32 if None (fp64 for fp64 gains). The bound
            covers this rounding and the rounding of the arithmetic.

    Returns:
        `[Hq]`, fp32 (fp64 for fp64 gains), without a gradient.

    Raises:
        ValueError: the gains do not fit each other, or the rotary width does not fit D or comes without
            a layout.
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
    """Return the largest singular value of each rotated pair over all positions, `[Hq, R/2]`.

    The matrix is diag(a) R(x) diag(b), where x is the angle between two positions. The square of its
    largest singular value is (F + sqrt(F^2 - 4 det^2)) / 2, with det = a1 a2 b1 b2 and the squared
    Frobenius norm F = cos^2(x) (a1^2 b1^2 + a2^2 b2^2) + sin^2(x) (a1^2 b2^2 + a2^2 b1^2). It grows with
    F, and F is linear in cos^2(x), so only the smallest and the largest cos^2 in the table matter. The
    largest is 1, since a token meets itself. A table that also stretches (YaRN) stretches both q and k.
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
    """Return the minimum of cos^2(angle_i - angle_j) over all positions i and j of the table, `[R/2]`.

    cos^2 has the period pi and its zero at pi/2. So the partner of an angle that gives the minimum is
    one of the two neighbours of angle + pi/2 (modulo pi) in the sorted list of all angles.
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

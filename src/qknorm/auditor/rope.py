"""Read the rotation in A, and whether the gain comes before or after it.

Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qknorm.auditor import thresholds as at
from qknorm.auditor.fit import Fit


def read_rope(matrices: Tensor) -> tuple[str | None, int]:
    """Return the layout and the width R of the rotation in A `[T, H, D, D]`; (None, 0) without one."""
    T, _, D, _ = matrices.shape
    size = torch.diagonal(matrices[0], dim1=-2, dim2=-1).abs()  # [H, D]
    scale = (size[:, :, None] * size[:, None, :]).sqrt().clamp(min=1e-12)
    off = (matrices.abs() / scale).amax((0, 1))
    off = off - torch.diag_embed(torch.diagonal(off))
    turned = off.amax(0) > at.TURNED
    if T < 2 or not bool(turned.any()):
        return None, 0
    partners = off.argmax(0)
    sure = (off.amax(0) > at.SURELY_TURNED).nonzero().flatten()
    distance = int((partners[sure] - sure).abs().mode().values) if len(sure) else D // 2
    last = int(turned.nonzero().max()) + 1
    if distance == 1 and not (D == 2 and len(sure) == 2):
        return "interleaved", last + last % 2
    # The pairs are (i, i + R/2) if all of them turn. In some models a part of a longer half turns.
    count = int(turned.sum())
    return "half", 2 * distance if count > distance else count


def read_order(fits: Iterable[Fit], rope: str | None) -> str | None:
    """Return the order of gain and rotation in q and k, as far as they have a norm.

    A can be divided by the gain from the left or from the right. The order is the one for which a
    rotation is left.
    """
    verdicts = set()
    for fit in fits if rope is not None else ():
        A = fit.matrices[1:]
        g = torch.diagonal(fit.matrices[0], dim1=-2, dim2=-1)  # [H, D]
        if bool((g.abs() < 1e-6).any()):
            continue
        error = {
            "before": not_orthogonal(A / g[None, :, None, :]),
            "after": not_orthogonal(A / g[None, :, :, None]),
        }
        if max(error.values()) < max(at.ORDER, 20 * fit.residual):
            verdicts.add("not identifiable")
        else:
            verdicts.add(min(error, key=lambda name: error[name]))
    ranked = ("after", "before", "not identifiable")
    return next((verdict for verdict in ranked if verdict in verdicts), None)


def not_orthogonal(matrices: Tensor) -> float:
    """Return the largest |entry| of A A' - 1."""
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return float((matrices @ matrices.mT - eye).abs().max())


def not_relative(A: Tensor, C: Tensor) -> float:
    """Return by how much A' C differs between pairs of tokens that have the same distance.

    Args:
        A: the linear maps that follow the norm of q, `[T, H, D, D]`.
        C: the linear maps that follow the norm of k, of the same shape.

    Returns:
        The largest difference, relative to the largest entry of A' C.
    """
    worst = size = 0.0
    for a, c in zip(A.unbind(1), C.unbind(1), strict=True):
        M = torch.einsum("tij,sik->tsjk", a, c)
        size = max(size, float(M.abs().max()))
        if len(a) > 1:
            worst = max(worst, float((M[1:, 1:] - M[:-1, :-1]).abs().max()))
    return worst / size if size else 0.0


# Rotations from one token to the next in an image: within a row, to the next row, from text to image.
MOST_STEPS = 3


def is_on_a_grid(A: Tensor, C: Tensor, low: float) -> bool:
    """Whether positions form the grid of an image and not a line.

    On a grid q and k of a token have the same rotation, and only a few different rotations lead from one
    token to the next: along a row, or to the next row.
    """
    if float((A - C).abs().max()) > low or not_orthogonal(A) > low:
        return False
    steps: list[Tensor] = []
    for step in A[:-1].mT @ A[1:]:
        if not any(float((step - other).abs().max()) <= low for other in steps):
            steps.append(step)
    return len(steps) <= MOST_STEPS

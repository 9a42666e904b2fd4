"""The rotation in A, and on which side of it the gain is.

Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qknorm.auditor import thresholds as at
from qknorm.auditor.fit import Fit


def read_rope(matrices: Tensor) -> tuple[str | None, int]:
    """Layout and width of the rotation in A `[T, H, D, D]`."""
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
    # Pairs (i, i + R/2) where all of them turn; some models let only some of a longer half turn.
    count = int(turned.sum())
    return "half", 2 * distance if count > distance else count


def read_order(fits: Iterable[Fit], rope: str | None) -> str | None:
    """Of gain and rotation on the normed sides: which of the two factorings of A leaves a rotation."""
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
    """How far A A' is from 1."""
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return float((matrices @ matrices.mT - eye).abs().max())


def not_relative(A: Tensor, C: Tensor) -> float:
    """How much of A' C `[T, H, D, D]` differs between pairs of tokens of the same distance."""
    worst = size = 0.0
    for a, c in zip(A.unbind(1), C.unbind(1), strict=True):
        M = torch.einsum("tij,sik->tsjk", a, c)
        size = max(size, float(M.abs().max()))
        if len(a) > 1:
            worst = max(worst, float((M[1:, 1:] - M[:-1, :-1]).abs().max()))
    return worst / size if size else 0.0


MOST_STEPS = 3  # from token to token of an image: within a row, to the next, and from text to an image


def is_on_a_grid(A: Tensor, C: Tensor, low: float) -> bool:
    """Whether tokens lie on the grid of an image, and not on a line: q and k of a token turn alike, and
    from token to token by few different steps, along a row or to the next one."""
    if float((A - C).abs().max()) > low or not_orthogonal(A) > low:
        return False
    steps: list[Tensor] = []
    for step in A[:-1].mT @ A[1:]:
        if not any(float((step - other).abs().max()) <= low for other in steps):
            steps.append(step)
    return len(steps) <= MOST_STEPS

"""Find the norm that explains q or k, and the linear map that follows it.

At every token the entries of a head are `q = A n(y) + b`, where y is the output of the projection, n is
the norm without its gain, and A holds the gain and the rotation. For each possible norm A is found by
least squares. The norm with the smallest residual is the answer.

Shapes: M samples, B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.guard import NotUnderstoodError
from qknorm.auditor.norms import NORMS, Key, normalized, shares
from qknorm.auditor.site import Site

SPREAD = 8.0  # standard deviation of raw entries; an eps in use hardly matters next to such entries
SMALL = 0.25  # standard deviation of raw entries that no clamp of projections reaches
RANK = 1e-9  # a singular value below this share of the largest one counts as 0
CONSECUTIVE = 8  # A is found for this many tokens at the start
TOP = 1 - 1e-6  # an entry at this share of a limit or more is at the limit


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The norm with the smallest residual.

    Attributes:
        key: the norm and the axis of its statistic.
        spread: the standard deviation of the raw entries with which it was found.
        raw: raw entries, `[M, tokens, H, D]`.
        found: the entries of q or k that follow from them, of the same shape.
        matrices: A of the first CONSECUTIVE tokens and of the last one, `[tokens, H, D, D]`.
        residual: of the least-squares problem, relative to `found`.
        limit: the size at which entries of q or k are clamped; None without a clamp.
        raw_limit: the size at which raw entries are clamped; None without a clamp.
        eps: with which the norm was computed.
    """

    key: Key
    spread: float
    raw: Tensor
    found: Tensor
    matrices: Tensor
    residual: float
    limit: float | None
    raw_limit: float | None = None
    eps: float = 0.0

    def with_eps(self, eps: float) -> Fit:
        """Return the norm with this eps added to the mean square, if that has the smaller residual."""
        matrices, residual = _solve(normalized(self.raw, self.key, eps), self.found, self.limit)
        better = replace(self, matrices=matrices, residual=residual, eps=eps)
        return better if residual < self.residual else self


def fit(site: Site, which: str) -> Fit:
    """Find the norm of q or of k.

    Args:
        site: the attention.
        which: "q" or "k".

    Returns:
        The norm with the smallest residual.

    Raises:
        NotUnderstoodError: no norm explains q or k.
    """
    best = _fit(site, which, SPREAD)
    if best is None or best.residual > at.EXACT:
        # A clamp of raw entries acts on large entries only.
        small = _fit(site, which, SMALL)
        is_better = small is not None and (best is None or best.residual > 10 * small.residual)
        if small is not None and is_better and small.residual < at.EXACT_SMALL:
            best = replace(small, raw_limit=_raw_limit(site, which))
    if best is None or best.residual > at.KNOWN:
        raise NotUnderstoodError(
            f"{which} is not the norm of a projection, followed by a gain and a rotation"
        )
    first = torch.diagonal(best.matrices[0], dim1=-2, dim2=-1)  # [H, D]
    mixed = float((best.matrices[0] - torch.diag_embed(first)).abs().max() / first.abs().max())
    if mixed > at.MIXED and best.limit is None:
        raise NotUnderstoodError(f"entries of {which} are rotated or mixed at the first token already")
    return best


def _fit(site: Site, which: str, spread: float) -> Fit | None:
    # Consecutive tokens let distances be compared. At the last token the slowest pair has turned most.
    B, T, H, D = site.raw_shape(which)
    tokens = sorted({*range(min(T, CONSECUTIVE)), T - 1})
    count = math.ceil((1.5 * D + 8) / B)
    raws, multiplied = [], []
    for seed in range(100, 100 + count):
        drawing = drawn((B, T, H, D), seed, spread)
        raws.append(drawing[:, tokens].double())
        multiplied.append(site.multiplied(which, drawing)[:, tokens])
    raw, found = torch.cat(raws), torch.cat(multiplied)
    if not bool(found.isfinite().all()):
        return None
    limit = limit_of(found)
    ends = sorted({0, raw.shape[1] - 1})
    residuals: dict[Key, float] = {}
    for key in (*NORMS, *shares(H)):
        if key not in NORMS and min(residuals.values()) < at.KNOWN:
            break  # a statistic over a part of the heads is rare, and something else fits already
        x = normalized(raw[:, ends], key)
        if bool(x.isfinite().all()):
            residuals[key] = _solve(x, found[:, ends], limit)[1]
    key = min(residuals, key=lambda key: residuals[key])
    matrices, residual = _solve(normalized(raw, key), found, limit)
    return Fit(
        key=key,
        spread=spread,
        raw=raw,
        found=found,
        matrices=matrices,
        residual=residual,
        limit=limit,
    )


def _solve(x: Tensor, y: Tensor, limit: float | None) -> tuple[Tensor, float]:
    """Return A and the relative residual of `y = A x + b` for each token and head, without clamped y."""
    M, T, H, D = x.shape
    x_THMD = torch.cat((x, x.new_ones(M, T, H, 1)), -1).permute(1, 2, 0, 3)
    y_THMD = y.permute(1, 2, 0, 3)
    if limit is None:
        solution = _least_squares(x_THMD, y_THMD)
        error = (x_THMD @ solution - y_THMD).square().sum() / y_THMD.square().sum().clamp(min=1e-30)
        return _sparse(solution[..., :D, :].mT, x), float(error.sqrt())
    free = (y_THMD.abs() < limit * TOP).double()
    # Each entry of y has a weighted problem of its own.
    weighted = x_THMD[:, :, None] * free.mT[..., None]  # [T, H, D, M, D + 1]
    solution = torch.linalg.pinv(weighted, rtol=RANK) @ (y_THMD * free).mT[..., None]
    error = (weighted @ solution - (y_THMD * free).mT[..., None]).square().sum()
    total = (y_THMD * free).square().sum().clamp(min=1e-30)
    return _sparse(solution[..., :D, 0], x), float((error / total).sqrt())


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Solve by normal equations. Random x is far from singular, except in directions of no size that a
    centred norm leaves; there the ridge keeps the solution small."""
    gram = x.mT @ x
    ridge = RANK * torch.diagonal(gram, dim1=-2, dim2=-1).mean(-1)
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge[..., None].expand(gram.shape[:-1])))
    return torch.cholesky_solve(x.mT @ y, factor)


def _sparse(matrices: Tensor, x: Tensor) -> Tensor:
    """Remove from each row of A the constant that leaves most entries at 0, if x is centred: for centred
    x such a constant changes nothing."""
    if float(x.mean(-1).abs().max()) > 1e-9 * float(x.abs().max()):
        return matrices
    return matrices - matrices.median(-1, keepdim=True).values


def limit_of(found: Tensor) -> float | None:
    """Return the largest |entry| if many entries have that size, and None otherwise."""
    size = found.abs()
    top = float(size.max())
    share = float((size >= top * TOP).double().mean())
    return top if share > at.CLAMPED and top > 0 else None


def _raw_limit(site: Site, which: str) -> float:
    """Return the size at which raw entries are clamped: beyond it a growing entry changes nothing."""
    raw = torch.full(site.raw_shape(which), 0.1, dtype=torch.float32, device="cpu")
    last, last_value = None, 0.0
    for value in [0.1 * 1.1**i for i in range(80)]:
        raw[..., 0] = value
        found = site.multiplied(which, raw)[:, 0]
        if last is not None and float((found - last).abs().max()) < 1e-6 * float(found.abs().max()):
            return last_value
        last, last_value = found, value
    return math.inf

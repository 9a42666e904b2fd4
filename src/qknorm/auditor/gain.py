"""Read the gain that follows a norm: its values, its parameters, and which heads share them.

Shapes: B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.fit import TOP, Fit
from qknorm.auditor.norms import normalized
from qknorm.auditor.site import STEP, Site, nudged


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of q or of k.

    Attributes:
        values: the effective gain, `[H, D]`; None without a norm.
        kind: None, "head", "shared", "full" or "scalar"; see `Formula.gain`.
        factor: a constant by which q or k is also multiplied, such as an amplitude of RoPE.
    """

    values: Tensor | None
    kind: str | None
    factor: float


def gain_parameters(site: Site, which: str) -> dict[nn.Parameter, tuple[int, ...]]:
    """Find the parameters on which q or k depends, without those of the projections.

    Args:
        site: the attention.
        which: "q" or "k".

    Returns:
        The parameters, each with the index of the entry that has the largest gradient. Where one
        parameter holds the gains of both q and k, this entry belongs to the one that was chosen.
    """
    with torch.enable_grad():
        attention = site.rerun()
        x = attention.q if which == "q" else attention.k
        if not x.requires_grad:
            return {}
        parameters = [p for p in site.module.parameters() if p.requires_grad and p.is_floating_point()]
        loss = (x * drawn(x.shape, 1).to(x)).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    found = {}
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None and bool(grad.any()):
            place = torch.unravel_index(grad.abs().argmax(), grad.shape)
            found[parameter] = tuple(int(index) for index in place)
    return found


def read_gain(site: Site, which: str, fit: Fit, parameters: dict[nn.Parameter, tuple[int, ...]]) -> Gain:
    """Read the gain of q or of k.

    q depends on a stored gain w as `a (w + o)`, so the derivative by w gives the factor a.

    Args:
        site: the attention.
        which: "q" or "k".
        fit: the norm, and the linear map that follows it.
        parameters: the result of `gain_parameters`.

    Returns:
        The gain.
    """
    first = torch.diagonal(fit.matrices[0], dim1=-2, dim2=-1)  # [H, D]
    if fit.key[0] is None:
        return Gain(values=None, kind=None, factor=float(first.median()))
    H, D = first.shape
    raw = torch.cat([drawn(site.raw_shape(which), seed, fit.spread) for seed in range(5, 9)])
    n = normalized(raw.double(), fit.key, fit.eps)[:, 0]  # [4 B, H, D]

    def first_token() -> Tensor:
        return torch.cat([site.multiplied(which, part)[:, 0] for part in raw.split(site.batch)])

    base = first_token()
    for parameter, entry in parameters.items():
        with nudged(parameter, entry):
            after = first_token()
        slope = (after - base) / STEP / n
        if fit.limit is not None:
            free = torch.maximum(base.abs(), after.abs()) < fit.limit * TOP
            slope = torch.where(free, slope, torch.nan)
        size = slope.abs().nanmean(0).nan_to_num()
        moved = size > at.FELT * float(size.max())
        # A gain changes an entry in proportion to its size; a bias does not.
        chosen = slope[:, moved]
        middle = chosen.nanmedian(0).values
        apart = (chosen - middle).abs().nan_to_num()
        if chosen.numel() == 0 or float(apart.max()) > at.PROPORTIONAL * float(middle.abs().max()):
            continue
        heads, entries = int(moved.any(1).sum()), int(moved.any(0).sum())
        if entries > 1:
            kind = "scalar"
        elif heads > 1 or parameter.numel() == D:
            kind = "shared" if heads == H else "head"
        else:
            kind = "full" if fit.key[1] == "full" else "head"
        factor = float(middle.abs().median())
        return Gain(values=first / factor, kind=kind, factor=factor)
    return Gain(values=first, kind=None, factor=1.0)


def length_or_mean(gain: Gain, place: str | None, *, is_bare: bool) -> tuple[str, Gain]:
    """Decide whether the norm divides by the RMS ("rms") or by the length ("l2"), and return it with its
    gain. It is the length if two of three signs are seen: no parameter (`is_bare`), a clamp in place of
    an eps, and a factor of 1 / sqrt(D)."""
    assert gain.values is not None
    values, factor, unit = gain.values, gain.factor, gain.values.shape[-1] ** -0.5
    if is_bare:
        factor = float(values.mean())
        if float((values / factor - 1).abs().max()) > at.CONSTANT or abs(factor - 1) < at.CONSTANT:
            return "rms", Gain(values=values, kind=gain.kind, factor=1.0)
        values = values / factor
    if is_bare + (place == "clamp") + (abs(factor / unit - 1) < at.CONSTANT) >= 2:
        return "l2", Gain(values=values * unit, kind=gain.kind, factor=factor / unit)
    if is_bare:
        return "rms", Gain(values=values * factor, kind=gain.kind, factor=1.0)
    return "rms", gain

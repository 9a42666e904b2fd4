"""Read the eps of a norm, where it is added, and how large it is next to the mean square.

Shapes: B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qknorm.auditor.draws import drawn
from qknorm.auditor.fit import SMALL, TOP, Fit
from qknorm.auditor.norms import axes_of, by_share, mean_square
from qknorm.auditor.site import Site

LARGE = 256.0  # times SMALL; an eps in use is negligible next to the square of such entries
SCALES = [10.0 ** (-k / 2) for k in range(-3, 29)]  # times SMALL


def read_eps(site: Site, which: str, fit: Fit) -> tuple[float, str]:
    """Read eps and its place from smaller and smaller raw vectors.

    Args:
        site: the attention.
        which: "q" or "k".
        fit: the norm of q or of k.

    Returns:
        eps, which is 0 if it has no visible effect, and "inside", "outside" or "clamp".
    """
    raw = drawn(site.raw_shape(which), 7, SMALL)
    axes = axes_of(fit.key)

    def shares_for(factor: float) -> Tensor:
        return by_share(site.multiplied(which, factor * raw)[:, 0], fit.key)

    most = 1.0 if fit.raw_limit is not None else LARGE
    full, rest = shares_for(most), shares_for(0.0).nan_to_num()
    squares = mean_square(raw.double()[:, 0], fit.key)
    free = torch.ones_like(full) if fit.limit is None else (full.abs() < fit.limit * TOP).double()
    span = ((full - rest) * free).square().sum(axes, keepdim=True)
    felt: dict[str, list[Tensor]] = {"inside": [], "outside": [], "clamp": []}
    for c in SCALES:
        if c > most:
            continue
        ratio = ((shares_for(c) - rest) * (full - rest) * free).sum(axes, keepdim=True) / span
        middle = float(ratio.median())
        if not bool(ratio.isfinite().all()) or middle < 0.01:
            break
        if 0.05 < middle < 0.95:
            s, ratio = c * squares.sqrt(), ratio.clamp(max=1)
            felt["inside"].append(s.square() * (ratio.pow(-2) - 1))
            felt["outside"].append(s * (1 / ratio - 1))
            felt["clamp"].append(s / ratio)
    if not felt["inside"]:
        return 0.0, "inside"
    logs = {place: torch.stack(values).clamp(min=1e-30).log() for place, values in felt.items()}
    place = min(logs, key=lambda name: float(logs[name].std()) if logs[name].numel() > 1 else 0.0)
    value = float(logs[place].median().exp())
    if place == "clamp":  # `F.normalize` clamps the length, not the root mean square
        value *= math.prod(by_share(raw[:, 0], fit.key).shape[axis] for axis in axes) ** 0.5
    return value, place


def share_of_eps(site: Site, which: str, fit: Fit, eps: float) -> float:
    """Return eps as a share of `mean square + eps`, at the median token and head of the inputs."""
    return eps / (eps + float(mean_square(site.raw(which).double(), fit.key).median()))

"""From q.k to the logits of the softmax: scale, soft-cap, clamp, and who sees whom.

Shapes: B batch, H query heads, T tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qknorm.auditor.site import Site
from qknorm.auditor.trace import HIDDEN, Attention

EXACT = 1e-4  # the relative residual of a straight line
FAR = 30.0  # standard deviation of raw entries that drives logits into any cap or clamp in use


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What was read.

    Attributes:
        scale: of q.k as it is multiplied; None if no line, soft-cap or clamp explains the logits.
        softcap: c of `c tanh(s / c)`.
        limit: at which logits are clamped.
        causal: no later token is seen.
        window: how many keys a query sees at most, itself included; None for all.
        sink: whether the softmax has one more column than there are keys.
        has_bias: whether something is added that depends on neither q nor k.
    """

    scale: float | None
    softcap: float | None
    limit: float | None
    causal: bool
    window: int | None
    sink: bool
    has_bias: bool = False


def read_scores(site: Site, *, normed: bool) -> Scores:
    """Ask with random q and k; where no norm bounds the logits, with far larger ones too."""
    spread = 1.0 if normed else 3.0
    attention = _ask(site, spread)
    if attention.logits is None:
        return Scores(scale=None, softcap=None, limit=None, causal=False, window=None, sink=False)
    logits, dots = attention.logits, products(attention)
    visible = logits > HIDDEN
    scale, softcap, limit = _line(dots[visible], logits[visible])
    if not normed and scale is not None and softcap is None and limit is None:
        far = _ask(site, FAR)
        if far.logits is not None and far.logits.shape == logits.shape:
            _, softcap, limit = _line(products(far)[visible], far.logits[visible])
    if scale is None:
        # A softmax does not mind what its rows are shifted by, such as their maximum.
        scale = _shifted_line(dots, logits, visible)
    other = _ask(site, spread, seed=12) if scale is None else None
    if other is not None and other.logits is not None and other.logits.shape == logits.shape:
        # A bias of positions, as of ALiBi, is the same for other q and k.
        scale = _shifted_line(dots - products(other), logits - other.logits, visible)
    causal, window = _mask(visible)
    return Scores(
        scale=scale,
        softcap=softcap,
        limit=limit,
        causal=causal,
        window=window,
        sink=attention.sink,
        has_bias=other is not None and scale is not None,
    )


def _ask(site: Site, spread: float, seed: int = 11) -> Attention:
    generator = torch.Generator().manual_seed(seed)
    raw = [spread * torch.randn(site.raw_shape(side), generator=generator) for side in ("q", "k")]
    with torch.no_grad():
        return site.ask(site.compose(*raw))


def products(attention: Attention) -> Tensor:
    """q.k `[B, H, T, T]` in fp64."""
    q, k = attention.q.double(), attention.k.double()
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def _line(dots: Tensor, logits: Tensor) -> tuple[float | None, float | None, float | None]:
    """Scale, soft-cap, clamp."""

    def slope(chosen: Tensor) -> float:
        x, y = dots[chosen], logits[chosen]
        return float((x * y).sum() / x.square().sum().clamp(min=1e-30))

    def residual(fitted: Tensor, chosen: Tensor) -> float:
        return float((fitted - logits)[chosen].norm() / logits[chosen].norm().clamp(min=1e-30))

    everything = torch.ones_like(dots, dtype=torch.bool)
    scale = slope(everything)
    if residual(scale * dots, everything) < EXACT:
        return scale, None, None
    top = float(logits.abs().max())
    at_top = logits.abs() >= top * (1 - 1e-6)
    if int(at_top.sum()) > max(4, 0.001 * logits.numel()):
        free = ~at_top
        scale = slope(free)
        if residual(scale * dots, free) < EXACT:
            return scale, None, top
    small = dots.abs() <= dots.abs().quantile(0.02) if dots.numel() < 10**6 else dots.abs() < 1.0
    scale = slope(small)
    low, high = top * 1.0001, top * 1e4
    for _ in range(60):  # the residual has one minimum over the cap
        a, b = low * (high / low) ** 0.382, low * (high / low) ** 0.618
        if residual(a * (scale * dots / a).tanh(), everything) < residual(
            b * (scale * dots / b).tanh(), everything
        ):
            high = b
        else:
            low = a
    cap = (low * high) ** 0.5
    if residual(cap * (scale * dots / cap).tanh(), everything) < 20 * EXACT:
        return scale, cap, None
    return None, None, None


def _shifted_line(dots: Tensor, logits: Tensor, visible: Tensor) -> float | None:
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    x, y = (
        torch.where(visible, t - torch.where(visible, t, 0.0).sum(-1, keepdim=True) / count, 0.0)
        for t in (dots, logits)
    )
    scale = float((x * y).sum() / x.square().sum().clamp(min=1e-30))
    return scale if float((scale * x - y).norm() / y.norm().clamp(min=1e-30)) < EXACT else None


def _mask(visible: Tensor) -> tuple[bool, int | None]:
    """Causal, and the window if it is one."""
    T, Tk = visible.shape[-2:]
    if T < 2 or Tk != T:
        return False, None
    seen = visible.any(0).any(0)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    causal = not bool(seen[distance < 0].any())
    width = int(seen[-1].sum())
    inside = (distance.abs() < width) if not causal else (distance >= 0) & (distance < width)
    window = width if width < T and bool((visible == inside).all()) else None
    return causal, window

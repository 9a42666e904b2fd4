"""Read what lies between q.k and the softmax: scale, soft-cap, clamp, and which keys a query sees.

Shapes: B batch, H query heads, T tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.site import Site, nudged
from qknorm.auditor.trace import SeenAttention

FAR = 30.0  # standard deviation of raw entries that drives logits into any cap or clamp in use


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What lies between q.k and the softmax.

    Attributes:
        scale: the factor of q.k; None if no line, soft-cap or clamp explains the logits.
        softcap: c of `c tanh(s / c)`; None without a soft-cap.
        limit: the size at which logits are clamped; None without a clamp.
        causal: whether no query sees a later token; None where no logits were seen.
        window: the largest number of keys that a query sees, its own included; None for all.
        sink: None, "off_by_one" (a logit of 0), "logit", or "token", whose logit depends on the query.
        has_bias: whether something is added to the logits that depends on neither q nor k.
        is_plain: whether causality and window explain the mask, so that nothing else hides keys.
    """

    scale: float | None
    softcap: float | None
    limit: float | None
    causal: bool | None
    window: int | None
    sink: str | None
    has_bias: bool = False
    is_plain: bool = True


def read_scores(site: Site, *, normed: bool) -> Scores:
    """Read them from the logits of random q and k.

    Args:
        site: the attention.
        normed: whether q and k have a norm. Without one, larger q and k are used as well, since a
            soft-cap or a clamp may act on large logits only.

    Returns:
        What lies between q.k and the softmax.
    """
    spread = 1.0 if normed else 3.0
    attention = _rerun(site, spread)
    if attention.logits is None:
        return Scores(scale=None, softcap=None, limit=None, causal=None, window=None, sink=None)
    logits, dots = attention.logits, products(attention)
    visible = logits > at.HIDDEN
    scale, softcap, limit = _line(dots[visible], logits[visible])
    if not normed and scale is not None and softcap is None and limit is None:
        far = _rerun(site, FAR)
        if far.logits is not None and far.logits.shape == logits.shape:
            _, softcap, limit = _line(products(far)[visible], far.logits[visible])
    if scale is None:
        # A constant in a row, such as its maximum, does not change the softmax.
        scale = _shifted_line(dots, logits, visible)
    other = _rerun(site, spread, seed=30) if scale is None else None
    if other is not None and other.logits is not None and other.logits.shape == logits.shape:
        # A bias of positions, such as ALiBi's, stays the same when q and k change.
        scale = _shifted_line(dots - products(other), logits - other.logits, visible)
    causal, window, is_plain = _mask(visible)
    return Scores(
        scale=scale,
        softcap=softcap,
        limit=limit,
        causal=causal,
        window=window,
        sink=_sink(site, spread, attention.sink),
        has_bias=other is not None and scale is not None,
        is_plain=is_plain,
    )


def _rerun(site: Site, spread: float, seed: int = 20) -> SeenAttention:
    raw = [drawn(site.raw_shape(which), seed + n, spread) for n, which in enumerate(("q", "k"))]
    with torch.no_grad():
        return site.rerun(site.compose(*raw))


def _sink(site: Site, spread: float, found: Tensor | None) -> str | None:
    """Return the kind of a sink: its logit depends on q, or on a parameter, or on nothing."""
    if found is None:
        return None

    def moves() -> bool:
        again = _rerun(site, spread, seed=30).sink
        return again is None or bool(((again - found).abs() > at.SINK_MOVES).any())

    if moves():
        return "token"
    if bool((found.abs() > at.SINK_MOVES).any()):
        return "logit"
    # A learnable logit may happen to be 0.
    for parameter in site.module.parameters():
        if parameter.numel() in (1, site.q_heads):
            with nudged(parameter, (0,) * parameter.dim()):
                if moves():
                    return "logit"
    return "off_by_one"


def products(attention: SeenAttention) -> Tensor:
    """Return q.k `[B, H, T, T]` in fp64."""
    q, k = attention.q.double(), attention.k.double()
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def _line(dots: Tensor, logits: Tensor) -> tuple[float | None, float | None, float | None]:
    """Return the scale, the soft-cap and the clamp that lead from q.k to the logits."""

    def slope(chosen: Tensor) -> float:
        x, y = dots[chosen], logits[chosen]
        return float((x * y).sum() / x.square().sum().clamp(min=1e-30))

    def residual(fitted: Tensor, chosen: Tensor) -> float:
        return float((fitted - logits)[chosen].norm() / logits[chosen].norm().clamp(min=1e-30))

    everything = torch.ones_like(dots, dtype=torch.bool)
    scale = slope(everything)
    if residual(scale * dots, everything) < at.LINE:
        return scale, None, None
    top = float(logits.abs().max())
    at_top = logits.abs() >= top * (1 - 1e-6)
    if int(at_top.sum()) > max(4, at.CLAMPED_LOGITS * logits.numel()):
        free = ~at_top
        scale = slope(free)
        if residual(scale * dots, free) < at.LINE:
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
    if residual(cap * (scale * dots / cap).tanh(), everything) < at.SOFTCAP:
        return scale, cap, None
    return None, None, None


def _shifted_line(dots: Tensor, logits: Tensor, visible: Tensor) -> float | None:
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    x, y = (
        torch.where(visible, t - torch.where(visible, t, 0.0).sum(-1, keepdim=True) / count, 0.0)
        for t in (dots, logits)
    )
    scale = float((x * y).sum() / x.square().sum().clamp(min=1e-30))
    return scale if float((scale * x - y).norm() / y.norm().clamp(min=1e-30)) < at.LINE else None


def _mask(visible: Tensor) -> tuple[bool, int | None, bool]:
    """Return whether the mask is causal, its window if it has one, and whether these two explain it."""
    T, Tk = visible.shape[-2:]
    if T < 2 or Tk != T:
        return False, None, bool(visible.all())
    seen = visible.any(0).any(0)
    token = torch.arange(T, device=visible.device)
    distance = token[:, None] - token
    causal = not bool(seen[distance < 0].any())
    width = int(seen[-1].sum())
    inside = (distance.abs() < width) if not causal else (distance >= 0) & (distance < width)
    is_plain = bool((visible == inside).all())
    return causal, width if width < T and is_plain else None, is_plain

"""Read the formula of one attention from how q, k and the logits follow the outputs of its projections.

Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.eps import read_eps, share_of_eps
from qknorm.auditor.fit import Fit, fit
from qknorm.auditor.gain import Gain, gain_parameters, length_or_mean, read_gain
from qknorm.auditor.rope import read_order, read_rope
from qknorm.auditor.scores import Scores, read_scores
from qknorm.auditor.site import Site


@dataclass(frozen=True, kw_only=True)
class Side:
    """The formula of q or of k, which are the two sides of the product q.k.

    Attributes:
        norm: None, "rms", "layer", or "l2", whose result has a root mean square of 1 / sqrt(D).
        fit: the norm without its gain, and the linear map A that follows it.
        gain: the gain that follows the norm.
        parameters: the parameters on which q or k depends, without those of the projections.
        eps: the eps of the norm; None without a norm.
        eps_place: "inside", "outside" or "clamp"; None without a norm.
        eps_share: eps as a share of `mean square + eps` for the inputs of the audit.
    """

    norm: str | None
    fit: Fit
    gain: Gain
    parameters: Iterable[nn.Parameter]
    eps: float | None = None
    eps_place: str | None = None
    eps_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The formula of one attention, as it was read back.

    Attributes:
        q_norm, k_norm: None, "rms", "layer" (the mean is subtracted) or "l2" (unit length).
        statistic: the entries that share one statistic: "head", "full" (all heads), "heads" (the same
            entry of all heads), or "2 heads" and the like (so many at a time); None without a norm.
        gain, k_gain: the shape of the gain of q and of k: None, "head" `[H, D]`, "shared" `[D]`,
            "full" `[H * D]` or "scalar".
        q_gain_values, k_gain_values: the effective gains, `[H, D]`; None without a norm.
        eps: of the norm; None without a norm.
        eps_place: "inside" the root, "outside" it, or "clamp" of what is divided by.
        order: whether the gain comes "before" or "after" RoPE, or "not identifiable"; None without both.
        rope: the layout, "half" or "interleaved"; None without RoPE.
        rotary_width: R; 0 without RoPE.
        v_norm: whether V is normed.
        scale: of the logits, with every constant that multiplies q, k or q.k; None if it was not found.
        softcap, window, causal: as seen at the length of the inputs; causal is None if no mask was
            seen.
        sink: None, "off_by_one", "logit" or "token".
        q_heads, kv_heads, head_dim: Hq, Hk, D.
    """

    q_norm: str | None
    k_norm: str | None
    statistic: str | None
    gain: str | None
    k_gain: str | None
    q_gain_values: Tensor | None
    k_gain_values: Tensor | None
    eps: float | None
    eps_place: str | None
    order: str | None
    rope: str | None
    rotary_width: int
    v_norm: bool
    scale: float | None
    softcap: float | None
    window: int | None
    sink: str | None
    causal: bool | None
    q_heads: int
    kv_heads: int
    head_dim: int


def read_side(site: Site, name: str) -> Side:
    """Read the norm, the gain and eps of q or of k.

    Args:
        site: the attention.
        name: "q" or "k".

    Returns:
        The parts of the formula.

    Raises:
        NotUnderstoodError: no norm explains q or k.
    """
    found = fit(site, name)
    norm = found.key[0]
    parameters = gain_parameters(site, name)
    eps, place, share = None, None, 0.0
    if norm is not None:
        eps, place = read_eps(site, name, found)
        if place == "inside":
            share = share_of_eps(site, name, found, eps)
            found = found.with_eps(eps)
    gain = read_gain(site, name, found, parameters)
    if found.key == ("rms", "head"):
        norm, gain = length_or_mean(gain, place, is_bare=not parameters)
    return Side(
        norm=norm,
        fit=found,
        gain=gain,
        parameters=parameters,
        eps=eps,
        eps_place=place,
        eps_share=share,
    )


def order_with_uneven_gains(site: Site, sides: dict[str, Side], rope: str | None) -> str | None:
    """Read the order of gain and RoPE with random gains, since equal gains would not show it.

    The gains are restored to the bit afterwards.
    """
    parameters = {p for side in sides.values() for p in side.parameters}
    before = {p: p.detach().clone() for p in parameters}
    with torch.no_grad():
        try:
            for p in parameters:
                p.add_(drawn(p.shape, 40, 0.3).abs().to(p))
            fits = [fit(site, name) for name, side in sides.items() if side.norm is not None]
        finally:
            for p, value in before.items():
                p.copy_(value)
    return read_order(fits, rope)


def read(site: Site) -> tuple[Formula, dict[str, Side], Scores]:
    """Read the formula of one attention, and return it with its two sides and its scores.

    Raises NotUnderstoodError if no formula fits.
    """
    sides = {name: read_side(site, name) for name in ("q", "k")}
    q, k = sides["q"], sides["k"]
    scores = read_scores(site, normed=q.norm is not None and k.norm is not None)
    normed = q if q.norm is not None else k
    rope, width = read_rope(q.fit.matrices)
    fits = [side.fit for side in (q, k) if side.norm is not None]
    formula = Formula(
        q_norm=q.norm,
        k_norm=k.norm,
        statistic=normed.fit.key[1],
        gain=q.gain.kind,
        k_gain=k.gain.kind,
        q_gain_values=q.gain.values,
        k_gain_values=k.gain.values,
        eps=normed.eps,
        eps_place=normed.eps_place,
        order=read_order(fits, rope),
        rope=rope,
        rotary_width=width,
        v_norm=_is_v_normed(site),
        scale=None if scores.scale is None else scores.scale * q.gain.factor * k.gain.factor,
        softcap=scores.softcap,
        window=scores.window,
        sink=scores.sink,
        causal=scores.causal,
        q_heads=site.q_heads,
        kv_heads=site.kv_heads,
        head_dim=site.head_dim,
    )
    return formula, sides, scores


def _is_v_normed(site: Site) -> bool:
    """Whether V stays the same when the outputs of the projections are 4 times as large."""
    small, large = (site.rerun({i: f * y for i, y in site.outputs.items()}).v for f in (0.05, 0.2))
    assert small is not None
    assert large is not None
    before, after = small.detach().double().norm(), large.detach().double().norm()
    return bool(after < at.GROWN * before)

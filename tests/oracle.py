"""Attention in float64 as DESIGN defines it, and every invisible mistake that a test must see.

Shares no code with `qknorm.ops`: each rule is written out again, visibility pair by pair.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk heads, G = Hq / Hk, D head width, Dv value
width, R rotary width. A tensor `x_BHTD` has the axes of its suffix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qknorm.spec import Mask, Rope, SinkToken

# Faults seen in float64. Each names what a careless implementation does.
FAULTS = (
    # Norm.
    "norm_after_rope",
    "v_normed",
    "statistic_over_all_heads",
    "q_gain_missing",
    "k_gain_missing",
    "gains_swapped",
    "gain_shared_by_heads",
    "eps_in_the_sum",
    "eps_outside_the_root",
    "statistic_in_bf16",
    "norm_gradient_detached",
    "k_gain_gradient_without_group_sum",
    "v_gradient_without_group_sum",
    "only_q_normed",
    # Scale.
    "scale_twice",
    "scale_missing",
    # Mask.
    "window_one_key_too_many",
    "window_one_key_too_few",
    "window_one_sided",
    "causal_top_left",
    "own_token_hidden",
    "document_leak",
    "document_ids_top_left",
    "negative_document_visible",
    "key_padding_ignored",
    "padded_query_sees_nothing",
    "empty_row_uniform",
    "empty_row_nan",
    # Sink.
    "sink_scaled",
    "sink_twice",
    "sink_outside_running_max",
    "sink_gradient_missing",
    "sink_gradient_double",
    "sink_of_another_head",
    "sink_key_rotated",
    "sink_key_not_normed",
    "sink_value_missing",
    "sink_value_gradient_missing",
    "sink_key_gradient_missing",
    # Statistics.
    "sink_is_a_key_in_entropy",
    "sink_in_max_logit",
    "lse_without_sink",
    "sink_mass_over_all_rows",
    "max_of_absolute_logit",
    "max_before_scale",
    "max_over_hidden_keys",
    "max_over_padded_queries",
    "entropy_in_bits",
    "entropy_over_padded_rows",
    "entropy_over_empty_rows",
    "ratio_over_single_key_rows",
    "ratio_by_ln_of_all_keys",
    "ratio_of_means",
    # Grouped heads.
    "heads_interleaved",
    # RoPE.
    "rope_wrong_layout",
    "rope_on_whole_head",
    "rope_top_left",
    "rope_key_backwards",
    "rope_first_row_for_all",
    "rope_not_on_query",
)
# Faults of rounding: float64 has none to get wrong, so only a low precision run can show them.
ROUNDING_FAULTS = (
    "rounded_before_rope",
    "rounded_before_gain",
    "gain_rounded",
    "never_rounded",
    "logits_rounded",
)


class _Round(torch.autograd.Function):
    """Round to a dtype and back; the gradient passes straight through, rounded too if asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, gradient: bool) -> Tensor:
        ctx.dtype = dtype if gradient else None
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return (g if ctx.dtype is None else g.to(ctx.dtype).to(g.dtype)), None, None


def rounded(x: Tensor, dtype: torch.dtype | None, *, gradient: bool = False) -> Tensor:
    return x if dtype is None else _Round.apply(x, dtype, gradient)


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.to(ctx.dtype).to(g.dtype), None


def visibility(mask: Mask, B: int, Tq: int, Tk: int, fault: str | None = None) -> Tensor:
    """Bool `[B, Tq, Tk]`, one pair at a time by rule 4: query i is token i + Tk - Tq."""
    b = torch.arange(B)[:, None, None]
    i = torch.arange(Tq)[None, :, None]
    j = torch.arange(Tk)[None, None, :]
    token = i + (Tk - Tq)
    visible = torch.ones(B, Tq, Tk, dtype=torch.bool)
    if mask.causal:
        edge = i if fault == "causal_top_left" else token
        visible &= j < edge if fault == "own_token_hidden" else j <= edge
    if mask.window is not None:
        # W keys, the query's own included: distances 0 .. W-1.
        width = mask.window
        width += {"window_one_key_too_many": 1, "window_one_key_too_few": -1}.get(fault or "", 0)
        visible &= token - j < width
        if fault != "window_one_sided":
            visible &= j - token < width
    if mask.documents is not None and fault != "document_leak":
        own = i if fault == "document_ids_top_left" else token
        visible &= mask.documents[b, own] == mask.documents[b, j]
    if mask.documents is not None and fault != "negative_document_visible":
        visible &= mask.documents[b, j] >= 0
    if mask.key_padding is not None and fault != "key_padding_ignored":
        visible &= mask.key_padding[b, j]
    if fault == "padded_query_sees_nothing":
        visible &= own_token_is_real(mask, B, Tq, Tk)[:, :, None]
    return visible


def own_token_is_real(mask: Mask, B: int, Tq: int, Tk: int) -> Tensor:
    """Bool `[B, Tq]`: the query's own token is no padding. Before the first key it has no token."""
    real = torch.ones(B, Tq, dtype=torch.bool)
    for b in range(B):
        for i in range(Tq):
            token = i + Tk - Tq
            if token < 0:
                continue
            if mask.documents is not None and mask.documents[b, token] < 0:
                real[b, i] = False
            if mask.key_padding is not None and not mask.key_padding[b, token]:
                real[b, i] = False
    return real


def _norm(
    x_BHTD: Tensor, gain_HD: Tensor | None, eps: float, fault: str | None, low: torch.dtype | None
) -> Tensor:
    """Rule 1. Without a gain there is no norm."""
    if gain_HD is None:
        return x_BHTD
    H, D = x_BHTD.shape[1], x_BHTD.shape[3]
    mean_square = (x_BHTD * x_BHTD).sum(-1, keepdim=True) / D
    if fault == "statistic_over_all_heads":
        mean_square = mean_square.mean(1, keepdim=True)
    if fault == "statistic_in_bf16":
        mean_square = rounded(mean_square, torch.bfloat16)
    if fault == "norm_gradient_detached":
        mean_square = mean_square.detach()
    if fault == "eps_in_the_sum":
        inverse = (mean_square + eps / D) ** -0.5
    elif fault == "eps_outside_the_root":
        inverse = 1 / (mean_square**0.5 + eps)
    else:
        inverse = (mean_square + eps) ** -0.5
    x_hat = x_BHTD * inverse
    if fault == "rounded_before_gain":
        x_hat = rounded(x_hat, low)
    if fault == "gain_rounded":
        gain_HD = rounded(gain_HD, low)
    if fault == "gain_shared_by_heads":
        gain_HD = gain_HD[:1].expand(H, D)
    return x_hat * gain_HD.reshape(1, H, 1, D)


def _rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rule 2: pairs (i, i + R/2) or (2i, 2i + 1) of the first R entries turn by their angle."""
    half = cos.shape[-1]
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    entries = x_BHTD.unbind(-1)
    pieces: list[Tensor] = list(entries)
    for p in range(half):
        first, second = (p, p + half) if layout == "half" else (2 * p, 2 * p + 1)
        a, b = entries[first], entries[second]
        pieces[first] = a * cos[..., p] - b * sin[..., p]
        pieces[second] = a * sin[..., p] + b * cos[..., p]
    return torch.stack(pieces, -1)


def table_of(
    rope: Rope, T: int, side: str, arith: torch.dtype, D: int, fault: str | None = None
) -> tuple[Tensor, Tensor, str]:
    """cos, sin of `T` tokens (the last ones) and the layout."""
    cos, sin, layout = rope.cos.to(arith), rope.sin.to(arith), rope.layout
    start = 0 if fault == "rope_top_left" else cos.shape[-2] - T
    cos, sin = cos[..., start : start + T, :], sin[..., start : start + T, :]
    if fault == "rope_wrong_layout":
        layout = "interleaved" if layout == "half" else "half"
    if fault == "rope_on_whole_head":
        repeats = math.ceil(D / 2 / cos.shape[-1])
        cos, sin = (torch.cat([x] * repeats, -1)[..., : D // 2] for x in (cos, sin))
    if fault == "rope_first_row_for_all" and cos.dim() == 3:
        cos, sin = cos[0], sin[0]
    if fault == "rope_key_backwards" and side == "k":
        sin = -sin
    if fault == "rope_not_on_query" and side == "q":
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    return cos, sin, layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    mask: Mask = Mask(causal=True),
    sink: Tensor | str | SinkToken | None = None,
    scale: float | None = None,
    stats: bool | str = False,
    round_to: torch.dtype | None = None,
    arith: torch.dtype = torch.float64,
    storage: torch.dtype | None = None,
    fault: str | None = None,
    trace: dict[str, Any] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """`qknorm.attention` from its definition; out in `arith`, and the statistics as a dict.

    Args:
        stats: accepted for the common signature; statistics are always returned, rows included.
        round_to: round q_hat and k_hat to this dtype, the one rounding of rule 2.
        arith: dtype of all arithmetic.
        storage: also round what any kernel must store in its own dtype (probabilities, out and
            their gradients): a model of an honest low precision run, for error budgets.
        fault: one of FAULTS or ROUNDING_FAULTS.
        trace: filled with intermediate values.
    """
    if fault is not None and fault not in FAULTS + ROUNDING_FAULTS:
        raise KeyError(fault)
    q, k, v = q.to(arith), k.to(arith), v.to(arith)
    (B, Hq, Tq, D), (_, Hk, Tk, _) = q.shape, k.shape
    G = Hq // Hk
    scale = D**-0.5 if scale is None else scale
    group = torch.arange(Hq) % Hk if fault == "heads_interleaved" else torch.arange(Hq) // G
    gq, gk = (None if g is None else g.to(arith) for g in (q_gain, k_gain))
    if fault == "gains_swapped" and Hq == Hk:
        gq, gk = gk, gq
    if fault == "q_gain_missing" and gq is not None:
        gq = torch.ones_like(gq) + 0 * gq
    if fault == "k_gain_missing" and gk is not None:
        gk = torch.ones_like(gk) + 0 * gk
    if fault == "only_q_normed":
        gk = None

    def hat(x: Tensor, gain: Tensor | None, side: str, turn: bool = True) -> Tensor:
        table = None
        if rope is not None and turn:
            table = table_of(rope, x.shape[2], side, arith, D, fault)
        if fault == "norm_after_rope" and table is not None:
            x = _norm(_rotate(x, *table), gain, eps, fault, round_to)
        else:
            x = _norm(x, gain, eps, fault, round_to)
            if fault == "rounded_before_rope":
                x = rounded(x, round_to)
            if table is not None:
                x = _rotate(x, *table)
        if fault == "never_rounded":
            return x
        return rounded(x, round_to, gradient=storage is not None)

    q_hat, k_hat = hat(q, gq, "q"), hat(k, gk, "k")
    k_full = k_hat[:, group]
    if fault == "k_gain_gradient_without_group_sum" and gk is not None:
        leads = (torch.arange(Hq) % G == 0)[None, :, None, None]
        k_full = torch.where(leads, k_full, hat(k, gk.detach(), "k")[:, group])
    if fault == "v_normed":
        v = v * (v.square().mean(-1, keepdim=True) + eps) ** -0.5
    v_full = v[:, group]
    if fault == "v_gradient_without_group_sum":
        v_full = torch.where((torch.arange(Hq) % G == 0)[:, None, None], v_full, v_full.detach())

    raw = q_hat @ k_full.mT
    s = raw * (scale * scale if fault == "scale_twice" else scale)
    if fault == "scale_missing":
        s = raw
    if fault == "logits_rounded":
        s = rounded(s, round_to)
    if storage is not None:
        s = _RoundGradient.apply(s, storage)
    visible = visibility(mask, B, Tq, Tk, fault)[:, None].expand(B, Hq, Tq, Tk)
    sees = visible.any(-1)

    # The sink: its logit [B, Hq, Tq] and its value [Hq, Dv].
    sink_logit, sink_value = None, None
    if isinstance(sink, SinkToken):
        key = sink.key.to(arith)[None, :, None].expand(B, Hk, 1, D)
        turn = fault == "sink_key_rotated"
        token = hat(key, None if fault == "sink_key_not_normed" else gk, "k", turn)
        sink_q = q_hat if turn else hat(q, gq, "q", False)
        sink_logit = scale * (sink_q * token[:, group]).sum(-1)
        sink_value = sink.value.to(arith)[group]
        if fault == "sink_of_another_head":
            sink_logit, sink_value = sink_logit.roll(1, 1), sink_value.roll(1, 0)
        if fault == "sink_key_gradient_missing":
            sink_logit = scale * (sink_q * token.detach()[:, group]).sum(-1)
        if fault == "sink_value_gradient_missing":
            sink_value = sink_value.detach()
        if fault == "sink_value_missing":
            sink_value = None
    elif isinstance(sink, Tensor):
        per_head = sink.to(arith)
        if fault == "sink_of_another_head":
            per_head = per_head.roll(1)
        sink_logit = per_head[None, :, None].expand(B, Hq, Tq)
    elif sink == "off_by_one":
        sink_logit = torch.zeros(B, Hq, Tq, dtype=arith)
    if sink_logit is not None:
        if fault == "sink_scaled":
            sink_logit = scale * sink_logit
        if fault == "sink_gradient_missing":
            sink_logit = sink_logit.detach()
        if fault == "sink_gradient_double":
            sink_logit = 2 * sink_logit - sink_logit.detach()

    # Softmax over the visible keys and the sink, by the shifted form.
    floor = torch.where(visible, s, -torch.inf).amax(-1).detach()
    if sink_logit is not None and fault != "sink_outside_running_max":
        floor = torch.maximum(floor, sink_logit.detach())
    floor = torch.where(floor == -torch.inf, 0.0, floor)
    shifted = torch.where(visible, s - floor[..., None], 0.0)
    weight = torch.where(visible, shifted.exp(), 0.0)
    total = weight.sum(-1)
    sink_weight = None
    if sink_logit is not None:
        below = sink_logit - floor
        if fault == "sink_outside_running_max":
            below = below.clamp(max=math.log(torch.finfo(torch.float16).max))
        sink_weight = below.exp()
        total = total + sink_weight * (2 if fault == "sink_twice" else 1)
    empty = total == 0
    safe_total = torch.where(empty, 1.0, total)
    p = weight / safe_total[..., None]
    if fault == "empty_row_uniform":
        p = torch.where(sees[..., None], p, 1.0 / Tk)
    if fault == "empty_row_nan":
        p = torch.where(sees[..., None], p, torch.nan)
    out = rounded(p, storage, gradient=True) @ v_full
    p_sink = None
    if sink_weight is not None:
        p_sink = sink_weight / safe_total
        if sink_value is not None:
            out = out + p_sink[..., None] * sink_value[None, :, None]
    out = rounded(out, storage)
    if trace is not None:
        trace.update(q_hat=q_hat, k_full=k_full, v_full=v_full, p=p, p_sink=p_sink, visible=visible)
        trace.update(group=group, out=out, sink_logit=sink_logit, sink_value=sink_value, s=s)
        if isinstance(sink, SinkToken):
            trace.update(sink_q=sink_q, token=token)
    with torch.no_grad():
        real = own_token_is_real(mask, B, Tq, Tk)
        found = _statistics(s, raw, visible, real, sink_logit, fault)
    return out, found


def _statistics(
    s_BHTT: Tensor,
    raw_BHTT: Tensor,
    visible: Tensor,
    real_BT: Tensor,
    sink_logit_BHT: Tensor | None,
    fault: str | None,
) -> dict[str, Any]:
    """Rule 6, over rows of real queries that see a key."""
    s = torch.where(visible, s_BHTT, -torch.inf)
    keys = visible.sum(-1)
    sees = keys > 0
    row_max = s.amax(-1)
    key_lse = torch.where(sees, torch.where(visible, s, -torch.inf).logsumexp(-1), -torch.inf)
    # Subtract the maximum first: s - lse would lose digits where the logits are large.
    top = torch.where(sees, row_max, 0.0)[..., None]
    above = torch.where(visible, s - top, 0.0)
    log_sum = torch.where(visible, above.exp(), 0.0).sum(-1, keepdim=True).clamp(min=1.0).log()
    sink = sink_logit_BHT
    lse = key_lse if sink is None else torch.logaddexp(key_lse, sink)
    log_p = torch.where(visible, above - log_sum, 0.0)
    entropy = -torch.where(visible, log_p.exp() * log_p, 0.0).sum(-1)
    mass = torch.zeros_like(row_max) if sink is None else (sink - lse).exp()

    if fault == "sink_is_a_key_in_entropy" and sink is not None:
        whole = torch.where(visible, s - lse[..., None], 0.0)
        entropy = -torch.where(visible, whole.exp() * whole, 0.0).sum(-1)
        entropy = entropy - mass * (sink - lse)
    if fault == "sink_in_max_logit" and sink is not None:
        row_max = torch.maximum(row_max, sink)
    if fault == "max_of_absolute_logit":
        row_max = torch.where(sees, torch.where(visible, s_BHTT.abs(), 0.0).amax(-1), -torch.inf)
    if fault == "max_before_scale":
        row_max = torch.where(visible, raw_BHTT, -torch.inf).amax(-1)
    if fault == "max_over_hidden_keys":
        row_max = torch.where(sees, s_BHTT.amax(-1), -torch.inf)
    if fault == "entropy_in_bits":
        entropy = entropy / math.log(2)
    if fault == "lse_without_sink":
        lse = key_lse

    counted = real_BT[:, None] & sees
    choice = counted & (keys > 1)
    max_rows, entropy_rows, mass_rows = counted, counted, counted
    if fault == "max_over_padded_queries":
        max_rows = sees
    if fault == "entropy_over_padded_rows":
        entropy_rows = sees
    if fault == "entropy_over_empty_rows":
        entropy_rows = counted | ~sees
    if fault == "sink_mass_over_all_rows":
        mass_rows = torch.ones_like(counted)
    ratio = entropy / keys.clamp(min=2).to(s.dtype).log()
    if fault == "ratio_by_ln_of_all_keys":
        ratio = entropy / math.log(max(2, s.shape[-1]))
    if fault == "ratio_over_single_key_rows":
        choice = counted

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0.0).sum((0, 2)) / where.sum((0, 2))

    entropy_ratio = mean(ratio, choice)
    if fault == "ratio_of_means":
        entropy_ratio = mean(entropy, choice) / mean(keys.clamp(min=1).to(s.dtype).log(), choice)
    return {
        "max_logit": torch.where(max_rows, row_max, -torch.inf).amax((0, 2)),
        "entropy_nats": mean(entropy, entropy_rows),
        "entropy_ratio": entropy_ratio,
        "sink_mass": mean(mass, mass_rows),
        "row_count": counted[:, 0].sum(),
        "ratio_count": choice[:, 0].sum(),
        "rows": {
            "lse": lse,
            "max_logit": row_max,
            "entropy_nats": entropy,
            "visible_keys": keys[:, 0],
            "is_real": real_BT,
        },
        # For tolerances only: not part of the public statistics.
        "mass": mass,
        "counted": counted,
        "choice": choice,
    }

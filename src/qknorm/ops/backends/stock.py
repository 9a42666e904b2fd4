"""PyTorch's own flash kernels, made exact for sinks and linear in memory for every mask.

A kernel that knows only plain and causal attention becomes this operator by two steps:

* A mask that it does not know is cut into blocks of queries, each with the keys it may see and a
  small additive mask. Nothing grows with T x T.
* A sink needs no kernel of its own. Forward: `lse' = logaddexp(lse, sink)` and
  `out' = out * exp(lse - lse')`. Backward: the kernel's backward, called with out' and lse' in
  place of out and lse, computes P = exp(s - lse') and delta = rowsum(dO * out'), which are those of
  the softmax with the sink, so its dq, dk and dv are exact; and
  `d_sink = sum over rows of exp(sink - lse') * (rowsum(dO * sink_value) - delta)`.

The statistics are a pass of their own (`qknorm.logit_stats`): the kernels hide the maximum. So the
output does not depend on whether anybody watches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.backends import flash_blocks
from qknorm.ops.backends.call import Call, refuse_second_derivative
from qknorm.ops.blocks import Span, hides_within, spans
from qknorm.ops.logit_stats import stream_rows
from qknorm.ops.norm_rope import qk_norm_rope
from qknorm.ops.stats import Stats
from qknorm.spec import Mask

# Queries per block under a mask: large enough to keep the kernel busy, small enough for its mask.
ROWS = 256


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """out `[B, Hq, Tq, Dv]` in v's dtype, and the statistics if they are asked for."""
    q_hat, k_hat = qk_norm_rope(
        call.q, call.k, q_gain=call.q_gain, k_gain=call.k_gain, eps=call.eps, rope=call.rope
    )
    # The kernel multiplies hidden scores, which are -inf, by the scale: 0 would make them NaN.
    is_zero = call.case().zero_scale
    out = _StockAttention.apply(
        q_hat * 0.0 if is_zero else q_hat,
        k_hat,
        call.v,
        call.sink_logit,
        call.sink_value,
        call.mask.documents,
        call.mask.key_padding,
        call.mask.causal,
        call.mask.window,
        1.0 if is_zero else call.scale,
    )
    rows = stream_rows(q_hat, k_hat, call.mask, call.scale, call.sink_logit) if call.stats else None
    return out, call.reduce(rows)


_MASK = "Tensor? documents, Tensor? key_padding, bool causal, int? window, float scale"
torch.library.define(
    "qknorm::stock_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? sink_value, {_MASK}) -> (Tensor, Tensor)",
)
torch.library.define(
    "qknorm::stock_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sink, "
    f"Tensor? sink_value, {_MASK}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class _StockAttention(torch.autograd.Function):
    """Ties the forward to the backward. Second derivatives are refused, not wrong."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        sink_value: Tensor | None,
        *mask: Any,
    ) -> Tensor:
        out, lse = torch.ops.qknorm.stock_forward(q, k, v, sink, sink_value, *mask)
        documents, key_padding, *ctx.options = mask
        ctx.save_for_backward(q, k, v, out, lse, sink, sink_value, documents, key_padding)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("stock")
        q, k, v, out, lse, sink, sink_value, documents, key_padding = ctx.saved_tensors
        dq, dk, dv, d_sink, d_sink_value = torch.ops.qknorm.stock_backward(
            d_out, q, k, v, out, lse, sink, sink_value, documents, key_padding, *ctx.options
        )
        return (
            dq,
            dk,
            dv,
            None if sink is None else d_sink,
            None if sink_value is None else d_sink_value,
            *(None,) * 5,
        )


def _pieces(mask: Mask, Tq: int, Tk: int) -> list[tuple[Span, bool, bool]]:
    """Blocks of queries, each with whether the kernel's own causal mask serves and whether a mask is
    needed at all."""
    whole = Span(0, Tq, 0, Tk)
    if not hides_within(mask, Tq, Tk, whole):
        return [(whole, False, False)]
    if mask == Mask(causal=True) and Tq == Tk:
        return [(whole, True, False)]
    return [(span, False, hides_within(mask, Tq, Tk, span)) for span in spans(mask, Tq, Tk, ROWS)]


def _block_bias(
    mask: Mask, q: Tensor, Tk: int, span: Span, masked: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask of a block `[1 or B, 1, rows, keys]`, and which rows see a key."""
    if not masked:
        return None, None
    visible = mask.visible(q.shape[2], Tk, q.device, (span.q_lo, span.q_hi), (span.k_lo, span.k_hi))
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(~visible, -torch.inf)[:, None], visible.any(-1)[:, None]


@torch.library.impl("qknorm::stock_forward", "CompositeExplicitAutograd")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    sink_value: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    mask = Mask(causal, window, documents, key_padding)
    B, Hq, Tq, _ = q.shape
    Tk = k.shape[2]
    wide = spec.compute_dtype(q.dtype)
    out = q.new_zeros(B, Hq, Tq, v.shape[-1])
    lse = torch.full((B, Hq, Tq), -torch.inf, dtype=wide, device=q.device)
    pieces = _pieces(mask, Tq, Tk)
    if min(Tq, Tk) > 0 and pieces[0][0] == Span(0, Tq, 0, Tk) and not pieces[0][2]:
        part, part_lse = flash_blocks.forward(q, k, v, None, pieces[0][1], scale)
        out, lse, pieces = part.contiguous(), part_lse.to(wide).contiguous(), []  # one call, no copy
    for span, causal_kernel, masked in pieces:
        if span.k_lo == span.k_hi or span.q_lo == span.q_hi:
            continue
        bias, sees = _block_bias(mask, q, Tk, span, masked)
        q_rows, keys = slice(span.q_lo, span.q_hi), slice(span.k_lo, span.k_hi)
        part, part_lse = flash_blocks.forward(
            q[:, :, q_rows], k[:, :, keys], v[:, :, keys], bias, causal_kernel, scale
        )
        if sees is not None:
            part = torch.where(sees[..., None], part, 0.0)
            part_lse = torch.where(sees, part_lse, -torch.inf)
        out[:, :, q_rows] = part
        lse[:, :, q_rows] = part_lse
    if sink is not None:
        total = torch.logaddexp(lse, sink)
        kept = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
        mixed = out.to(wide) * kept[..., None]
        if sink_value is not None:
            mixed += torch.exp(sink - total)[..., None] * sink_value.to(wide)[:, None]
        out, lse = mixed.to(q.dtype), total
    return out, lse


@torch.library.impl("qknorm::stock_backward", "CompositeExplicitAutograd")
def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    sink_value: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mask = Mask(causal, window, documents, key_padding)
    Tq, Tk = q.shape[2], k.shape[2]
    wide = spec.compute_dtype(q.dtype)
    # Every score of a row without a key is -inf: any finite lse gives P = 0, -inf would give NaN.
    safe_lse = torch.where(lse == -torch.inf, 0.0, lse)
    pieces = _pieces(mask, Tq, Tk)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    # Partial sums over blocks stay in fp32; one block needs none.
    sum_dtype = q.dtype if len(pieces) == 1 else wide
    dk = torch.zeros(k.shape, dtype=sum_dtype, device=k.device)
    dv = torch.zeros(v.shape, dtype=sum_dtype, device=v.device)
    for span, causal_kernel, masked in pieces:
        if span.k_lo == span.k_hi or span.q_lo == span.q_hi:
            continue
        bias, _ = _block_bias(mask, q, Tk, span, masked)
        q_rows, keys = slice(span.q_lo, span.q_hi), slice(span.k_lo, span.k_hi)
        dq[:, :, q_rows], dk_part, dv_part = flash_blocks.backward(
            d_out[:, :, q_rows],
            q[:, :, q_rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, q_rows],
            safe_lse[:, :, q_rows],
            bias,
            causal_kernel,
            scale,
        )
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    d_sink, d_sink_value = q.new_empty(0), q.new_empty(0)
    if sink is not None:
        d_wide = d_out.to(wide)
        weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sink - safe_lse))
        away = -(d_wide * out.to(wide)).sum(-1)
        if sink_value is not None:
            away = away + (d_wide * sink_value.to(wide)[:, None]).sum(-1)
            d_sink_value = (weight[..., None] * d_wide).sum((0, 2)).to(sink_value.dtype)
        d_sink = (weight * away).sum_to_size(sink.shape)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_sink, d_sink_value


@torch.library.register_fake("qknorm::stock_forward")
def _(q: Tensor, k: Tensor, v: Tensor, sink: Any, sink_value: Any, *mask: Any) -> Any:
    B, Hq, Tq, _ = q.shape
    out = q.new_empty(B, Hq, Tq, v.shape[-1])
    return out, q.new_empty(B, Hq, Tq, dtype=spec.compute_dtype(q.dtype))


@torch.library.register_fake("qknorm::stock_backward")
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    sink_value: Tensor | None,
    *mask: Any,
) -> Any:
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty(0) if sink is None else sink.new_empty(sink.shape),
        q.new_empty(0) if sink_value is None else sink_value.new_empty(sink_value.shape),
    )

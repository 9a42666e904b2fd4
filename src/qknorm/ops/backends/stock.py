"""The `stock` backend: PyTorch's own kernels, extended to sinks and to every mask with linear memory.

The kernels know plain and causal attention only. Two steps extend them:

* For any other mask the queries are cut into blocks. Each block is computed against the keys that it may
  see, with a small additive mask. No buffer of size T x T is made.
* A sink is added after the kernel. In the forward pass `lse' = logaddexp(lse, sink)` and
  `out' = out * exp(lse - lse')`, in fp32 until one rounding at the end. (Rounding out before would lose
  a weak sink: out' would round to the same bits as out, and the gradient would miss the sink.)
  In the backward pass the kernel gets out' and lse' in place of out and lse. It then computes
  `P = exp(s - lse')` and `delta = rowsum(dO * out')`, which belong to the softmax with the sink, so its
  dq, dk and dv are exact. The gradient of the sink is
  `d_sink = sum over rows of exp(sink - lse') * (rowsum(dO * sink_value) - delta)`.

Norm and RoPE come first, in tensor code that autograd differentiates. The statistics are a separate pass
(`qknorm::logit_stats`), since the kernels do not return the maximum. So statistics do not change the
output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.backends import flash_blocks, fused
from qknorm.ops.backends.call import Backend, Call, is_zero, refuses_derivatives
from qknorm.ops.backends.fused import Found, Inputs
from qknorm.ops.blocks import Span, hides_within, spans
from qknorm.ops.logit_stats import rows_of
from qknorm.ops.norm_rope import qk_norm_rope
from qknorm.ops.stats import Stats
from qknorm.spec import Mask

# Queries per block under a mask: enough to keep the kernel busy, few enough to keep the additive mask
# small.
ROWS = 256


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """Run a call. Returns out `[B, Hq, Tq, Dv]`, and `Stats` or None."""
    q_hat, k_hat = qk_norm_rope(
        call.q, call.k, q_gain=call.q_gain, k_gain=call.k_gain, eps=call.eps, rope=call.rope
    )
    inputs = Inputs.of(call)._replace(
        q=q_hat, k=k_hat, q_gain=None, k_gain=None, cos=None, sin=None, layout=None
    )
    return fused.run("stock", inputs, call.stats)


BACKEND = Backend(
    name="stock",
    purpose="PyTorch's own kernels, any device",
    memory="linear in T",
    refuses=lambda case: refuses_derivatives(replace(case, table_has_gradient=False)),
    run=attention,
)


def _pieces(mask: Mask, Tq: int, Tk: int) -> list[tuple[Span, bool, bool]]:
    """Return blocks of queries, each with two flags.

    The first flag says that the kernel's own causal mask is the right one, the second that the block
    needs an additive mask.
    """
    whole = Span(0, Tq, 0, Tk)
    if not hides_within(mask, Tq, Tk, whole):
        return [(whole, False, False)]
    if mask.is_dense and Tq == Tk:
        return [(whole, True, False)]
    return [(span, False, hides_within(mask, Tq, Tk, span)) for span in spans(mask, Tq, Tk, ROWS)]


def _block_bias(
    mask: Mask, q: Tensor, Tk: int, span: Span, masked: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the additive mask of a block and which rows see a key, or None twice if `masked` is False.

    Their shapes are `[1 or B, 1, rows, keys]` and `[1 or B, 1, rows]`.
    """
    if not masked:
        return None, None
    visible = mask.visible(q.shape[2], Tk, q.device, (span.q_lo, span.q_hi), (span.k_lo, span.k_hi))
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(~visible, -torch.inf)[:, None], visible.any(-1)[:, None]


def _scaled(x: Inputs) -> Inputs:
    """Replace a scale of 0 by zero queries, since the kernels would multiply hidden scores -inf by 0."""
    return x._replace(q=x.q * 0.0, scale=1.0) if is_zero(x.scale, x.q.dtype) else x


def _forward(given: Inputs, stats: int) -> Found:
    x = _scaled(given)
    q, k, v, sink, scale, mask = x.q, x.k, x.v, x.sink, x.scale, x.mask
    B, Hq, Tq, _ = q.shape
    Tk = k.shape[2]
    wide = spec.compute_dtype(q.dtype)
    if sink is not None:
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    out = q.new_zeros(B, Hq, Tq, v.shape[-1])
    lse = torch.full((B, Hq, Tq), -torch.inf, dtype=wide, device=q.device)
    pieces = _pieces(mask, Tq, Tk)
    if min(Tq, Tk) > 0 and pieces[0][0] == Span(0, Tq, 0, Tk) and not pieces[0][2]:
        part, part_lse = flash_blocks.forward(q, k, v, None, pieces[0][1], scale)
        # One call covers everything, so its result need not be copied into a buffer.
        out, lse, pieces = part.contiguous(), part_lse.to(wide).contiguous(), []
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
        out, lse = out * kept[..., None], total
        if x.sink_value is not None:
            out += torch.exp(sink - total)[..., None] * x.sink_value.to(wide)[:, None]
    return Found(out.to(given.v.dtype), lse, *_statistics(given, stats))


def _statistics(x: Inputs, stats: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not stats:
        return fused.empty_statistics(x, stats)
    rows = rows_of(x.q, x.k, x.mask, x.scale, x.sink)
    found = Stats.from_rows(rows)
    heads = (found.max_logit, found.entropy_sum, found.ratio_sum, found.sink_sum)
    of_rows, visible = fused.empty_statistics(x, stats)[2:]
    if stats == fused.ROWS:
        of_rows = torch.stack((rows.max_logit, rows.log_sum, rows.entropy_nats))
        visible = rows.visible_keys
    return torch.stack(heads), torch.stack((found.row_count, found.ratio_count)), of_rows, visible


def _fake_lse(x: Inputs) -> Tensor:
    return x.q.new_empty(x.q.shape[:3], dtype=spec.compute_dtype(x.q.dtype))


def _backward(d_out: Tensor, out: Tensor, lse: Tensor, given: Inputs) -> fused.Grads:
    x = _scaled(given)
    q, k, v, sink, scale, mask = x.q, x.k, x.v, x.sink, x.scale, x.mask
    Tq, Tk = q.shape[2], k.shape[2]
    wide = spec.compute_dtype(q.dtype)
    # All scores of a row that sees no key are -inf. Any finite lse gives P = 0, and an lse of -inf gives
    # NaN.
    safe_lse = torch.where(lse == -torch.inf, 0.0, lse)
    pieces = _pieces(mask, Tq, Tk)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    # Sums over several blocks are accumulated in fp32. A single block needs no sum.
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
    d_sink = d_sink_value = None
    if sink is not None:
        d_wide = d_out.to(wide)
        weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sink - safe_lse))
        away = -(d_wide * out.to(wide)).sum(-1)
        if x.sink_value is not None:
            away = away + (d_wide * x.sink_value.to(wide)[:, None]).sum(-1)
            d_sink_value = (weight[..., None] * d_wide).sum((0, 2))
        d_sink = (weight * away).sum_to_size(sink.shape)
    if x is not given:
        dq = dq * 0.0
    return dq, dk, dv, None, None, d_sink, d_sink_value


fused.define("stock", ("CompositeExplicitAutograd",), _forward, _backward, _fake_lse)

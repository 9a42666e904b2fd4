"""The definition: dense attention in fp32 (fp64 for fp64 input), differentiated by autograd.

Every other backend is tested against this file. Memory is T x T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.backends.call import Backend, Call
from qknorm.ops.norm_rope import qk_norm_rope
from qknorm.ops.online_softmax import OnlineSoftmax
from qknorm.ops.products import exact_matmul
from qknorm.ops.stats import Rows, Stats, amax
from qknorm.spec import Mask


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """Run a call. Returns out `[B, Hq, Tq, Dv]`, and `Stats` or None."""
    G = call.q.shape[1] // call.k.shape[1]
    wide = spec.compute_dtype(call.q.dtype)
    q_hat, k_hat = qk_norm_rope(
        call.q, call.k, q_gain=call.q_gain, k_gain=call.k_gain, eps=call.eps, rope=call.rope
    )
    k_hat, v = (x.to(wide).repeat_interleave(G, dim=1) for x in (k_hat, call.v))
    logits = call.logit_scale * exact_matmul(q_hat.to(wide), k_hat.mT)
    sink_value = call.sink_value()
    sink_value = None if sink_value is None else sink_value.to(wide)
    out, rows = attend(logits, v, call.mask, call.sink_logit(), sink_value, stats=bool(call.stats))
    stats = None if rows is None else Stats.from_rows(rows, keep_rows=call.stats == "rows")
    return out.to(call.v.dtype), stats


BACKEND = Backend(
    name="reference",
    purpose="the definition, dense, any device",
    memory="T x T",
    refuses=lambda case: None,
    run=attention,
)


def attend(
    logits: Tensor,
    v: Tensor,
    mask: Mask,
    sink: Tensor | None = None,
    sink_value: Tensor | None = None,
    *,
    stats: bool,
) -> tuple[Tensor, Rows | None]:
    """Compute the masked softmax with a sink, and its product with the values.

    Args:
        logits: `[B, Hq, Tq, Tk]`.
        v: `[B, Hq, Tk, Dv]`.
        mask: which pairs are visible.
        sink: logits of the sink, which broadcast to `[B, Hq, Tq]` and join the denominator once; or
            None.
        sink_value: `[Hq, Dv]`, which enters the output with the probability of the sink; or None.
        stats: whether to return the statistics.

    Returns:
        out `[B, Hq, Tq, Dv]`, and `Rows` or None.
    """
    Tq, Tk = logits.shape[-2:]
    visible = mask.visible(Tq, Tk, logits.device)[:, None]
    hidden_logits = logits.masked_fill(~visible, -torch.inf)
    ceiling = amax(hidden_logits.detach())
    if sink is not None:
        sink = sink.expand(ceiling.shape)
        ceiling = torch.maximum(ceiling, sink.detach())
    # A row that sees no key has a ceiling of -inf. It is replaced before the softmax, since a NaN that
    # is replaced afterwards would still enter the gradients.
    origin = torch.where(ceiling == -torch.inf, 0.0, ceiling)
    weight = (hidden_logits - origin[..., None]).exp()
    total = weight.sum(-1)
    if sink is not None:
        sink_weight = (sink - origin).exp()
        total = total + sink_weight
    total = torch.where(total == 0, 1.0, total)
    out = exact_matmul(weight / total[..., None], v)
    if sink is not None and sink_value is not None:
        out = out + (sink_weight / total)[..., None] * sink_value[:, None]
    rows = _rows(hidden_logits, visible, mask, sink) if stats else None
    return out, rows


@torch.no_grad()
def _rows(hidden_logits: Tensor, visible: Tensor, mask: Mask, sink: Tensor | None) -> Rows:
    """Return the statistics of each row, computed from all keys as one block."""
    Tq, Tk = hidden_logits.shape[-2:]
    softmax = OnlineSoftmax(hidden_logits.new_empty(hidden_logits.shape[:-1]))
    softmax.add(hidden_logits.detach().clone())
    return Rows(
        max_logit=softmax.maximum,
        log_sum=softmax.log_sum,
        entropy_nats=softmax.entropy_nats,
        visible_keys=visible[:, 0].sum(-1),
        is_real=mask.real_queries(Tq, Tk, hidden_logits.device),
        sink_logit=None if sink is None else sink.detach(),
    )

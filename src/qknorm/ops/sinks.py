"""Every kind of sink in one form: a logit that joins the softmax denominator, and perhaps a value.

Shapes: B batch, Tq queries, Hq / Hk query / key heads, D head width, Dv value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.norm_rope import norm_rope
from qknorm.spec import RowSink, Sink, SinkToken


def sink_logits(
    q: Tensor,
    sink: Sink | None,
    *,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    scale: float,
) -> Tensor | None:
    """Return the logits of the sink, `[Hq, 1]` or `[B, Hq, Tq]`, or None without a sink.

    They are in fp32 (fp64 for fp64 input) and differentiable. q is `[B, Hq, Tq, D]` before the norm and
    RoPE.
    """
    if sink is None:
        return None
    if isinstance(sink, SinkToken):
        q_hat = norm_rope(q, q_gain, eps, None)
        token_hat = norm_rope(sink.key[None, :, None], k_gain, eps, None)
        return token_logits(q_hat, token_hat.to(q.dtype), scale)
    wide = spec.compute_dtype(q.dtype)
    if isinstance(sink, RowSink):
        return sink.logit.to(wide)
    if isinstance(sink, Tensor):
        return sink.to(wide)[:, None]
    return torch.zeros(q.shape[1], 1, dtype=wide, device=q.device)


def token_logits(q_hat: Tensor, token_hat: Tensor, scale: float) -> Tensor:
    """Return the logits `[B, Hq, Tq]` of all queries against the key of a sink token.

    q_hat `[B, Hq, Tq, D]` and token_hat `[1, Hk, 1, D]` are normalised but not rotated.
    """
    wide = spec.compute_dtype(q_hat.dtype)
    G = q_hat.shape[1] // token_hat.shape[1]
    return scale * (q_hat.to(wide) * token_hat.to(wide).repeat_interleave(G, dim=1)).sum(-1)


def sink_values(sink: Sink | None, heads: int) -> Tensor | None:
    """Return the value of the sink for each query head, `[Hq, Dv]`, or None if it has no value."""
    if not isinstance(sink, SinkToken | RowSink) or sink.value is None:
        return None
    return sink.value.repeat_interleave(heads // sink.value.shape[0], dim=0)

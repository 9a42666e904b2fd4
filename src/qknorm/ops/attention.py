"""The operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from qknorm import checks
from qknorm.ops.backends import choose
from qknorm.ops.backends.call import Backend, Call
from qknorm.ops.stats import Stats, StatsRequest, check_request
from qknorm.spec import Mask, Rope, Sink


@overload
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
    sink: Sink | None = None,
    scale: float | None = None,
    stats: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
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
    sink: Sink | None = None,
    scale: float | None = None,
    stats: Literal[True, "rows"],
    backend: str = "auto",
) -> tuple[Tensor, Stats]: ...


@overload
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
    sink: Sink | None = None,
    scale: float | None = None,
    stats: StatsRequest = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Stats]: ...


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
    sink: Sink | None = None,
    scale: float | None = None,
    stats: StatsRequest = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Stats]:
    """QK-Norm attention: norm per head, RoPE, masked softmax with a sink, and its statistics.

    `softmax(scale * q_hat k_hat^T) v` with `x_hat = RoPE(RMSNorm(x) * gain)`; norm and RoPE in fp32,
    one rounding to q's dtype, logits accumulated in fp32. V is never normalised. Exact gradients
    for q, k, v, both gains and the sink. Under autocast q, k and v are cast like those of
    `F.scaled_dot_product_attention`.

    Args:
        q: `[B, Hq, Tq, D]`, any strides; fp16, bf16, fp32 or fp64.
        k: `[B, Hk, Tk, D]`; Hq is a multiple of Hk.
        v: `[B, Hk, Tk, Dv]`.
        q_gain: `[Hq, D]`; None leaves q without a norm.
        k_gain: `[Hk, D]`; None leaves k without a norm.
        eps: added to the mean of squares; at least 1e-6 in half precision.
        rope: rotations for all Tk tokens, applied after the norm; queries are the last Tq tokens.
        mask: visible pairs, see `Mask`. A row that sees no key gives 0 (the value of a sink token).
        sink: None, "off_by_one" (a logit of 0), a logit per query head `[Hq]`, a `SinkToken` or a
            `RowSink`; added once to the denominator, not scaled.
        scale: of the logits; 1/sqrt(D) if None.
        stats: also return `Stats`; "rows" keeps the values of each row. Changes no output bit.
        backend: "auto" or a name from `qknorm env`.

    Returns:
        out `[B, Hq, Tq, Dv]` in q's dtype; with `stats`, `(out, Stats)`.

    Raises:
        ValueError: the arguments do not fit together.
        UnsupportedError: the named backend cannot serve the call.

    Source: Henry et al. 2020 (arXiv 2010.04245); Dehghani et al. 2023 (arXiv 2302.05442), sec. 2.
    """
    call = Call(
        q=q,
        k=k,
        v=v,
        q_gain=q_gain,
        k_gain=k_gain,
        eps=eps,
        rope=rope,
        mask=mask,
        sink=sink,
        scale=scale,
        stats=stats,
    )
    return prepare(call, backend)()


def prepare(call: Call, backend: str) -> Callable[[], Tensor | tuple[Tensor, Stats]]:
    """A call, checked and with its backend chosen, to be made later: all refusals happen here.

    The entries of k and v are read when it is made, unless autocast casts k and v here.
    """
    check_request(call.stats)
    device = call.q.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(low) for x in (call.q, call.k, call.v))
        call = replace(call, q=q, k=k, v=v)
    checks.check_attention(
        call.q,
        call.k,
        call.v,
        q_gain=call.q_gain,
        k_gain=call.k_gain,
        eps=call.eps,
        rope=call.rope,
        mask=call.mask,
        sink=call.sink,
    )
    return partial(_run, choose(backend, call.case()), call)


def _run(backend: Backend, call: Call) -> Tensor | tuple[Tensor, Stats]:
    with torch.autocast(call.q.device.type, enabled=False):
        out, found = backend.run(call)
    return out if found is None else (out, found)

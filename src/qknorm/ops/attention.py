"""The operator: `qknorm.attention` checks a call, chooses a backend and runs it."""

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
    """Compute QK-Norm attention and, on request, its statistics.

    q and k are normalised per head and then rotated, `x_hat = RoPE(RMSNorm(x) * gain)`, in fp32 (fp64
    for fp64 input), and rounded once to their dtype. v is never normalised. The output is
    `softmax(scale * q_hat k_hat^T) v` over the visible keys, with logits accumulated in fp32. The
    gradients of q, k, v, both gains and the sink are exact. Autocast casts q, k and v as it casts those
    of `F.scaled_dot_product_attention`.

    Args:
        q: `[B, Hq, Tq, D]`, any strides; fp16, bf16, fp32 or fp64.
        k: `[B, Hk, Tk, D]` in q's dtype; Hq is a multiple of Hk.
        v: `[B, Hk, Tk, Dv]` in q's dtype.
        q_gain: `[Hq, D]`, floating point; None leaves q without a norm.
        k_gain: `[Hk, D]`, floating point; None leaves k without a norm.
        eps: added to the mean of squares; positive, and at least 1e-6 for half-precision input.
        rope: the rotary table of all Tk tokens, applied after the norm. The queries are the last Tq
            tokens.
        mask: which pairs are visible, see `Mask`. A row that sees no key has the output 0, or the value
            of the sink if the sink has one.
        sink: None; "off_by_one", a logit of 0; a tensor `[Hq]` with a logit per query head; a
            `SinkToken`; or a `RowSink`. The sink joins the softmax denominator once and is not scaled,
            except that the logit of a `SinkToken` is a scaled product like any other.
        scale: factor of the logits; 1/sqrt(D) if None.
        stats: True also returns `Stats` per head; "rows" keeps the values of each row in them as well.
            The output has the same bits with and without statistics.
        backend: "auto", or one of the names that `qknorm env` prints.

    Returns:
        out `[B, Hq, Tq, Dv]` in q's dtype (autocast's dtype under autocast). With `stats`, the pair
        `(out, Stats)`.

    Raises:
        ValueError: the arguments do not fit together; the message says which.
        UnsupportedError: the backend that was named does not support the call.

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
    """Check a call, choose its backend, and return a function that runs it.

    Every error about the arguments is raised here, so a caller can act between the check and the run.
    The returned function reads the entries of k and v when it is called, unless autocast has cast them
    here.
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

"""Checks of the arguments of a call. They run before anything is computed.

Each check raises ValueError with one sentence that names the bad value and says what to do. The checks
read shapes, dtypes and devices but no entries of tensors, so they never wait for a device.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk query / key heads, D head width, Dv value width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qknorm.spec import FLOATING, HALF_PRECISION, Mask, Rope, RowSink, Sink, SinkToken

MIN_HALF_EPS = 1e-6


def check_eps(eps: float, dtype: torch.dtype) -> None:
    """Raise ValueError unless eps is positive and, for half-precision input, at least 1e-6."""
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive; got {eps}. 1e-6 is the usual choice.")
    if dtype in HALF_PRECISION and eps < MIN_HALF_EPS:
        raise ValueError(
            f"eps={eps:g} is too small for {dtype} inputs: use at least {MIN_HALF_EPS:g}, or fp32 inputs"
        )


def check_qk(
    q: Tensor,
    k: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    rope: Rope | None,
) -> None:
    """Check that q `[B, Hq, Tq, D]`, k `[B, Hk, Tk, D]`, the gains and the rotary table fit."""
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, H, T, D]; got {list(x.shape)}")
        if x.dtype not in FLOATING:
            raise ValueError(f"{name} must be fp16, bf16, fp32 or fp64; got {x.dtype}")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            "q and k must share dtype and device; got "
            f"{q.dtype} on {q.device} and {k.dtype} on {k.device}"
        )
    (B, Hq, Tq, D), (Bk, Hk, Tk, Dk) = q.shape, k.shape
    if Bk != B or Dk != D:
        raise ValueError(
            f"q and k must share batch and head width; got {list(q.shape)} and {list(k.shape)}"
        )
    if Hk == 0 or Hq % Hk != 0:
        raise ValueError(
            f"{Hq} query heads do not divide among {Hk} key heads: Hq must be a multiple of Hk"
        )
    check_eps(eps, q.dtype)
    for name, gain, heads in (("q_gain", q_gain, Hq), ("k_gain", k_gain, Hk)):
        if gain is None:
            continue
        if tuple(gain.shape) != (heads, D):
            raise ValueError(
                f"{name} must be [heads, D] = [{heads}, {D}]; got {list(gain.shape)}. Expand a shared "
                "gain [D]; other dialects are in qknorm.nn.QKNorm."
            )
        if not gain.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point; got {gain.dtype}")
        _check_device(name, gain, q)
    if rope is not None:
        if rope.width > D:
            raise ValueError(
                f"the rotary table rotates {rope.width} entries but a head has {D}: R must be at most D"
            )
        if rope.cos.shape[-2] != Tk or Tq > Tk:
            raise ValueError(
                f"the rotary table has {rope.cos.shape[-2]} positions for {Tk} keys and {Tq} queries: "
                "it must have one position for each key, and there may not be more queries than keys"
            )
        if rope.cos.dim() == 3 and rope.cos.shape[0] not in (1, B):
            raise ValueError(
                f"the rotary table has a batch of {rope.cos.shape[0]} but q has a batch of {B}: they "
                "must be equal, or the table must have a batch of 1"
            )
        _check_device("the rotary table", rope.cos, q)
        _check_device("the rotary table", rope.sin, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} but q is on {q.device}: move it to {q.device}")


def check_mask(mask: Mask, q: Tensor, Tk: int) -> None:
    """Check that the tensors of a mask fit q `[B, Hq, Tq, D]` and Tk keys."""
    B, _, Tq, _ = q.shape
    for name, x in (("documents", mask.documents), ("key_padding", mask.key_padding)):
        if x is None:
            continue
        if tuple(x.shape) != (B, Tk):
            raise ValueError(f"{name} must be [B, Tk] = [{B}, {Tk}]; got {list(x.shape)}")
        _check_device(name, x, q)
    if mask.documents is not None and Tq > Tk:
        raise ValueError(
            "with documents the queries are the last Tq of the Tk tokens, so Tq must be at most Tk; "
            f"got Tq={Tq} > Tk={Tk}"
        )


def check_sink(sink: Sink | None, q: Tensor, Hk: int, Dv: int | None) -> None:
    """Check that a sink fits q `[B, Hq, Tq, D]`, Hk key heads and value width Dv (None allows any)."""
    B, Hq, Tq, D = q.shape
    if sink is None or (isinstance(sink, str) and sink == "off_by_one"):
        return
    if isinstance(sink, Tensor):
        tensors = [sink]
        if sink.shape != (Hq,):
            raise ValueError(
                f"a sink tensor must hold one logit per query head, [{Hq}]; got {list(sink.shape)}"
            )
    elif isinstance(sink, SinkToken):
        tensors = [sink.key, sink.value]
        Dv = sink.value.shape[-1] if Dv is None else Dv
        if sink.key.shape != (Hk, D) or sink.value.shape != (Hk, Dv):
            raise ValueError(
                f"a SinkToken needs a key [{Hk}, {D}] and a value [{Hk}, {Dv}]; got a sink with "
                f"{list(sink.key.shape)} and {list(sink.value.shape)}"
            )
    elif isinstance(sink, RowSink):
        tensors = [sink.logit] if sink.value is None else [sink.logit, sink.value]
        if sink.logit.shape != (B, Hq, Tq):
            raise ValueError(f"a RowSink needs logits [{B}, {Hq}, {Tq}]; got {list(sink.logit.shape)}")
        if sink.value is not None and sink.value.shape != (Hk, Dv or sink.value.shape[-1]):
            raise ValueError(f"a RowSink needs values [{Hk}, {Dv}]; got {list(sink.value.shape)}")
    else:
        raise ValueError(
            f'sink must be None, "off_by_one", a tensor [Hq], a SinkToken or a RowSink; got {sink!r}'
        )
    for x in tensors:
        if not x.dtype.is_floating_point:
            raise ValueError(f"a sink must be floating point; got {x.dtype}")
        _check_device("the sink", x, q)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    rope: Rope | None,
    mask: Mask,
    sink: Sink | None,
) -> None:
    """Check all arguments of a call of the operator. Raises ValueError if they do not fit together."""
    check_qk(q, k, q_gain, k_gain, eps, rope)
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must be [B, Hk, Tk, Dv] with k's first three axes; got {list(v.shape)} for "
            f"k {list(k.shape)}"
        )
    if v.dtype != q.dtype or v.device != q.device:
        raise ValueError(
            f"v must share q's dtype and device; got {v.dtype} on {v.device} for {q.dtype} on {q.device}"
        )
    check_mask(mask, q, k.shape[2])
    check_sink(sink, q, k.shape[1], v.shape[3])

"""The types `Call`, `Case` (the properties of a call that decide its backend) and `Backend`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qknorm import spec
from qknorm.ops.sinks import sink_logits, sink_values
from qknorm.ops.stats import Stats, StatsRequest
from qknorm.spec import Mask, Rope, RowSink, Sink, SinkToken

SMALLEST_FP32 = 2.0**-149


@dataclass(frozen=True, kw_only=True)
class Case:
    """The properties of a call that a backend may fail to support.

    Whether the call returns statistics is not among them. So asking for statistics never changes the
    backend, and with it the output.

    Attributes:
        device: type of the device, such as "cpu" or "cuda".
        dtype: of q, k and v.
        head_dim: D.
        value_dim: Dv.
        batch: B.
        heads: Hq.
        queries: Tq.
        keys: Tk.
        is_dense: the mask has no window, no documents and no padding.
        is_causal: the mask is causal.
        sink_by_row: the logit of the sink differs by query, as it does for a `SinkToken` and a
            `RowSink`.
        zero_scale: the scale is 0.
        table_has_gradient: cos or sin of the rotary table needs a gradient.
        is_forward_mode: forward-mode derivatives are computed (`torch.func.jvp`).
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    batch: int = 1
    heads: int = 1
    queries: int = 1024
    keys: int = 1024
    is_dense: bool = False
    is_causal: bool = True
    sink_by_row: bool = False
    zero_scale: bool = False
    table_has_gradient: bool = False
    is_forward_mode: bool = False

    @property
    def type_name(self) -> str:
        """The name of the dtype without the prefix "torch."."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of `qknorm.attention`, which documents them."""

    q: Tensor  # [B, Hq, Tq, D]
    k: Tensor  # [B, Hk, Tk, D]
    v: Tensor  # [B, Hk, Tk, Dv]
    q_gain: Tensor | None = None  # [Hq, D]
    k_gain: Tensor | None = None  # [Hk, D]
    eps: float = 1e-6
    rope: Rope | None = None
    mask: Mask
    sink: Sink | None = None
    scale: float | None = None
    stats: StatsRequest = False

    @property
    def logit_scale(self) -> float:
        """The scale of the call, or 1/sqrt(D) if it gives none."""
        return spec.default_scale(self.q.shape[-1]) if self.scale is None else self.scale

    def case(self) -> Case:
        """Return the properties of this call that a backend may fail to support."""
        q, rope = self.q, self.rope
        return Case(
            device=q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            value_dim=self.v.shape[-1],
            batch=q.shape[0],
            heads=q.shape[1],
            queries=q.shape[2],
            keys=self.k.shape[2],
            is_dense=self.mask.is_dense,
            is_causal=self.mask.causal,
            sink_by_row=isinstance(self.sink, SinkToken | RowSink),
            zero_scale=is_zero(self.logit_scale, q.dtype),
            table_has_gradient=rope is not None
            and torch.is_grad_enabled()
            and (rope.cos.requires_grad or rope.sin.requires_grad),
            is_forward_mode=forward_ad._current_level >= 0,
        )

    def sink_logit(self) -> Tensor | None:
        """Return the logits of the sink, see `qknorm.ops.sinks.sink_logits`; None without a sink."""
        return sink_logits(
            self.q,
            self.sink,
            q_gain=self.q_gain,
            k_gain=self.k_gain,
            eps=self.eps,
            scale=self.logit_scale,
        )

    def sink_value(self) -> Tensor | None:
        """Return the value of the sink for each query head, `[Hq, Dv]`; None if it has no value."""
        return sink_values(self.sink, self.q.shape[1])


def is_zero(scale: float, dtype: torch.dtype) -> bool:
    """Whether a scale is 0 in the arithmetic that is used for inputs of this dtype."""
    return scale == 0 or (spec.compute_dtype(dtype) == torch.float32 and abs(scale) < SMALLEST_FP32)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of the operator.

    Attributes:
        name: the name that the argument `backend` takes.
        purpose: one line for `qknorm env`.
        memory: how peak memory grows with T.
        refuses: takes a case and returns a noun phrase for what the backend does not support, such as
            "float64 inputs", or None if it supports the case. Error messages contain the phrase.
        run: the implementation. It returns out `[B, Hq, Tq, Dv]` in v's dtype, and `Stats` or None.
        is_automatic: whether `backend="auto"` may choose the backend for a case that it supports.
    """

    name: str
    purpose: str
    memory: str
    refuses: Callable[[Case], str | None]
    run: Callable[[Call], tuple[Tensor, Stats | None]]
    is_automatic: Callable[[Case], bool] = lambda case: True


def refuses_derivatives(case: Case) -> str | None:
    """Return the kind of derivative that a case needs and a fused backend lacks, or None.

    A backend with its own backward pass computes no gradient of cos and sin and no forward-mode
    derivatives.
    """
    if case.table_has_gradient:
        return "a gradient of cos and sin"
    return "forward-mode differentiation" if case.is_forward_mode else None

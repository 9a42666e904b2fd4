"""One checked call of the operator, what decides who may serve it, and what a backend is."""

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
    """The properties of a call that a backend can fail to support. Whether statistics are wanted is not
    among them: the answer, and with it the output, must not depend on who watches.

    Attributes:
        is_dense: neither window nor documents nor padding.
        sink_by_row: a sink's logit that differs by query, as that of a sink token does.
        table_has_gradient: the gradient of cos or sin is wanted.
        is_forward_mode: derivatives are carried along with the values (`torch.func.jvp`).
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
        """The dtype, as a message names it."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of `qknorm.attention`; what they mean is said there."""

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
        """The scale that was given, or the usual one."""
        return spec.default_scale(self.q.shape[-1]) if self.scale is None else self.scale

    def case(self) -> Case:
        """What a support table needs to know of it."""
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
        """`[Hq, 1]` or `[B, Hq, Tq]` in the compute dtype, differentiable; None without a sink."""
        return sink_logits(
            self.q,
            self.sink,
            q_gain=self.q_gain,
            k_gain=self.k_gain,
            eps=self.eps,
            scale=self.logit_scale,
        )

    def sink_value(self) -> Tensor | None:
        """The value of a sink token per query head `[Hq, Dv]`; None for a sink without one."""
        return sink_values(self.sink, self.q.shape[1])


def is_zero(scale: float, dtype: torch.dtype) -> bool:
    """Whether a scale is 0 in the arithmetic of this dtype."""
    return scale == 0 or (spec.compute_dtype(dtype) == torch.float32 and abs(scale) < SMALLEST_FP32)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of the operator.

    Attributes:
        name: what `backend=` takes.
        purpose: one line for `qknorm env`.
        memory: how peak memory grows.
        refuses: the reason why it cannot serve a case, or None if it can.
        run: the implementation: out `[B, Hq, Tq, Dv]` in v's dtype, and the statistics if they are
            asked for.
        is_automatic: whether `auto` may take it in a case that it can serve.
    """

    name: str
    purpose: str
    memory: str
    refuses: Callable[[Case], str | None]
    run: Callable[[Call], tuple[Tensor, Stats | None]]
    is_automatic: Callable[[Case], bool] = lambda case: True


def refuses_derivatives(case: Case) -> str | None:
    """What no backend with a backward pass of its own can differentiate, or None."""
    if case.table_has_gradient:
        return "a gradient of cos and sin"
    return "forward-mode differentiation" if case.is_forward_mode else None

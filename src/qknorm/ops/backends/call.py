"""One checked call of the operator, as every backend receives it, and what decides who may serve it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qknorm.ops.stats import Rows, Stats, StatsRequest
from qknorm.spec import Mask, Rope

SMALLEST_FP32 = 2.0**-149


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of `qknorm.attention`, checked, with `scale` filled in."""

    q: Tensor  # [B, Hq, Tq, D]
    k: Tensor  # [B, Hk, Tk, D]
    v: Tensor  # [B, Hk, Tk, Dv]
    q_gain: Tensor | None  # [Hq, D]
    k_gain: Tensor | None  # [Hk, D]
    eps: float
    rope: Rope | None
    mask: Mask
    sink_logit: Tensor | None  # [Hq, 1] or [B, Hq, Tq], in the compute dtype
    sink_value: Tensor | None  # [Hq, Dv], the value of a sink token
    scale: float
    stats: StatsRequest

    def reduce(self, rows: Rows | None) -> Stats | None:
        """The statistics that were asked for, from the values of the rows."""
        return None if rows is None else Stats.from_rows(rows, keep_rows=self.stats == "rows")

    def case(self) -> Case:
        """What a support table needs to know of it."""
        return Case(
            device=self.q.device.type,
            dtype=self.q.dtype,
            head_dim=self.q.shape[-1],
            value_dim=self.v.shape[-1],
            batch=self.q.shape[0],
            heads=self.q.shape[1],
            queries=self.q.shape[2],
            keys=self.k.shape[2],
            has_stats=bool(self.stats),
            is_dense=self.mask in (Mask(), Mask(causal=True)),
            is_causal=self.mask.causal,
            sink_by_row=self.sink_logit is not None and self.sink_logit.dim() == 3,
            zero_scale=self.scale == 0
            or (self.q.dtype != torch.float64 and abs(self.scale) < SMALLEST_FP32),
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """The properties of a call that a backend can fail to support."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    batch: int = 1
    heads: int = 1
    queries: int = 1024
    keys: int = 1024
    has_stats: bool = True
    is_dense: bool = False  # neither window nor documents nor padding
    is_causal: bool = True
    sink_by_row: bool = False  # a logit per query: sink tokens
    zero_scale: bool = False

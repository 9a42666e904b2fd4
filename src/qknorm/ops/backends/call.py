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

    def packed(
        self,
        heads: Tensor,
        counts: Tensor,
        top: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
        keys: Tensor,
    ) -> Stats:
        """The statistics of a kernel that reduces to heads itself: heads `[4, Hq]` and counts `[2]` in
        the order of `Stats`; then those of rows, which are read only if "rows" was asked for."""
        rows = None
        if self.stats == "rows":
            sink = self.sink_logit
            rows = Rows(
                max_logit=top,
                log_sum=log_sum,
                entropy_nats=entropy,
                visible_keys=keys,
                is_real=self.mask.real_queries(self.q.shape[2], self.k.shape[2], self.q.device),
                sink_logit=None if sink is None else sink.detach().expand(top.shape),
            )
        return Stats(
            max_logit=heads[0],
            entropy_sum=heads[1],
            ratio_sum=heads[2],
            sink_sum=heads[3],
            row_count=counts[0],
            ratio_count=counts[1],
            rows=rows,
        )

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


def token_ids(
    q: Tensor, k: Tensor, documents: Tensor | None, key_padding: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """int64 ids `[B, Tq]` and `[B, Tk]`: a pair is visible if they are equal and not negative."""
    if documents is None and key_padding is None:
        return None, None
    B, Tq, Tk = q.shape[0], q.shape[2], k.shape[2]
    if documents is None:
        keys, queries = (torch.zeros(B, T, dtype=torch.int64, device=q.device) for T in (Tk, Tq))
    else:
        keys = documents.long().clamp(min=-1)  # in an unsigned type -1 would be a large id
        queries = keys[:, Tk - Tq :].contiguous()
    if key_padding is not None:
        keys = torch.where(key_padding, keys, -1)
    return queries, keys.contiguous()


def refuse_second_derivative(backend: str) -> None:
    """For the backward of a backend: raises RuntimeError under create_graph=True. torch's
    `once_differentiable` looks at d_out alone, and misses that dq depends on q."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the {backend} backend has no second derivative (create_graph=True): use "
            'backend="reference"'
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

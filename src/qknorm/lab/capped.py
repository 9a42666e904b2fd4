"""Attention whose logits are soft-capped or clamped: the older remedies that QK-norm is compared with.

Dense, through the reference: for short contexts of the lab only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qknorm import checks
from qknorm.nn import Attention, AttentionConfig, KVCache
from qknorm.ops.backends import reference
from qknorm.ops.stats import Stats, StatsRequest, check_request
from qknorm.spec import Mask, Rope


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A limit on the logits.

    Attributes:
        kind: "soft": limit * tanh(logit / limit) (Gemma 2); "clamp": a hard clamp, whose gradient
            beyond the limit is zero.
        limit: > 0.
    """

    kind: Literal["soft", "clamp"]
    limit: float

    def __post_init__(self) -> None:
        if self.kind not in ("soft", "clamp") or not self.limit > 0:
            raise ValueError(
                f"a cap is soft or clamp with a positive limit; got {self.kind!r}, {self.limit}"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """The capped logits."""
        if self.kind == "soft":
            return self.limit * torch.tanh(logits / self.limit)
        return logits.clamp(-self.limit, self.limit)


class CappedAttention(Attention):
    """`Attention` without a sink whose logits pass through a cap. Statistics are of capped logits."""

    def __init__(self, config: AttentionConfig, cap: Cap) -> None:
        if config.sink != "none":
            raise ValueError(f"a cap and a sink together are not supported; got sink={config.sink!r}")
        super().__init__(config)
        self.cap = cap

    def logit_bound(self, *args: Any, **kwargs: Any) -> Tensor:
        """The cap, or the bound of the norm if that is lower; arguments as those of the base class."""
        limit = torch.full(
            (self.config.num_heads,), self.cap.limit, dtype=torch.float32, device=self.qkv.weight.device
        )
        bound = super().logit_bound(*args, **kwargs)
        return limit if bound is None else bound.clamp(max=self.cap.limit)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rope: Rope | None,
        mask: Mask,
        cache: KVCache | None,
        stats: StatsRequest,
    ) -> tuple[Tensor, Stats | None]:
        """Norm, RoPE and dense attention with capped logits."""
        q_hat, k_hat = self.norm_rope(q, k, rope)
        # What is refused must not have reached the cache.
        check_request(stats)
        checks.check_mask(mask, q, k.shape[2] + (0 if cache is None else cache.length))
        if cache is None:
            return self._attend_dense(q_hat, k_hat, v, mask, stats)
        with cache.adding(k_hat, v) as (keys, values):
            return self._attend_dense(q_hat, keys, values, mask, stats)

    def _attend_dense(
        self, q_hat: Tensor, k_hat: Tensor, v: Tensor, mask: Mask, stats: StatsRequest
    ) -> tuple[Tensor, Stats | None]:
        c = self.config
        G = c.num_heads // c.kv_heads
        scale = c.width**-0.5 if c.scale is None else c.scale
        with torch.autocast(v.device.type, enabled=False):
            k_wide, v_wide = (x.float().repeat_interleave(G, dim=1) for x in (k_hat, v))
            logits = self.cap(scale * (q_hat.float() @ k_wide.mT))
            out, rows = reference.attend(logits, v_wide, mask, stats=bool(stats))
        found = None if rows is None else Stats.from_rows(rows, keep_rows=stats == "rows")
        return out.to(v.dtype), found

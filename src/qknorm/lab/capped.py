"""Attention whose logits are soft-capped or clamped, to compare QK-norm with.

It computes all T x T logits with the reference backend, so it suits only the short contexts of the lab.

Shapes: B batch, T tokens, Hq / Hk query / key heads, D head width.
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
        kind: "soft" for `limit * tanh(logit / limit)`, as in Gemma 2, or "clamp" for a hard clamp, whose
            gradient is zero beyond the limit.
        limit: the largest |logit|, positive.

    Raises:
        ValueError: the kind is unknown, or the limit is not positive.
    """

    kind: Literal["soft", "clamp"]
    limit: float

    def __post_init__(self) -> None:
        if self.kind not in ("soft", "clamp") or not self.limit > 0:
            raise ValueError(
                f"a cap needs the kind soft or clamp and a positive limit; got {self.kind!r}, "
                f"{self.limit}"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the capped logits, of the same shape and dtype."""
        if self.kind == "soft":
            return self.limit * torch.tanh(logits / self.limit)
        return logits.clamp(-self.limit, self.limit)


class CappedAttention(Attention):
    """An `Attention` layer without a sink whose logits are capped. The statistics are of capped logits.

    Args:
        config: sizes and options of the layer.
        cap: the limit on the logits.

    Raises:
        ValueError: the configuration has a sink.
    """

    def __init__(self, config: AttentionConfig, cap: Cap) -> None:
        if config.sink != "none":
            raise ValueError(f"a cap and a sink together are not supported; got sink={config.sink!r}")
        super().__init__(config)
        self.cap = cap

    def logit_bound(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the bound on the logits of each head, fp32 `[Hq]`.

        The arguments are those of `Attention.logit_bound`.

        Returns:
            The limit of the cap, or the bound of the norm where it is lower.
        """
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
        """Apply norm, RoPE and attention with capped logits, see `Attention.attend`.

        Args:
            q: `[B, Hq, T, D]` before the norm.
            k: `[B, Hk, T, D]` before the norm.
            v: `[B, Hk, T, D]`.
            rope: rotary table; None for no RoPE.
            mask: the mask.
            cache: a cache that receives the new keys and values; None for none.
            stats: the statistics to return.

        Returns:
            The output `[B, Hq, T, D]`, and the statistics or None.
        """
        q_hat, k_hat = self.norm_rope(q, k, rope)
        # A call that is refused must not have written to the cache, so it is checked first.
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

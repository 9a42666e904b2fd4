"""Self-attention with QK-norm, as a layer.

Shapes: B batch, T tokens, C model width, Hq / Hk heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from qknorm import checks, ops, spec
from qknorm.nn.kv_cache import KVCache
from qknorm.nn.marks import SINK, MarkedModule
from qknorm.nn.qk_norm import QKNorm
from qknorm.ops.backends import BACKENDS
from qknorm.ops.norm_rope import rms_normalize
from qknorm.ops.sinks import token_logits
from qknorm.ops.stats import Stats, StatsRequest, check_request
from qknorm.spec import Mask, NormDialect, Rope, RowSink, Sink

SinkKind = Literal["none", "off_by_one", "logit", "token"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What an attention layer is.

    Attributes:
        dim: model width C.
        num_heads: query heads Hq.
        num_kv_heads: key heads Hk, a divisor of Hq; Hq if None. 1 is multi-query attention.
        head_dim: D; C / Hq if None, which must then be whole.
        norm: dialect of QK-norm, or None for none.
        sink: "none"; "off_by_one", a fixed logit of 0; "logit", a learnable one per query head;
            "token", a learnable key and value per key head outside RoPE.
        window: keys that a query sees, itself included; None for all.
        scale: of the logits; 1/sqrt(D) if None.
        gate: multiply each head's output by a sigmoid of the input (Qiu et al. 2025, 2505.06708).
        bias: of the projections.
        backend: of the operator.
    """

    dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: NormDialect | None = field(default_factory=NormDialect)
    sink: SinkKind = "none"
    window: int | None = None
    scale: float | None = None
    gate: bool = False
    bias: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        if min(self.dim, self.num_heads, self.kv_heads) < 1:
            raise ValueError(
                f"dim and heads must be positive; got {self.dim}, {self.num_heads}, {self.kv_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide among {self.kv_heads} key heads"
            )
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} does not divide into {self.num_heads} heads: give head_dim"
            )
        if self.head_dim is not None and self.head_dim < 1:
            raise ValueError(f"head_dim must be positive; got {self.head_dim}")
        if self.sink not in ("none", "off_by_one", "logit", "token"):
            raise ValueError(f"sink must be none, off_by_one, logit or token; got {self.sink!r}")
        if self.backend != "auto" and self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}: choose auto, {', '.join(BACKENDS)}")
        Mask(window=self.window)  # checks it

    @property
    def kv_heads(self) -> int:
        """Hk."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """D."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim


class Observer(Protocol):
    """Takes note of the statistics of a layer, see `Attention.observer`."""

    def wants(self) -> bool:
        """Whether this call is to be observed."""

    def add(self, q: Tensor, k: Tensor, stats: Stats, scale: float | None) -> None:
        """One call: q and k before the norm, the statistics of the attention, and its scale."""


class Attention(MarkedModule):
    """Fused qkv projection, QK-norm, RoPE, attention with a sink, optional gate, output projection.

    Statistics are values that `forward` returns, not hooks: they survive compilation and are
    counted once under activation checkpointing.
    """

    sink_logit: Parameter | None
    sink_key: Parameter | None
    sink_value: Parameter | None
    # Who watches this layer. Watching changes no bit of the result.
    observer: Observer | None = None

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = c = config
        Hq, Hk, D = c.num_heads, c.kv_heads, c.width
        self.qkv = nn.Linear(c.dim, (Hq + 2 * Hk) * D, bias=c.bias)
        self.gate = nn.Linear(c.dim, Hq * D, bias=c.bias) if c.gate else None
        self.out = nn.Linear(Hq * D, c.dim, bias=c.bias)
        self.norm = QKNorm(Hq, Hk, D, c.norm) if c.norm is not None else None
        # fp32 whatever the default dtype, like the gains.
        logit = Parameter(torch.zeros(Hq, dtype=torch.float32)) if c.sink == "logit" else None
        key = value = None
        if c.sink == "token":
            # A key of 0 would be a fixed point of the norm, with logit 0 and no gradient to speak of.
            key = Parameter(torch.randn(Hk, D, dtype=torch.float32))
            value = Parameter(torch.zeros(Hk, D, dtype=torch.float32))
        self.add_marked("sink_logit", logit, SINK)
        self.add_marked("sink_key", key, SINK)
        self.add_marked("sink_value", value, SINK)

    def new_cache(
        self,
        batch: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache that fits this layer."""
        c, weight = self.config, self.qkv.weight
        return KVCache(
            batch,
            c.kv_heads,
            max_length,
            c.width,
            dtype=dtype or weight.dtype,
            device=device or weight.device,
        )

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rope | None = None,
        mask: Mask = Mask(causal=True),
        cache: KVCache | None = None,
        stats: StatsRequest = False,
    ) -> tuple[Tensor, Stats | None]:
        """Attend within x.

        Args:
            x: `[B, T, C]`.
            rope: rotations of these T tokens (with a cache: of the new tokens only).
            mask: over all keys, cached ones included; the layer adds its own window.
            cache: keys and values of earlier tokens; the new ones are appended.
            stats: also return the statistics; "rows" keeps the values of each row.

        Returns:
            `[B, T, C]`, and `Stats` or None.
        """
        c = self.config
        B, T, _ = x.shape
        Hq, Hk, D = c.num_heads, c.kv_heads, c.width
        heads_BHTD = self.qkv(x).view(B, T, Hq + 2 * Hk, D).transpose(1, 2)
        q, k, v = heads_BHTD.split((Hq, Hk, Hk), dim=1)
        if self.norm is not None and self.norm.dialect.value:
            v = self._normalize_value(v, self.norm.dialect.eps)
        if c.window is not None:
            window = c.window if mask.window is None else min(c.window, mask.window)
            mask = Mask(mask.causal, window, mask.documents, mask.key_padding)
        observer = self.observer if self.observer is not None and self.observer.wants() else None
        wanted = stats or observer is not None
        out, found = self.attend(q, k, v, rope=rope, mask=mask, cache=cache, stats=wanted)
        if observer is not None and found is not None:
            observer.add(q, k, found, c.scale)
        out = out.transpose(1, 2).reshape(B, T, Hq * D)
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(x))
        return self.out(out), found if stats else None

    def logit_bound(self, rope: Rope | None = None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """The largest |logit| that the gains allow, `[Hq]`; None without a norm.

        Args:
            rope: the table in use; None if nothing is rotated.
            dtype: what q and k are rounded to.
        """
        c, norm = self.config, self.norm
        if norm is None:
            return None
        gains = norm()
        # A norm after RoPE sees an arbitrary direction: only its gains multiply each other.
        table = rope if norm.dialect.order == "before_rope" else None
        bound = ops.logit_bound(
            *gains, scale=c.scale, rope=table, rotary_dim=0 if table is None else None, dtype=dtype
        )
        # Over the full width one head can hold the mass of all.
        mass = (c.num_heads * c.kv_heads) ** 0.5 if norm.dialect.statistic == "full" else 1.0
        return bound * mass

    def norm_rope(self, q: Tensor, k: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """q and k as they enter the product."""
        if self.norm is None:
            return ops.qk_norm_rope(q, k, rope=rope)
        normed: tuple[Tensor, Tensor] = self.norm(q, k, rope)
        return normed

    def _normalize_value(self, v: Tensor, eps: float) -> Tensor:
        with torch.autocast(v.device.type, enabled=False):
            wide = v.to(spec.compute_dtype(v.dtype))
            return rms_normalize(wide, None, eps=eps).to(v.dtype)

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
        """Norm, RoPE and attention of q `[B, Hq, T, D]`, k and v `[B, Hk, T, D]`."""
        c, norm = self.config, self.norm
        # The operator fuses norm, RoPE and attention. A cache, whose keys are done, a sink token,
        # which sees unrotated queries, and the rarer dialects need them apart.
        if cache is None and c.sink != "token" and (norm is None or norm.dialect.is_fused):
            q_gain, k_gain = (None, None) if norm is None else norm()
            result = ops.attention(
                q,
                k,
                v,
                q_gain=q_gain,
                k_gain=k_gain,
                eps=1e-6 if norm is None else norm.dialect.eps,
                rope=rope,
                mask=mask,
                sink="off_by_one" if c.sink == "off_by_one" else self.sink_logit,
                scale=c.scale,
                stats=stats,
                backend=c.backend,
            )
        else:
            result = self._attend_apart(q, k, v, rope, mask, cache, stats)
        return result if isinstance(result, tuple) else (result, None)

    def _attend_apart(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope | None,
        mask: Mask,
        cache: KVCache | None,
        stats: StatsRequest,
    ) -> Tensor | tuple[Tensor, Stats]:
        c, norm = self.config, self.norm
        scale = c.width**-0.5 if c.scale is None else c.scale
        q_hat, k_hat = self.norm_rope(q, k, rope)
        sink: Sink | None = self.sink_logit
        if c.sink == "off_by_one":
            sink = "off_by_one"
        elif self.sink_key is not None and self.sink_value is not None:
            token_BHTD = self.sink_key[None, :, None]
            if norm is None:
                flat_q, flat_token = q, token_BHTD
            else:
                q_gain, k_gain = norm()
                flat_q, flat_token = norm.normalize(q, q_gain), norm.normalize(token_BHTD, k_gain)
            sink = RowSink(token_logits(flat_q, flat_token.to(q.dtype), scale), self.sink_value)
        if cache is not None:
            # What the operator would refuse must not have reached the cache.
            check_request(stats)
            checks.check_mask(mask, q, cache.length + k.shape[2])
            k_hat, v = cache.append(k_hat, v)
        return ops.attention(
            q_hat, k_hat, v, mask=mask, sink=sink, scale=scale, stats=stats, backend=c.backend
        )

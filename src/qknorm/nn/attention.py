"""Self-attention with QK-norm, as a layer.

Shapes: B batch, T tokens, C model width, Hq / Hk heads, D head width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from qknorm import ops, spec
from qknorm.nn.attention_config import AttentionConfig
from qknorm.nn.kv_cache import KVCache
from qknorm.nn.marks import SINK, MarkedModule
from qknorm.nn.qk_norm import QKNorm
from qknorm.nn.rotary import RotaryEmbedding
from qknorm.ops.attention import prepare
from qknorm.ops.backends.call import Call
from qknorm.ops.norm_rope import rms_normalize
from qknorm.ops.sinks import token_logits
from qknorm.ops.stats import Stats, StatsRequest
from qknorm.spec import Mask, Rope, RopeLayout, RowSink, Sink, SinkToken


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

    Args:
        config: what the layer is.
        device: of all parameters.
        dtype: of the projections. Gains and sinks are fp32 whatever the layer is cast to (fp64 after
            `double()`).
    """

    sink_logit: Parameter | None
    sink_key: Parameter | None
    sink_value: Parameter | None
    # Who watches this layer. Watching changes no bit of the result.
    observer: Observer | None = None

    def __init__(
        self,
        config: AttentionConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        Hq, Hk, D = c.num_heads, c.kv_heads, c.width

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=c.bias, device=device, dtype=dtype)

        self.qkv = linear(c.dim, (Hq + 2 * Hk) * D)
        self.gate = linear(c.dim, Hq * D) if c.gate else None
        self.out = linear(Hq * D, c.dim)
        self.norm = QKNorm(Hq, Hk, D, c.norm, device=device) if c.norm is not None else None
        for name, kind, size in (
            ("sink_logit", "logit", (Hq,)),
            ("sink_key", "token", (Hk, D)),
            ("sink_value", "token", (Hk, D)),
        ):
            empty = torch.empty(size, dtype=torch.float32, device=device) if c.sink == kind else None
            self.add_marked(name, None if empty is None else Parameter(empty), SINK)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """First values of the sink; the submodules have a `reset_parameters` of their own."""
        if self.sink_key is not None:
            # A key of 0 would be a fixed point of the norm, with logit 0 and no gradient to speak of.
            nn.init.normal_(self.sink_key)
        for zero in (self.sink_logit, self.sink_value):
            if zero is not None:
                nn.init.zeros_(zero)

    def new_cache(
        self,
        batch: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache that fits this layer, or what autocast, if it is on, makes of its keys."""
        c, weight = self.config, self.qkv.weight
        kind = weight.device.type
        if dtype is None:
            # Autocast leaves fp64 alone.
            casts = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
            dtype = torch.get_autocast_dtype(kind) if casts else weight.dtype
        return KVCache(
            batch, c.kv_heads, max_length, c.width, dtype=dtype, device=device or weight.device
        )

    def forward(
        self,
        x: Tensor,
        *,
        rope: RotaryEmbedding | Rope | None = None,
        mask: Mask = Mask(causal=True),
        cache: KVCache | None = None,
        stats: StatsRequest = False,
    ) -> Tensor | tuple[Tensor, Stats]:
        """Attend within x, and to what the cache holds.

        Args:
            x: `[B, T, C]`.
            rope: what rotates q and k: a `RotaryEmbedding`, which counts positions from the first
                cached token on, or a table for all keys, cached ones included.
            mask: over all keys, cached ones included; the layer adds its own window.
            cache: keys and values of earlier tokens; the new ones are appended. A call that is
                refused, or that fails in the operator, leaves it as before.
            stats: also return the statistics; "rows" keeps the values of each row.

        Returns:
            `[B, T, C]`; with `stats`, that and `Stats`.

        Raises:
            ValueError: the arguments do not fit together.
            UnsupportedError: the configured backend cannot serve the call.
        """
        c = self.config
        B, T, _ = x.shape
        Hq, Hk, D = c.num_heads, c.kv_heads, c.width
        table = _table(rope, T, 0 if cache is None else cache.length)
        heads_BHTD = self.qkv(x).view(B, T, Hq + 2 * Hk, D).transpose(1, 2)
        q, k, v = heads_BHTD.split((Hq, Hk, Hk), dim=1)
        if self.norm is not None and self.norm.dialect.value:
            v = self._normalize_value(v, self.norm.dialect.eps)
        if c.window is not None:
            window = c.window if mask.window is None else min(c.window, mask.window)
            mask = Mask(mask.causal, window, mask.documents, mask.key_padding)
        observer = self.observer if self.observer is not None and self.observer.wants() else None
        wanted = stats or observer is not None
        out, found = self.attend(q, k, v, rope=table, mask=mask, cache=cache, stats=wanted)
        if observer is not None and found is not None:
            observer.add(q, k, found, c.scale)
        out = out.transpose(1, 2).reshape(B, T, Hq * D)
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(x))
        projected: Tensor = self.out(out)
        return (projected, found) if stats and found is not None else projected

    def logit_bound(
        self,
        rope: Rope | None = None,
        *,
        rotary_dim: int | None = None,
        layout: RopeLayout | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor | None:
        """The largest |logit| that the gains allow, `[Hq]`; None without a norm.

        Without `rope` and `rotary_dim` it holds for any rotation.

        Args:
            rope: the table in use, for a tighter bound.
            rotary_dim: R, where there is no table; 0 says that the layer does not rotate.
            layout: that of the rotation, where there is no table.
            dtype: what q and k are rounded to.

        Gains that FSDP2 has sharded are gathered, for which every rank has to come here.

        Raises ValueError if FSDP of the first generation has freed the gains.
        """
        c, norm = self.config, self.norm
        if norm is None:
            return None
        if norm.dialect.order == "after_rope":
            # The norm sees an arbitrary direction, and only its gains multiply each other.
            rope, rotary_dim, layout = None, 0, None
        bound = ops.logit_bound(
            *_whole_gains(norm),
            scale=c.scale,
            rope=rope,
            rotary_dim=rotary_dim,
            layout=layout,
            dtype=dtype,
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
        """Norm, RoPE and attention of q `[B, Hq, T, D]`, k and v `[B, Hk, T, D]`; rope is of these T."""
        c, norm = self.config, self.norm
        # The operator fuses norm, RoPE and attention. A cache, whose keys are done, and the rarer
        # dialects need them apart.
        if cache is None and (norm is None or norm.dialect.is_fused):
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
                sink=self._sink(),
                scale=c.scale,
                stats=stats,
                backend=c.backend,
            )
        else:
            result = self._attend_apart(q, k, v, rope, mask, cache, stats)
        return result if isinstance(result, tuple) else (result, None)

    def _sink(self) -> Sink | None:
        if self.sink_key is not None and self.sink_value is not None:
            return SinkToken(self.sink_key, self.sink_value)
        return "off_by_one" if self.config.sink == "off_by_one" else self.sink_logit

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
        scale = spec.default_scale(c.width) if c.scale is None else c.scale
        q_hat, k_hat = self.norm_rope(q, k, rope)
        sink = self._sink()
        if isinstance(sink, SinkToken):
            token_BHTD = sink.key[None, :, None]
            if norm is None:
                flat_q, flat_token = q, token_BHTD
            else:
                q_gain, k_gain = norm()
                flat_q, flat_token = norm.normalize(q, q_gain), norm.normalize(token_BHTD, k_gain)
            sink = RowSink(token_logits(flat_q, flat_token.to(q.dtype), scale), sink.value)
        # Everything that can be refused is refused before the cache is written.
        keys, values = (k_hat, v) if cache is None else cache.room(k_hat, v)
        with torch.autocast(q.device.type, enabled=False):
            call = Call(q=q_hat, k=keys, v=values, mask=mask, sink=sink, scale=scale, stats=stats)
            serve = prepare(call, c.backend)
        if cache is None:
            return serve()
        with cache.adding(k_hat, v):
            return serve()


def _whole_gains(norm: QKNorm) -> list[Tensor]:
    """Effective gains outside of the forward, where a wrapper may have sharded or freed them."""
    for stored in (norm.q_gain, norm.k_gain):
        if stored is not None and stored.untyped_storage().size() == 0:
            raise ValueError(
                "the gains are freed outside of the forward: ask inside FullyShardedDataParallel's "
                "summon_full_params"
            )
    with torch.no_grad():
        return [getattr(gain, "full_tensor", lambda g=gain: g)() for gain in norm.effective_gains()]


def _table(rope: RotaryEmbedding | Rope | None, tokens: int, cached: int) -> Rope | None:
    """The rotations of the last `tokens` tokens after `cached` ones."""
    if rope is None:
        return None
    if isinstance(rope, nn.Module):
        table: Rope = rope(tokens, start=cached)
        return table
    if not isinstance(rope, Rope):
        raise ValueError(f"rope must be a RotaryEmbedding or a Rope; got {type(rope).__name__}")
    rows = rope.cos.shape[-2]
    if rows != cached + tokens:
        raise ValueError(
            f"the table has {rows} positions for {cached + tokens} keys, of which {cached} are cached: "
            "it must cover every key; a RotaryEmbedding in its place counts them itself"
        )
    return rope.last(tokens)

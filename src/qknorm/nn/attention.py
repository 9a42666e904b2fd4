"""The self-attention layer with QK-norm.

Shapes: B batch, T tokens, C model width, Hq / Hk query / key heads, D head width, R rotary width.
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
    """An object that receives the statistics of a layer, see `Attention.observer`."""

    def wants(self) -> bool:
        """Whether the observer wants the statistics of this call."""

    def add(self, q: Tensor, k: Tensor, stats: Stats, scale: float | None) -> None:
        """Receive the statistics of one call.

        Args:
            q: `[B, Hq, T, D]` before the norm.
            k: `[B, Hk, T, D]` before the norm.
            stats: statistics of the call.
            scale: factor of the logits; None for 1/sqrt(D).
        """


class Attention(MarkedModule):
    """A self-attention layer with QK-norm.

    It consists of one projection for q, k and v, QK-norm, RoPE, attention with an optional sink, an
    optional gate, and the output projection. `forward` returns statistics as values and does not use
    hooks, so they survive compilation, and activation checkpointing counts them once.

    Args:
        config: sizes and options of the layer.
        device: device of all parameters.
        dtype: dtype of the projections. Gains and sinks are fp32, whatever the layer is cast to (fp64
            after `double()`).

    Attributes:
        config: the `AttentionConfig`.
        qkv: the projection of x `[B, T, C]` to q, k and v, `[B, T, (Hq + 2 Hk) D]`.
        gate: the projection to the gate, `[B, T, Hq D]`, or None.
        out: the output projection, from `[B, T, Hq D]` to `[B, T, C]`.
        norm: the `QKNorm`, or None.
        sink_logit: `[Hq]` for `sink="logit"`, else None.
        sink_key: `[Hk, D]` for `sink="token"`, else None.
        sink_value: `[Hk, D]` for `sink="token"`, else None.
        observer: an `Observer` that receives the statistics of the calls it wants, or None. It changes
            no bit of the result.
    """

    sink_logit: Parameter | None
    sink_key: Parameter | None
    sink_value: Parameter | None
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
        """Set the first values of the sink. The submodules have their own `reset_parameters`."""
        if self.sink_key is not None:
            # The norm leaves a key of 0 at 0, so it would have the same logit, 0, for every query.
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
        """Return an empty cache that fits the keys and values of this layer.

        Args:
            batch: B.
            max_length: capacity in tokens.
            dtype: dtype of keys and values. None takes autocast's dtype if autocast is on and the layer
                is not fp64, and otherwise the dtype of the layer.
            device: device of the cache; that of the layer if None.

        Returns:
            A `KVCache` with keys and values `[B, Hk, max_length, D]`.
        """
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
        """Attend to the tokens of x and of the cache.

        Args:
            x: `[B, T, C]`.
            rope: a `RotaryEmbedding`, which counts positions from the first cached token; or a `Rope`
                table for all keys, those in the cache included; or None for no rotation.
            mask: the mask over all keys, those in the cache included. If the layer has a window, the
                smaller of the two windows is used.
            cache: keys and values of earlier tokens. Those of x are appended. If the call raises an
                error before it returns from the operator, the cache stays as it was.
            stats: True also returns `Stats` per head; "rows" keeps the values of each row as well.

        Returns:
            `[B, T, C]`. With `stats`, the pair of it and `Stats`.

        Raises:
            ValueError: the arguments do not fit together.
            UnsupportedError: the backend of the configuration does not support the call.
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
        """Return the largest absolute logit that the gains allow, see `qknorm.logit_bound`.

        Gains that FSDP2 has sharded are gathered, so every rank must call this method.

        Args:
            rope: the rotary table in use, for the tightest bound.
            rotary_dim: the rotary width R, if no table is given; 0 for a layer without RoPE. Without
                `rope` and `rotary_dim` the bound holds for any rotation.
            layout: the layout of the rotated pairs, needed with `rotary_dim` > 0.
            dtype: the dtype that q and k are rounded to.

        Returns:
            `[Hq]` in fp32 (fp64 for fp64 gains), or None without a norm.

        Raises:
            ValueError: `FullyShardedDataParallel` has freed the gains, or the rotary width does not fit.
        """
        c, norm = self.config, self.norm
        if norm is None:
            return None
        if norm.dialect.order == "after_rope":
            # After RoPE the norm may see any direction, so the bound is that of a layer without RoPE.
            rope, rotary_dim, layout = None, 0, None
        bound = ops.logit_bound(
            *_whole_gains(norm),
            scale=c.scale,
            rope=rope,
            rotary_dim=rotary_dim,
            layout=layout,
            dtype=dtype,
        )
        # With a statistic over all heads, one head can hold the whole length of the vector.
        mass = (c.num_heads * c.kv_heads) ** 0.5 if norm.dialect.statistic == "full" else 1.0
        return bound * mass

    def norm_rope(self, q: Tensor, k: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """Return q and k after the norm, if the layer has one, and RoPE.

        Args:
            q: `[B, Hq, T, D]`.
            k: `[B, Hk, T, D]`.
            rope: the rotary table of these T tokens, or None.

        Returns:
            q_hat `[B, Hq, T, D]` and k_hat `[B, Hk, T, D]` in their dtype.

        Raises:
            ValueError: shapes, dtypes or eps do not fit.
        """
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
        """Apply norm, RoPE and attention to projected q, k and v.

        Args:
            q: `[B, Hq, T, D]`.
            k: `[B, Hk, T, D]`.
            v: `[B, Hk, T, D]`.
            rope: the rotary table of these T tokens, or None.
            mask: the mask over all keys, those in the cache included.
            cache: keys and values of earlier tokens, or None. Those of k and v are appended.
            stats: whether to return statistics, see `forward`.

        Returns:
            out `[B, Hq, T, D]`, and `Stats` or None.
        """
        c, norm = self.config, self.norm
        # The operator fuses norm, RoPE and attention. They are separate steps with a cache, whose keys
        # are normalised and rotated already, and for dialects that the operator does not know.
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
            result = self._attend_in_steps(q, k, v, rope, mask, cache, stats)
        return result if isinstance(result, tuple) else (result, None)

    def _sink(self) -> Sink | None:
        if self.sink_key is not None and self.sink_value is not None:
            return SinkToken(self.sink_key, self.sink_value)
        return "off_by_one" if self.config.sink == "off_by_one" else self.sink_logit

    def _attend_in_steps(
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
        # `room` and `prepare` make all checks, so nothing is written to the cache if one of them fails.
        keys, values = (k_hat, v) if cache is None else cache.room(k_hat, v)
        with torch.autocast(q.device.type, enabled=False):
            call = Call(q=q_hat, k=keys, v=values, mask=mask, sink=sink, scale=scale, stats=stats)
            run = prepare(call, c.backend)
        if cache is None:
            return run()
        with cache.adding(k_hat, v):
            return run()


def _whole_gains(norm: QKNorm) -> list[Tensor]:
    """Return the effective gains outside of the forward pass, gathered if FSDP2 has sharded them.

    Raises ValueError if `FullyShardedDataParallel` has freed them.
    """
    for stored in (norm.q_gain, norm.k_gain):
        if stored is not None and stored.untyped_storage().size() == 0:
            raise ValueError(
                "FullyShardedDataParallel frees the gains outside of the forward pass: call logit_bound "
                "inside its context manager summon_full_params"
            )
    with torch.no_grad():
        return [getattr(gain, "full_tensor", lambda g=gain: g)() for gain in norm.effective_gains()]


def _table(rope: RotaryEmbedding | Rope | None, tokens: int, cached: int) -> Rope | None:
    """Return the rotary table of the `tokens` tokens that follow `cached` ones, or None without RoPE."""
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
            f"the rotary table has {rows} positions for {cached + tokens} keys, of which {cached} are "
            "cached: it must have one position for each key (a RotaryEmbedding makes the right table)"
        )
    return rope.last(tokens)

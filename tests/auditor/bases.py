"""Two small language models with QK-norm in plain PyTorch, for an auditor to look into.

`build("split")` is Qwen3-like: q, k, v and o projections, 4 query heads over 2 key heads, a head wider
than hidden / heads, norms as modules, half-split RoPE over the whole head, torch's own attention.
`build("fused")` is GPT-like: one qkv projection, 4 heads, gains as bare parameters, interleaved RoPE
over half of the head, attention written out. Both store gains `[H, D]` and may have a sink per head.

Three ways through a model must agree, and `model.paths()` offers them by name: attention written out
("eager"), torch's own ("sdpa"), and a prefill of the first half followed by one token at a time
("decode"). Each is called as the model is: with tokens `[B, T]` and, if wanted, positions, documents
and key padding. Where the fault `qk_clip` is on, `model.qk_clip_(max_logit)` rescales the rows of W_q
and W_k of every head whose largest logit in the last forward exceeded `max_logit`; else there is no
such method.

Shapes: B batch, T tokens, H heads (Hq / Hk), D head width, C hidden, E = Hq * D, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from base_parts import (
    LAYERS,
    SIZES,
    VOCABULARY,
    Base,
    Cache,
    Call,
    Faults,
    Sizes,
    eager_attention,
    rms_norm,
    rotate,
    sdpa_attention,
    visibility,
)


class Attention(nn.Module):
    """What both bases share: norm, RoPE, product. Where q, k and v come from is theirs."""

    def __init__(self, sizes: Sizes, faults: Faults, layer: int, has_sink: bool) -> None:
        super().__init__()
        self.sizes, self.faults, self.layer = sizes, faults, layer
        self.sink = nn.Parameter(torch.zeros(sizes.q_heads)) if has_sink else None

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v `[B, T, H, D]`."""
        raise NotImplementedError

    def project_out(self, out_BTE: Tensor) -> Tensor:
        raise NotImplementedError

    def weight_of(self, side: str) -> Tensor:
        """The projection's weight as a view `[H, D, C]`; side: one of "qkv"."""
        raise NotImplementedError

    def gain_of(self, side: str) -> Tensor | None:
        raise NotImplementedError

    def norm_of(self, side: str) -> Callable[[Tensor, bool], Tensor] | None:
        """From x and whether its gain takes part to the normed x."""
        raise NotImplementedError

    def rotated(self, x_BTHD: Tensor, side: str, call: Call) -> Tensor:
        layout, positions_BT = self.sizes.layout, call.q_positions
        if side == "k":
            positions_BT = call.k_positions
            if self.faults.rope == "k_not_rotated":
                return x_BTHD
            if self.faults.rope == "k_backwards":
                positions_BT = -positions_BT
            if self.faults.rope == "layouts_differ":
                layout = "interleaved" if layout == "half" else "half"
        return rotate(x_BTHD, positions_BT, self.sizes.rotary_width, layout, self.faults)

    def hat(self, x_BTHD: Tensor, side: Literal["q", "k"], call: Call) -> Tensor:
        """What enters the product: norm, then RoPE, then one rounding to the dtype of x."""
        f, dtype = self.faults, x_BTHD.dtype
        if side in f.rope_first:
            x_BTHD = self.rotated(x_BTHD, side, call)
        norm = self.norm_of(side)
        skipped = side in f.norms_unused or (
            side == "k" and call.is_decoding and f.decode_k_norm == "missing"
        )
        if norm is not None and not skipped:
            with_gain = side not in f.gain_after_rope
            normed = norm(x_BTHD, with_gain)
            if side == "k" and call.is_decoding and f.decode_k_norm == "twice":
                normed = norm(normed, with_gain)
            x_BTHD = x_BTHD if side in f.norms_discarded else normed
        if side not in f.rope_first:
            x_BTHD = self.rotated(x_BTHD, side, call)
        if side in f.gain_after_rope:
            x_BTHD = x_BTHD * self.gain_of(side)
        limit = f.clamp_q if side == "q" else f.clamp_k
        if limit is not None:
            x_BTHD = x_BTHD.clamp(-limit, limit)
        return x_BTHD.to(dtype)

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, call: Call) -> Tensor:
        """Softmax attention with the scale and the sink of this module."""
        f, D = self.faults, self.sizes.head_dim
        scale = D**-0.5
        if f.scale == "hidden_over_heads":
            scale = (self.sizes.hidden // self.sizes.q_heads) ** -0.5
        if f.scale == "twice":
            q_BHTD = q_BHTD * scale
        if call.path in f.unscaled_in:
            scale = 1.0
        sink_H = None if call.path in f.sink_ignored_by else self.sink
        if f.qk_clip:
            self.note_largest_logits(q_BHTD, k_BHTD, call, scale)
        # torch's own attention cannot clamp, so a model that does has to write attention out.
        is_eager = call.implementation == "eager" or f.clamp_logits is not None
        attention = eager_attention if is_eager else sdpa_attention
        return attention(q_BHTD, k_BHTD, v_BHTD, call, scale, sink_H, f)

    def forward(self, x_BTC: Tensor, call: Call) -> Tensor:
        q, k, v = self.project(x_BTC)
        if self.faults.clip_qkv is not None:
            q, k, v = (x.clamp(-self.faults.clip_qkv, self.faults.clip_qkv) for x in (q, k, v))
        q_hat, k_hat = self.hat(q, "q", call), self.hat(k, "k", call)
        if self.faults.v_norm == "plain":
            v = rms_norm(v, None, self.faults).to(v.dtype)
        elif self.faults.v_norm == "k":
            v = self.norm_of("k")(v, True).to(v.dtype)
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_hat, k_hat, v))
        if call.cache is not None:
            k_BHTD, v_BHTD = call.cache.extend(self.layer, k_BHTD, v_BHTD)
        out_BHTD = self.attend(q_BHTD, k_BHTD, v_BHTD, call)
        return self.project_out(out_BHTD.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def note_largest_logits(self, q_BHTD: Tensor, k_BHTD: Tensor, call: Call, scale: float) -> None:
        k_BHTD = k_BHTD.repeat_interleave(q_BHTD.shape[1] // k_BHTD.shape[1], 1)
        scores = (q_BHTD @ k_BHTD.mT * scale).masked_fill(~call.visible, -torch.inf)
        self.largest_logit_H = scores.amax((0, 2, 3))

    @torch.no_grad()
    def clip_(self, max_logit: float) -> None:
        """MuonClip: each side takes the square root of what the logit has to lose."""
        factor_H = (max_logit / self.largest_logit_H.clamp(min=max_logit)).sqrt()
        self.weight_of("q").mul_(factor_H[:, None, None])
        factor_H = factor_H.view(self.sizes.kv_heads, -1).amin(-1)
        self.weight_of("k").mul_(factor_H[:, None, None])


class HeadNorm(nn.Module):
    """RMSNorm of each head with its own gain."""

    def __init__(self, heads: int, head_dim: int, faults: Faults, side: str) -> None:
        super().__init__()
        self.faults, self.side = faults, side
        self.gain = None if faults.gains_missing else nn.Parameter(torch.ones(heads, head_dim))

    def forward(self, x_BTHD: Tensor, with_gain: bool = True) -> Tensor:
        is_used = with_gain and self.side not in self.faults.gains_unused
        return rms_norm(x_BTHD, self.gain if is_used else None, self.faults)


class SplitAttention(Attention):
    """Four projections; the norms are modules."""

    def __init__(self, sizes: Sizes, faults: Faults, layer: int, has_sink: bool) -> None:
        super().__init__(sizes, faults, layer, has_sink)
        C, Hq, Hk, D = sizes.hidden, sizes.q_heads, sizes.kv_heads, sizes.head_dim
        self.q_proj = nn.Linear(C, Hq * D, bias=False)
        self.k_proj = nn.Linear(C, Hk * D, bias=False)
        self.v_proj = nn.Linear(C, Hk * D, bias=False)
        self.o_proj = nn.Linear(Hq * D, C, bias=False)
        self.q_norm = None if "q" in faults.norms_missing else HeadNorm(Hq, D, faults, "q")
        self.k_norm = None if "k" in faults.norms_missing else HeadNorm(Hk, D, faults, "k")

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x_BTC).unflatten(-1, (-1, self.sizes.head_dim)) for f in projections)
        return q, k, v

    def project_out(self, out_BTE: Tensor) -> Tensor:
        return self.o_proj(out_BTE)

    def weight_of(self, side: str) -> Tensor:
        weight = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}[side].weight
        return weight.unflatten(0, (-1, self.sizes.head_dim))

    def gain_of(self, side: str) -> Tensor | None:
        norm = self.norm_of(side)
        return None if norm is None else norm.gain

    def norm_of(self, side: str) -> HeadNorm | None:
        return self.q_norm if side == "q" else self.k_norm


class FusedAttention(Attention):
    """One projection for q, k and v; the gains are bare parameters."""

    def __init__(self, sizes: Sizes, faults: Faults, layer: int, has_sink: bool) -> None:
        super().__init__(sizes, faults, layer, has_sink)
        C, H, D = sizes.hidden, sizes.q_heads, sizes.head_dim
        self.qkv = nn.Linear(C, 3 * H * D, bias=False)
        self.out = nn.Linear(H * D, C)
        has_q, has_k = (not faults.gains_missing and side not in faults.norms_missing for side in "qk")
        self.q_gain = nn.Parameter(torch.ones(H, D)) if has_q else None
        self.k_gain = nn.Parameter(torch.ones(H, D)) if has_k else None

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x_BTC).unflatten(-1, (3, -1, self.sizes.head_dim)).unbind(2)
        return q, k, v

    def project_out(self, out_BTE: Tensor) -> Tensor:
        return self.out(out_BTE)

    def weight_of(self, side: str) -> Tensor:
        return self.qkv.weight.unflatten(0, (3, -1, self.sizes.head_dim))["qkv".index(side)]

    def gain_of(self, side: str) -> Tensor | None:
        return self.q_gain if side == "q" else self.k_gain

    def norm_of(self, side: str) -> Callable[[Tensor, bool], Tensor] | None:
        if side in self.faults.norms_missing:
            return None

        def norm(x_BTHD: Tensor, with_gain: bool) -> Tensor:
            is_used = with_gain and side not in self.faults.gains_unused
            return rms_norm(x_BTHD, self.gain_of(side) if is_used else None, self.faults)

        return norm


class GatedMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTC)))


class Block(nn.Module):
    """Pre-norm: RMSNorm and a gated MLP in the split base, LayerNorm and a plain one in the fused."""

    def __init__(self, base: Base, faults: Faults, layer: int, has_sink: bool) -> None:
        super().__init__()
        sizes = SIZES[base]
        make_norm = partial(nn.RMSNorm, eps=1e-6) if base == "split" else nn.LayerNorm
        make_attention = SplitAttention if base == "split" else FusedAttention
        self.attention_norm, self.mlp_norm = make_norm(sizes.hidden), make_norm(sizes.hidden)
        self.attention = make_attention(sizes, faults, layer, has_sink)
        self.mlp = GatedMLP(sizes.hidden) if base == "split" else MLP(sizes.hidden)

    def forward(self, x_BTC: Tensor, call: Call) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), call)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class LanguageModel(nn.Module):
    """Embedding, two blocks, norm, untied head."""

    def __init__(self, base: Base, faults: Faults, has_sink: bool) -> None:
        super().__init__()
        self.sizes, self.faults = SIZES[base], faults
        self.embedding = nn.Embedding(VOCABULARY, self.sizes.hidden)
        self.blocks = nn.ModuleList(Block(base, faults, layer, has_sink) for layer in range(LAYERS))
        self.norm = (nn.RMSNorm if base == "split" else nn.LayerNorm)(self.sizes.hidden, eps=1e-6)
        self.head = nn.Linear(self.sizes.hidden, VOCABULARY, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        key_padding: Tensor | None = None,
        cache: Cache | None = None,
        implementation: Literal["eager", "sdpa"] | None = None,
    ) -> Tensor:
        """Logits `[B, T, V]`.

        Args:
            tokens: int64 `[B, T]`; with a cache, those that follow the cached ones.
            positions: int64 `[T]` or `[B, T]`; counted from the first token if None.
            documents: int64 `[B, Tk]`, over cached and new tokens: who may see whom.
            key_padding: bool `[B, Tk]`, over cached and new tokens, True for a real token.
            cache: read and extended.
            implementation: of attention; the base's own if None.
        """
        f, T = self.faults, tokens.shape[1]
        start = 0 if cache is None else cache.length
        implementation = implementation or self.sizes.implementation
        path = "decode" if start else implementation
        visible = visibility(T, start + T, documents, key_padding, path, f)
        is_causal_only = documents is None and key_padding is None
        is_plain = is_causal_only and not (f.sees_next_token or f.mask_as_float)
        is_plain = is_plain and path not in f.mask_ignored_by and (not start or f.decode_mask_top_left)
        if start and f.decode_positions != "right":
            start = start + 1 if f.decode_positions == "one_ahead" else 0
        counted = torch.arange(start, start + T).expand(tokens.shape)
        q_positions = counted if positions is None else positions.expand(tokens.shape)
        k_positions = counted if f.rope == "k_ignores_positions" else q_positions
        call = Call(q_positions, k_positions, visible, is_plain, implementation, path, cache)
        x_BTC = self.embedding(tokens)
        for block in self.blocks:
            x_BTC = block(x_BTC, call)
        return self.head(self.norm(x_BTC))

    def paths(self) -> dict[str, Callable[..., Tensor]]:
        """Every way from tokens to logits, by name."""
        return {
            "eager": partial(self, implementation="eager"),
            "sdpa": partial(self, implementation="sdpa"),
            "decode": self.decode,
        }

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        key_padding: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, T, V]`: the first half of the tokens at once, then one by one by the cache."""
        T, cache, pieces = tokens.shape[1], Cache(), []
        first = max(1, T // 2)
        for begin, end in [(0, first), *((t, t + 1) for t in range(first, T))]:
            logits = self(
                tokens[:, begin:end],
                None if positions is None else positions[..., begin:end],
                None if documents is None else documents[:, :end],
                None if key_padding is None else key_padding[:, :end],
                cache,
            )
            pieces.append(logits)
        return torch.cat(pieces, 1)


class ClippedLanguageModel(LanguageModel):
    """With MuonClip's routine, which trainers call after each step."""

    def qk_clip_(self, max_logit: float) -> None:
        for block in self.blocks:
            block.attention.clip_(max_logit)


@torch.no_grad()
def randomize(model: LanguageModel, seed: int) -> None:
    """No two gains or sinks alike. Values depend on the name alone, not on which others exist."""
    faults = model.faults
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        normal = torch.randn(parameter.shape, generator=generator)
        uniform = torch.rand(parameter.shape, generator=generator)
        if name.endswith(("q_norm.gain", "k_norm.gain", "q_gain", "k_gain")):
            side, layer = ("q" if ".q_" in name else "k"), int(name.split(".")[1])
            is_untrained = side in faults.untrained_gains and layer in faults.untrained_layers
            parameter.copy_(torch.ones_like(uniform) if is_untrained else 0.4 + 1.4 * uniform)
        elif name.endswith("sink"):  # of the size of a row's log-sum-exp, so that it matters
            parameter.copy_(2.0 + 3.0 * uniform)
        elif "embedding" in name:
            parameter.copy_(normal)
        elif parameter.ndim == 2:
            parameter.copy_(normal * parameter.shape[1] ** -0.5)
        elif name.endswith("norm.weight"):
            parameter.copy_(0.5 + uniform)
        else:
            parameter.copy_(0.2 * normal)


def build(
    base: Base, faults: Faults | None = None, *, has_sink: bool = False, seed: int = 0
) -> LanguageModel:
    """A model in training mode; equal seeds give equal weights, whatever the faults."""
    faults = faults or Faults()
    model = (ClippedLanguageModel if faults.qk_clip else LanguageModel)(base, faults, has_sink)
    randomize(model, seed)
    return model

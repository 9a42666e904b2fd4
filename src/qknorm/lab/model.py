"""A decoder-only language model on one page.

Shapes: B batch, T tokens, C width, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.lab.capped import Cap, CappedAttention
from qknorm.nn import Attention, AttentionConfig, KVCache, RotaryEmbedding
from qknorm.nn.attention_config import SinkKind
from qknorm.spec import Mask, NormDialect, Rope, UnsupportedError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model and its variant of attention.

    Attributes:
        vocab_size: V.
        layers: L.
        dim: C.
        heads, kv_heads, head_dim: of attention; kv_heads=None for one per query head, head_dim=None
            for dim / heads.
        mlp_ratio: hidden width of the MLP over C.
        rotary_share: R / D in 0..1; 0 for no positions at all.
        rope_base: of the rotary frequencies.
        window: keys that a query sees; None for all.
        norm: dialect of QK-norm, None for none.
        sink: kind of sink.
        cap: soft-cap or hard clamp of the logits, None for none.
        gate: sigmoid gate on the heads' output.
        backend: of the operator.
    """

    vocab_size: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    rotary_share: float = 1.0
    rope_base: float = 10_000.0
    window: int | None = None
    norm: NormDialect | None = field(default_factory=NormDialect)
    sink: SinkKind = "none"
    cap: Cap | None = None
    gate: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.layers, self.dim) < 1:
            raise ValueError(
                "vocab_size, layers and dim must be positive; got "
                f"{self.vocab_size}, {self.layers}, {self.dim}"
            )
        if not 0 <= self.rotary_share <= 1:
            raise ValueError(f"rotary_share must be 0 to 1; got {self.rotary_share}")
        if self.cap is not None and self.backend not in ("auto", "reference"):
            raise UnsupportedError(
                f"backend {self.backend!r} does not support a cap on the logits: use reference"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"RoPE turns pairs, but {self.rotary_share:g} of a head of {self.attention.width} is "
                f"{self.rotary_dim} entries: choose an even head_dim or another rotary_share"
            )

    @property
    def attention(self) -> AttentionConfig:
        """The configuration of each attention layer; checks the heads."""
        return AttentionConfig(
            dim=self.dim,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm=self.norm,
            sink=self.sink,
            window=self.window,
            gate=self.gate,
            backend=self.backend,
        )

    @property
    def rotary_dim(self) -> int:
        """R."""
        return round(self.rotary_share * self.attention.width)


def saved_model(saved: dict[str, Any]) -> ModelConfig:
    """Return the configuration of a model from the plain values that a checkpoint holds."""
    norm, cap = saved["norm"], saved["cap"]
    return ModelConfig(
        **saved
        | {
            "norm": None if norm is None else NormDialect(**norm),
            "cap": None if cap is None else Cap(**cap),
        }
    )


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.attention_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.attention = Attention(c.attention) if c.cap is None else CappedAttention(c.attention, c.cap)
        self.mlp_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.up = nn.Linear(c.dim, int(c.mlp_ratio * c.dim), bias=False)
        self.down = nn.Linear(int(c.mlp_ratio * c.dim), c.dim, bias=False)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: KVCache | None) -> Tensor:
        """x `[B, T, C]` to the same."""
        x = x + self.attention(self.attention_norm(x), rope=rope, mask=mask, cache=cache)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """Embedding, L blocks, norm, untied output head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rotary = (
            RotaryEmbedding(c.rotary_dim, layout="half", base=c.rope_base) if c.rotary_dim else None
        )
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)
        self._draw_weights()

    def reset_parameters(self) -> None:
        """First values of the whole model, submodules included, as the constructor gives them."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and reset is not None:
                reset()
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Normal weights of std 0.02; those that write to the residual stream scaled by 1/sqrt(2L)."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and (name.endswith("weight")):
                writes = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if writes else 0.02
                nn.init.normal_(weight, std=std)

    def rope(self, tokens: int) -> Rope | None:
        """The rotary table of the first `tokens` positions."""
        return None if self.rotary is None else self.rotary(tokens)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask = Mask(causal=True),
        caches: list[KVCache] | None = None,
    ) -> Tensor:
        """tokens int64 `[B, T]` to logits `[B, T, V]`.

        With `caches`, one per layer, the tokens follow those already cached.
        """
        cached = caches[0].length if caches else 0
        if caches and [cache.length for cache in caches] != [cached] * len(self.blocks):
            raise ValueError(
                f"each of the {len(self.blocks)} layers needs a cache, and all must be equally long; "
                f"got {[cache.length for cache in caches]}"
            )
        rope = self.rope(cached + tokens.shape[1])
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, mask, caches[i] if caches else None)
        return self.head(self.norm(x))

    def attention_layers(self) -> list[Attention]:
        """The attention of each block, in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def new_caches(self, batch: int, max_length: int) -> list[KVCache]:
        """Empty caches, one per layer."""
        return [layer.new_cache(batch, max_length) for layer in self.attention_layers()]

"""A small decoder-only language model.

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
    """The sizes of the model and its variant of attention.

    Attributes:
        vocab_size: V.
        layers: L.
        dim: C.
        heads: Hq.
        kv_heads: Hk; Hq if None.
        head_dim: D; `dim / heads` if None.
        mlp_ratio: hidden width of the MLP divided by C.
        rotary_share: R / D, between 0 and 1; with 0 the model has no positions.
        rope_base: base of the rotary frequencies.
        window: the number of keys that a query sees; None for all.
        norm: the dialect of QK-norm; None for no norm.
        sink: the kind of sink.
        cap: soft-cap or hard clamp of the logits; None for neither.
        gate: whether a sigmoid gate multiplies the output of the heads.
        backend: the backend of the operator; "auto" takes the first that serves the call.

    Raises:
        ValueError: a size is not positive or does not fit the others.
        UnsupportedError: the backend does not support a cap.
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
        """The configuration of each attention layer. Raises ValueError if the heads do not fit."""
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
        """The rotary width R."""
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
    """A block of attention and an MLP, each with a norm before it and a residual connection.

    Args:
        config: sizes and options of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.attention_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.attention = Attention(c.attention) if c.cap is None else CappedAttention(c.attention, c.cap)
        self.mlp_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.up = nn.Linear(c.dim, int(c.mlp_ratio * c.dim), bias=False)
        self.down = nn.Linear(int(c.mlp_ratio * c.dim), c.dim, bias=False)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: KVCache | None) -> Tensor:
        """Apply the block.

        Args:
            x: `[B, T, C]`.
            rope: rotary table; None for no RoPE.
            mask: the mask.
            cache: keys and values of earlier tokens, which receives those of x; None for none.

        Returns:
            `[B, T, C]`.
        """
        x = x + self.attention(self.attention_norm(x), rope=rope, mask=mask, cache=cache)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """A language model: an embedding, L blocks, a norm and an output head that is not tied.

    Args:
        config: sizes and options of the model.
    """

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
        """Draw new first values for the model and its submodules, in the same way as the constructor."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and reset is not None:
                reset()
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Draw normal weights with a standard deviation of 0.02.

        For weights that write to the residual stream it is multiplied by 1 / sqrt(2 L).
        """
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and (name.endswith("weight")):
                writes = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if writes else 0.02
                nn.init.normal_(weight, std=std)

    def rope(self, tokens: int) -> Rope | None:
        """Return the rotary table of the first `tokens` positions; None without RoPE."""
        return None if self.rotary is None else self.rotary(tokens)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask = Mask(causal=True),
        caches: list[KVCache] | None = None,
    ) -> Tensor:
        """Compute the logits of the next tokens.

        Args:
            tokens: int64 `[B, T]`.
            mask: the mask.
            caches: one cache for each layer. The tokens then follow those that are in the caches.

        Returns:
            Logits `[B, T, V]`.

        Raises:
            ValueError: there is not one cache for each layer, or they differ in length.
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
        """Return the attention layer of each block, in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def new_caches(self, batch: int, max_length: int) -> list[KVCache]:
        """Return empty caches, one for each layer.

        Args:
            batch: B.
            max_length: capacity in tokens.
        """
        return [layer.new_cache(batch, max_length) for layer in self.attention_layers()]

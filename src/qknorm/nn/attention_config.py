"""The configuration of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qknorm.ops.backends import BACKENDS
from qknorm.spec import Mask, NormDialect

SinkKind = Literal["none", "off_by_one", "logit", "token"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The sizes and options of an attention layer.

    Attributes:
        dim: model width C.
        num_heads: number of query heads, Hq.
        num_kv_heads: number of key heads, Hk, a divisor of Hq; Hq if None. 1 is multi-query attention.
        head_dim: width D of a head; C / Hq if None, which must then be a whole number.
        norm: dialect of QK-norm, or None for attention without a norm.
        sink: "none"; "off_by_one", a fixed logit of 0; "logit", a learnable logit per query head; or
            "token", a learnable key and value per key head, which RoPE does not rotate.
        window: number of keys that a query sees, its own included; None for all.
        scale: factor of the logits; 1/sqrt(D) if None.
        gate: if True, the output of each head is multiplied by the sigmoid of a projection of the input
            (Qiu et al. 2025, arXiv 2505.06708).
        bias: whether the projections have biases.
        backend: "auto", or the name of a backend of the operator.

    Raises:
        ValueError: a value is not allowed, or the numbers of heads and the widths do not divide each
            other.
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
                "dim, num_heads and num_kv_heads must be positive; got "
                f"{self.dim}, {self.num_heads}, {self.kv_heads}"
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
        Mask(window=self.window)  # raises ValueError for a bad window

    @property
    def kv_heads(self) -> int:
        """The number of key heads, Hk."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """The width of a head, D."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

"""The vocabulary: what a mask, a rotation, a sink and a dialect of QK-norm are, and what is refused.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk query / key heads, D head width, R rotary width.
Every object is checked where it is made; what needs the tensors of a call is checked in `checks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

RopeLayout = Literal["half", "interleaved"]
Statistic = Literal["head", "full"]
GainShape = Literal["per_head", "shared", "full", "none"]
EpsPlace = Literal["mean", "sum", "outside"]
NormOrder = Literal["before_rope", "after_rope"]

HALF_PRECISION = (torch.float16, torch.bfloat16)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATING = (*HALF_PRECISION, torch.float32, torch.float64)


class UnsupportedError(ValueError):
    """A backend, named explicitly, that does not support the call. The message names one that does."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of every statistic and every accumulation: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_scale(head_dim: int) -> float:
    """1/sqrt(D)."""
    if head_dim < 1:
        raise ValueError(f"a head width of {head_dim} has no default scale: give scale")
    return head_dim**-0.5


def _choose(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}; got {value!r}")


class ByValue:
    """Equality and hash of a frozen dataclass that may hold tensors, which compare by their entries."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return hash((type(self), *(v for v in values if not isinstance(v, Tensor))))


def _same(a: object, b: object) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
    return a is b or (a.device == b.device and a.dtype == b.dtype and torch.equal(a, b))


@dataclass(frozen=True, eq=False)
class Mask(ByValue):
    """Which (query, key) pairs are visible. The conditions combine by "and".

    Queries are the last Tq of the Tk tokens (bottom-right alignment), so query i is token
    `i + Tk - Tq`.

    Attributes:
        causal: a query sees its own token and earlier ones.
        window: W >= 1; a query sees W keys, its own included. Without `causal` the window is
            two-sided: keys at a distance below W.
        documents: integer ids `[B, Tk]`; pairs of different ids are hidden, a negative id is padding
            (in uint64 one of 2**63 or more).
        key_padding: bool `[B, Tk]`, True for a real token.
    """

    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None
    key_padding: Tensor | None = None

    def __post_init__(self) -> None:
        window = self.window
        if window is not None and (isinstance(window, bool | float) or window < 1):
            raise ValueError(
                f"window must be at least 1, a whole number of keys; got {window}. "
                "Use window=None for no window."
            )
        if self.documents is not None and (
            self.documents.dim() != 2
            or self.documents.dtype == torch.bool
            or self.documents.dtype.is_floating_point
            or self.documents.dtype.is_complex
        ):
            raise ValueError(
                "documents must be integer ids of shape [B, Tk]; got "
                f"{self.documents.dtype} of shape {list(self.documents.shape)}"
            )
        if self.key_padding is not None and (
            self.key_padding.dim() != 2 or self.key_padding.dtype != torch.bool
        ):
            raise ValueError(
                "key_padding must be bool of shape [B, Tk], True for a real token; got "
                f"{self.key_padding.dtype} of shape {list(self.key_padding.shape)}"
            )

    @staticmethod
    def from_cu_seqlens(
        cu_seqlens: Tensor, tokens: int, *, causal: bool = True, window: int | None = None
    ) -> Mask:
        """Documents packed into one row, `B = 1`, from where they start and end.

        Args:
            cu_seqlens: cumulative lengths `[documents + 1]`, from 0 on, integer, as variable-length
                kernels take them.
            tokens: Tk of the row; tokens after the last document are padding.
            causal: see `Mask`.
            window: see `Mask`.
        """
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype.is_floating_point:
            raise ValueError(
                "cu_seqlens must be integer of shape [documents + 1], from 0 to the number of tokens; "
                f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        ends = cu_seqlens[1:].long()
        token = torch.arange(tokens, device=ends.device)
        # A document without a token has the end of the one before it, and gets none.
        document = torch.searchsorted(ends, token, right=True)
        return Mask(causal, window, torch.where(document < len(ends), document, -1)[None])

    @property
    def is_dense(self) -> bool:
        """Whether there is no window, document or padding."""
        return self.window is None and self.documents is None and self.key_padding is None

    @property
    def ids(self) -> Tensor | None:
        """The documents in a type that every operation of torch takes."""
        if self.documents is None or self.documents.dtype not in UNSIGNED:
            return self.documents
        return self.documents.long()

    def visible(
        self,
        Tq: int,
        Tk: int,
        device: torch.device,
        queries: tuple[int, int] | None = None,
        keys: tuple[int, int] | None = None,
    ) -> Tensor:
        """The definition: bool `[1 or B, queries, keys]`, for a block of it if ranges are given."""
        q_lo, q_hi = queries or (0, Tq)
        return self.visible_to(torch.arange(q_lo, q_hi, device=device) + (Tk - Tq), Tk, keys)

    def visible_to(self, query_token: Tensor, Tk: int, keys: tuple[int, int] | None = None) -> Tensor:
        """The same for any tokens, int `[queries]`."""
        k_lo, k_hi = keys or (0, Tk)
        distance = query_token[:, None] - torch.arange(k_lo, k_hi, device=query_token.device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            visible = visible & (distance >= 0)
        if self.window is not None:
            visible = visible & (distance < self.window) & (distance > -self.window)
        visible = visible[None]
        ids = self.ids
        if ids is not None:
            query_ids, key_ids = ids[:, query_token, None], ids[:, None, k_lo:k_hi]
            visible = visible & (query_ids == key_ids) & (key_ids >= 0)
        if self.key_padding is not None:
            visible = visible & self.key_padding[:, None, k_lo:k_hi]
        return visible

    def real_queries(self, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """Bool `[1 or B, Tq]`: the query's own token is not padding, so its row is counted."""
        real = torch.ones(1, Tk, dtype=torch.bool, device=device)
        ids = self.ids
        if ids is not None:
            real = real & (ids >= 0)
        if self.key_padding is not None:
            real = real & self.key_padding
        # With Tq > Tk (cross-attention) the first queries have no token among the keys.
        return real[:, Tk - Tq :] if Tq <= Tk else F.pad(real, (Tq - Tk, 0), value=True)


@dataclass(frozen=True, eq=False)
class Rope(ByValue):
    """A table of rotations. The rotary width R is twice its last axis; there is no default width.

    Attributes:
        cos, sin: `[Tk, R/2]`, or `[B, Tk, R/2]` where positions differ by row, R <= D. Queries use
            the last Tq rows.
        layout: "half" rotates entry i with i + R/2 (Llama, Qwen); "interleaved" 2i with 2i + 1 (GPT-J).
    """

    cos: Tensor
    sin: Tensor
    layout: RopeLayout

    def __post_init__(self) -> None:
        _choose("layout", self.layout, ("half", "interleaved"))
        if self.cos.shape != self.sin.shape or self.cos.dim() not in (2, 3):
            raise ValueError(
                "cos and sin must share one shape, [T, R/2] or [B, T, R/2]; got "
                f"{list(self.cos.shape)} and {list(self.sin.shape)}"
            )
        if not self.cos.dtype.is_floating_point or not self.sin.dtype.is_floating_point:
            raise ValueError(
                f"cos and sin must be floating point; got {self.cos.dtype}, {self.sin.dtype}"
            )

    @property
    def width(self) -> int:
        """The rotary width R."""
        return 2 * self.cos.shape[-1]

    def last(self, tokens: int) -> Rope:
        """The rotations of the last `tokens` tokens."""
        start = self.cos.shape[-2] - tokens
        return Rope(self.cos[..., start:, :], self.sin[..., start:, :], self.layout)


@dataclass(frozen=True, eq=False)
class SinkToken(ByValue):
    """A learnable key and value per key head that every query sees, on top of the mask.

    The key passes through the norm of the keys if there is one. It stands outside RoPE: neither it
    nor the query is rotated for this one logit, so that relative positions survive.

    Attributes:
        key: `[Hk, D]`.
        value: `[Hk, Dv]`.
    """

    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        if self.key.dim() != 2 or self.value.dim() != 2:
            raise ValueError(
                "a sink token needs a key [Hk, D] and a value [Hk, Dv]; got "
                f"{list(self.key.shape)} and {list(self.value.shape)}"
            )


@dataclass(frozen=True, eq=False)
class RowSink(ByValue):
    """A sink whose logit differs by query, computed by the caller.

    Attributes:
        logit: `[B, Hq, Tq]`, not scaled again.
        value: `[Hk, Dv]` that the sink's probability carries to the output, or None for none.
    """

    logit: Tensor
    value: Tensor | None = None


Sink = Tensor | Literal["off_by_one"] | SinkToken | RowSink


@dataclass(frozen=True, kw_only=True)
class NormDialect:
    """One project's variant of QK-norm. The defaults are the one the operator runs fast.

    Attributes:
        statistic: "head": mean of squares over the head's own D; "full": over all heads of a token.
        gain: "per_head" `[heads, D]`, "shared" `[D]`, "full" `[heads * D]`, or "none".
        offset: the stored parameter w means a gain of `offset + w`: 0.0 (w) or 1.0 (1 + w, Gemma).
        eps: added to the mean of squares unless `eps_place` says otherwise.
        eps_place: "mean": rsqrt(mean + eps); "sum": rsqrt((sum + eps) / D), which is D times weaker;
            "outside": 1 / (sqrt(mean) + eps).
        order: "before_rope" or "after_rope".
        value: also normalise V, without a gain (HybridNorm, Gemma 4); the usual QK-norm never does.
    """

    statistic: Statistic = "head"
    gain: GainShape = "per_head"
    offset: float = 0.0
    eps: float = 1e-6
    eps_place: EpsPlace = "mean"
    order: NormOrder = "before_rope"
    value: bool = False

    def __post_init__(self) -> None:
        _choose("statistic", self.statistic, ("head", "full"))
        _choose("gain", self.gain, ("per_head", "shared", "full", "none"))
        _choose("eps_place", self.eps_place, ("mean", "sum", "outside"))
        _choose("order", self.order, ("before_rope", "after_rope"))
        if self.offset not in (0.0, 1.0):
            raise ValueError(f"offset must be 0 (gain w) or 1 (gain 1 + w); got {self.offset}")
        if not self.eps > 0 or not math.isfinite(self.eps):
            raise ValueError(f"eps must be positive; got {self.eps}. 1e-6 is the usual choice.")

    @property
    def is_fused(self) -> bool:
        """Whether the operator can apply this dialect itself, given gains `[heads, D]`."""
        return (self.statistic, self.eps_place, self.order) == ("head", "mean", "before_rope")

    def gain_size(self, heads: int, head_dim: int) -> tuple[int, ...] | None:
        """Shape of the stored gain for a tensor of `heads` heads, None without one."""
        return {
            "per_head": (heads, head_dim),
            "shared": (head_dim,),
            "full": (heads * head_dim,),
            "none": None,
        }[self.gain]

    @staticmethod
    def of_gain(
        shape: tuple[int, ...], *, heads: int, head_dim: int, statistic: Statistic | None = None
    ) -> NormDialect:
        """The dialect of a stored gain, from its shape.

        `[heads * D]` and `[heads, D]` hold the same numbers, so the flat form says nothing of the
        axis of the statistic: declare it. Raises ValueError for any other shape.
        """
        shape = tuple(shape)
        if shape == (heads, head_dim):
            return NormDialect(gain="per_head", statistic=statistic or "head")
        if shape == (head_dim,) and heads > 1:
            return NormDialect(gain="shared", statistic=statistic or "head")
        if shape == (heads * head_dim,):
            if statistic is None and heads > 1:
                raise ValueError(
                    f"a flat gain of {heads * head_dim} entries fits a statistic over the head and over "
                    'the full width: declare statistic="head" or statistic="full"'
                )
            return NormDialect(gain="full", statistic=statistic or "head")
        raise ValueError(
            f"no dialect has a gain of shape {list(shape)} for {heads} heads of {head_dim}: expected "
            f"[{head_dim}] (shared), [{heads}, {head_dim}] (per head) or [{heads * head_dim}] (full)"
        )

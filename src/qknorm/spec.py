"""The types that describe a call: `Mask`, `Rope`, the sinks and `NormDialect`.

Each object checks its own fields when it is made. The module `checks` compares them with the tensors of
a call.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk query / key heads, D head width, Dv value width,
R rotary width.
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
    """Raised when the backend that was named does not support the call.

    The message says what it does not support and names the backends that do.
    """


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and accumulations for this input: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_scale(head_dim: int) -> float:
    """Return the default scale of the logits, 1/sqrt(D). Raises ValueError if D is 0."""
    if head_dim < 1:
        raise ValueError(f"a head width of {head_dim} has no default scale: give scale")
    return head_dim**-0.5


def _choose(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}; got {value!r}")


class ByValue:
    """Equality and hash for a frozen dataclass with tensor fields.

    Two tensors are equal if device, dtype, shape and all entries are equal. The hash leaves tensors out.
    """

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
    """Which (query, key) pairs are visible. A pair is visible if every condition that is set holds.

    The queries are the last Tq of the Tk tokens (bottom-right alignment), so query i is token
    `i + Tk - Tq`.

    Attributes:
        causal: if True, a query sees its own token and earlier ones.
        window: the number W >= 1 of keys that a query sees, its own included; None for no window.
            Without `causal` the window has two sides, and a query sees the keys at a distance below W.
        documents: integer ids `[B, Tk]` of any integer dtype. Tokens of different documents do not see
            each other. A negative id marks padding (in uint64, an id of 2**63 or more does).
        key_padding: bool `[B, Tk]`, True for a real token and False for padding.

    Raises:
        ValueError: the window is not a whole number of at least 1, or a tensor has the wrong dtype or
            number of axes.
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
        """Return the mask of documents that are packed one after the other into one sequence (B = 1).

        Args:
            cu_seqlens: integer `[documents + 1]`, the cumulative lengths of the documents, starting with
                0, as the variable-length kernels of other libraries take them.
            tokens: Tk, the length of the sequence. Tokens after the last document are padding.
            causal: as in `Mask`.
            window: as in `Mask`.

        Returns:
            A `Mask` whose `documents` are int64 `[1, Tk]`.

        Raises:
            ValueError: cu_seqlens is not an integer tensor with one axis and at least two entries.
        """
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype.is_floating_point:
            raise ValueError(
                "cu_seqlens must be integer of shape [documents + 1], from 0 to the number of tokens; "
                f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        ends = cu_seqlens[1:].long()
        token = torch.arange(tokens, device=ends.device)
        # An empty document ends where the one before it ends, so searchsorted gives it no token.
        document = torch.searchsorted(ends, token, right=True)
        return Mask(causal, window, torch.where(document < len(ends), document, -1)[None])

    @property
    def is_dense(self) -> bool:
        """Whether the mask has no window, no documents and no padding. It may be causal."""
        return self.window is None and self.documents is None and self.key_padding is None

    @property
    def ids(self) -> Tensor | None:
        """The document ids `[B, Tk]`, as int64 if their dtype is uint16, uint32 or uint64."""
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
        """Return which pairs are visible. This is the definition of the mask.

        Args:
            Tq: number of queries.
            Tk: number of keys.
            device: device of the result.
            queries: `(lo, hi)`, to compute the rows of these queries only; None for all.
            keys: `(lo, hi)`, to compute the columns of these keys only; None for all.

        Returns:
            bool `[1, queries, keys]`, or `[B, queries, keys]` with documents or padding.
        """
        q_lo, q_hi = queries or (0, Tq)
        return self.visible_to(torch.arange(q_lo, q_hi, device=device) + (Tk - Tq), Tk, keys)

    def visible_to(self, query_token: Tensor, Tk: int, keys: tuple[int, int] | None = None) -> Tensor:
        """Return which keys are visible to queries at given tokens.

        Args:
            query_token: int64 `[queries]`, the token of each query, counted from 0 to Tk - 1.
            Tk: number of keys.
            keys: `(lo, hi)`, to compute the columns of these keys only; None for all.

        Returns:
            bool `[1, queries, keys]`, or `[B, queries, keys]` with documents or padding.
        """
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
        """Return which queries have a token that is not padding. Only their rows count in statistics.

        Args:
            Tq: number of queries.
            Tk: number of keys.
            device: device of the result.

        Returns:
            bool `[1, Tq]`, or `[B, Tq]` with documents or padding.
        """
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
    """A rotary table: the cosine and sine of each rotation angle, for each token and pair of entries.

    The first R entries of a head are rotated, where R <= D is twice the last axis of the table.

    Attributes:
        cos: `[Tk, R/2]`, or `[B, Tk, R/2]` if the positions differ within the batch; floating point. The
            queries use the last Tq rows.
        sin: the same shape as cos.
        layout: which entries form a pair. "half" rotates entry i with entry i + R/2 (Llama, Qwen);
            "interleaved" rotates entry 2i with entry 2i + 1 (GPT-J).

    Raises:
        ValueError: the layout is unknown, the shapes of cos and sin differ or have another number of
            axes, or a dtype is not floating point.
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
        """The rotary width R, which is twice the last axis of the table."""
        return 2 * self.cos.shape[-1]

    def last(self, tokens: int) -> Rope:
        """Return the part of the table for the last tokens.

        Args:
            tokens: number of tokens to keep, at most Tk.

        Returns:
            A `Rope` with cos and sin `[tokens, R/2]` or `[B, tokens, R/2]`.
        """
        start = self.cos.shape[-2] - tokens
        return Rope(self.cos[..., start:, :], self.sin[..., start:, :], self.layout)


@dataclass(frozen=True, eq=False)
class SinkToken(ByValue):
    """A learnable key and value per key head that every query sees, whatever the mask hides.

    The key is normalised like the other keys if there is a norm. For the logit of the sink, RoPE rotates
    neither the key nor the query: a rotated query against a fixed key would depend on the absolute
        position.

    Attributes:
        key: `[Hk, D]`, floating point.
        value: `[Hk, Dv]`, floating point.

    Raises:
        ValueError: key or value does not have two axes.
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
    """A sink with a logit for each query and head, which the caller computes.

    Attributes:
        logit: `[B, Hq, Tq]`, floating point; the operator does not scale it.
        value: `[Hk, Dv]`, which enters the output with the probability of the sink; None for a sink that
            adds nothing to the output.
    """

    logit: Tensor
    value: Tensor | None = None


Sink = Tensor | Literal["off_by_one"] | SinkToken | RowSink


@dataclass(frozen=True, kw_only=True)
class NormDialect:
    """One project's variant of QK-norm. The backends fuse the default dialect with attention.

    Attributes:
        statistic: the axes of the mean of squares. "head" takes it over the D entries of one head,
            "full" over the entries of all heads of a token.
        gain: the shape of the stored gain. "per_head" is `[heads, D]`, "shared" is `[D]`, "full" is
            `[heads * D]`, and "none" is a norm without a gain.
        offset: the stored parameter w stands for the gain `offset + w`. It is 0.0 (the gain is w) or 1.0
            (the gain is 1 + w, as in Gemma).
        eps: a positive number that keeps the norm of a zero vector finite.
        eps_place: where eps is added. "mean" is rsqrt(mean + eps); "sum" is rsqrt((sum + eps) / width),
            in which eps counts `width` times less, `width` being the number of entries of the statistic;
            "outside" is 1 / (sqrt(mean) + eps).
        order: whether the norm comes before RoPE, "before_rope", or after it, "after_rope".
        value: if True, V is normalised too, without a gain (HybridNorm, Gemma 4).
        centered: if True, the mean over the axes of the statistic is subtracted first, which makes the
            norm a LayerNorm without a bias (Cohere).

    Raises:
        ValueError: a field has a value that is not listed here.
    """

    statistic: Statistic = "head"
    gain: GainShape = "per_head"
    offset: float = 0.0
    eps: float = 1e-6
    eps_place: EpsPlace = "mean"
    order: NormOrder = "before_rope"
    value: bool = False
    centered: bool = False

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
        """Whether `qknorm.attention` can apply this norm, given effective gains `[heads, D]`."""
        plain = (self.statistic, self.eps_place, self.order) == ("head", "mean", "before_rope")
        return plain and not self.centered

    def gain_size(self, heads: int, head_dim: int) -> tuple[int, ...] | None:
        """Return the shape of the stored gain.

        Args:
            heads: number of heads.
            head_dim: width D of a head.

        Returns:
            `(heads, D)`, `(D,)` or `(heads * D,)`, or None for a dialect without a gain.
        """
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
        """Return the dialect that fits the shape of a stored gain.

        A flat gain `[heads * D]` holds as many numbers as `[heads, D]`, so its shape does not show over
        which axes the statistic was taken. The caller has to say so.

        Args:
            shape: of the stored gain.
            heads: number of heads.
            head_dim: D.
            statistic: "head" or "full"; needed for a flat gain of several heads. None means "head".

        Returns:
            A `NormDialect` with this gain and statistic, and defaults otherwise.

        Raises:
            ValueError: no dialect has a gain of this shape, or a flat gain comes without `statistic`.
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

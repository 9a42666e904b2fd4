"""Rotary embeddings: plain, partial, and scaled to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qknorm.nn.full_precision import FullPrecision
from qknorm.spec import HALF_PRECISION, Rope, RopeLayout


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies of RoPE change for contexts that are longer than the one of training.

    Attributes:
        kind: "linear" divides all positions by `factor`. "ntk" raises the base so that the lowest
            frequency is divided by `factor`. "yarn" is that of Peng et al. 2023 (arXiv 2309.00071).
            "llama3" scales frequencies by wavelength, as Llama 3.1 does.
        factor: the factor by which the context grows, at least 1.
        original_length: number of tokens of the original context; needed for yarn and llama3.
        beta_fast: for yarn. A frequency with more turns than this over the original context is kept.
        beta_slow: for yarn. A frequency with fewer turns than this is divided by `factor`. Frequencies
            between the two borders are partly kept.
        low_freq_factor: for llama3, the lower border in turns, like `beta_slow`.
        high_freq_factor: for llama3, the upper border in turns, like `beta_fast`.
        attention_factor: a factor of cos and sin. None means 0.1 ln(factor) + 1 for yarn, else 1.

    Raises:
        ValueError: a value is out of its range, or `original_length` is missing.
    """

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    factor: float
    original_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "ntk", "yarn", "llama3"):
            raise ValueError(f"kind must be linear, ntk, yarn or llama3; got {self.kind!r}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be at least 1; got {self.factor}")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"attention_factor must be positive; got {self.attention_factor}")
        if self.kind not in ("yarn", "llama3"):
            return
        if self.original_length is None or self.original_length < 1:
            raise ValueError(
                f"{self.kind} needs original_length, the number of tokens of the original context; got "
                f"{self.original_length}"
            )
        low, high = (
            ("beta_slow", "beta_fast")
            if self.kind == "yarn"
            else ("low_freq_factor", "high_freq_factor")
        )
        if not 0 < getattr(self, low) < getattr(self, high) < math.inf:
            raise ValueError(
                f"{low} must be positive and below {high}, since frequencies between the two are partly "
                f"kept; got {getattr(self, low)} and {getattr(self, high)}"
            )


class RotaryEmbedding(FullPrecision):
    """A module that makes `Rope` tables for any positions.

    Args:
        rotary_dim: the number R of entries of a head that are rotated, even. Pass the head width D to
            rotate them all; there is no default.
        layout: "half" or "interleaved", see `Rope`.
        base: base of the geometric series of frequencies, above 1.
        scaling: how the frequencies change for longer contexts; None for no change.
        device: device of the tables.

    Attributes:
        inverse_frequency: `[R/2]`, the angle per token of each pair in radians. It is fp32, whatever the
            model is cast to. State dicts do not contain it, since it follows from the arguments.
        amplitude: the factor of cos and sin.

    Raises:
        ValueError: R is odd or below 2, the layout is unknown, or the base is not above 1.
    """

    inverse_frequency: Tensor

    def __init__(
        self,
        rotary_dim: int,
        *,
        layout: RopeLayout,
        base: float = 10_000.0,
        scaling: RopeScaling | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"rotary_dim must be even and at least 2, since RoPE rotates pairs; got {rotary_dim}"
            )
        if layout not in ("half", "interleaved"):
            raise ValueError(f"layout must be half or interleaved; got {layout!r}")
        if not 1 < base < math.inf:
            raise ValueError(f"base must be above 1, so that frequencies fall; got {base}")
        self.rotary_dim, self.layout, self.base, self.scaling = rotary_dim, layout, base, scaling
        empty = torch.empty(rotary_dim // 2, dtype=torch.float32, device=device)
        self.register_buffer("inverse_frequency", empty, persistent=False)
        self.reset_parameters()
        self.amplitude = 1.0
        if scaling is not None and scaling.kind == "yarn":
            self.amplitude = 0.1 * math.log(scaling.factor) + 1.0
        if scaling is not None and scaling.attention_factor is not None:
            self.amplitude = scaling.attention_factor

    def reset_parameters(self) -> None:
        """Compute the frequencies again."""
        exact = frequencies(self.rotary_dim, self.base, self.scaling)
        self.inverse_frequency = exact.to(self.inverse_frequency)

    def forward(self, positions: Tensor | int, *, start: int = 0) -> Rope:
        """Return the rotary table of the given positions.

        The angles are computed in fp32. Casting the module to half precision does not round them.

        Args:
            positions: integer or floating point `[T]` or `[B, T]`; or a number n of tokens, which stands
                for the positions `start ... start + n - 1`.
            start: the first position if `positions` is a number.

        Returns:
            A `Rope` with cos and sin `[T, R/2]` or `[B, T, R/2]` in fp32.

        Raises:
            ValueError: positions have another number of axes.
        """
        frequency = self.inverse_frequency
        if frequency.dtype in HALF_PRECISION:
            # FullyShardedDataParallel casts buffers without calling `_apply`.
            frequency = frequencies(self.rotary_dim, self.base, self.scaling).to(frequency.device)
        if isinstance(positions, int):
            positions = torch.arange(start, start + positions, device=frequency.device)
        if positions.dim() not in (1, 2):
            raise ValueError(
                f"positions must be [T] or [B, T]; got {list(positions.shape)}. Positions with several "
                "axes (m-rope) are not supported."
            )
        angle = positions.to(torch.float32)[..., None] * frequency.to(torch.float32)
        return Rope(angle.cos() * self.amplitude, angle.sin() * self.amplitude, self.layout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Apply `fn`, then compute the frequencies again, since `to_empty` leaves them unset.

        No state dict could bring them back.
        """
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def extra_repr(self) -> str:
        """Return width, layout, base and scaling, for `print`."""
        return f"{self.rotary_dim}, layout={self.layout!r}, base={self.base}, scaling={self.scaling}"


def frequencies(rotary_dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per token of each pair in radians, fp32 `[R/2]` on the CPU.

    The computation is in fp64 on the CPU, because some devices do not support fp64.
    """
    R = rotary_dim
    exponent = torch.arange(0, R, 2, dtype=torch.float64, device="cpu") / R
    plain = base**-exponent
    if scaling is None:
        return plain.float()
    factor = scaling.factor
    if scaling.kind == "linear":
        return (plain / factor).float()
    if scaling.kind == "ntk":
        # The first frequency stays 1, and the last is divided by exactly `factor`. R = 2 has only the
        # first.
        stretched = base * factor ** (R / max(R - 2, 1))
        return (stretched**-exponent).float()
    assert scaling.original_length is not None
    turns = scaling.original_length * plain / (2 * math.pi)
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        keep = _yarn_keep(scaling, R, base)
    return (plain * keep + plain / factor * (1 - keep)).float()


def _yarn_keep(scaling: RopeScaling, R: int, base: float) -> Tensor:
    """Return the share of each frequency that YaRN keeps, `[R/2]` from 0 to 1.

    It falls linearly with the index of the pair. Both ends of the ramp are rounded outwards to whole
    indices, as in the code of the authors.
    """
    length = scaling.original_length
    assert length is not None

    def index_of(turns: float) -> float:
        return R * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), R - 1)
    span = max(high - low, 1e-3)
    ramp = ((torch.arange(R // 2, dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
    return 1 - ramp

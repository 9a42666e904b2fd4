"""Rotary tables: plain, partial, and stretched to longer contexts."""

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
    """How frequencies are stretched for contexts beyond the trained one.

    Attributes:
        kind: "linear" (positions divided by `factor`), "ntk" (base raised so that the lowest
            frequency is divided by `factor`), "yarn" (Peng et al. 2023, arXiv 2309.00071),
            "llama3" (by wavelength, as Llama 3.1).
        factor: stretch, >= 1.
        original_length: tokens of the original context; needed by yarn and llama3.
        beta_fast, beta_slow: yarn: turns over the original context above which a frequency is kept
            and below which it is divided.
        low_freq_factor, high_freq_factor: llama3: the same two borders, as turns.
        attention_factor: multiplies cos and sin; None for 0.1 ln(factor) + 1 with yarn, else 1.
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
                f"{self.kind} needs original_length, the tokens of the first context; got "
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
    """Makes `Rope` tables for any positions.

    Args:
        rotary_dim: R, the number of entries that are rotated; even. There is no default: pass the
            head width for full rotation.
        layout: "half" or "interleaved".
        base: of the geometric series of frequencies.
        scaling: stretch for longer contexts.
        device: of the tables.

    Attributes:
        inverse_frequency: radians per token of each pair, `[R/2]`, fp32 whatever the model is cast to;
            derived from the configuration, so no part of a state dict.
        amplitude: what cos and sin are multiplied by.
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
                f"rotary_dim must be even and at least 2, since RoPE turns pairs; got {rotary_dim}"
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
        """The frequencies, computed anew."""
        exact = frequencies(self.rotary_dim, self.base, self.scaling)
        self.inverse_frequency = exact.to(self.inverse_frequency)

    def forward(self, positions: Tensor | int, *, start: int = 0) -> Rope:
        """The table for positions `[T]` or `[B, T]`, or for `start ... start + n - 1` given a count n.

        Computed in fp32; casting the module to half precision does not round the angles.
        """
        frequency = self.inverse_frequency
        if frequency.dtype in HALF_PRECISION:  # FSDP1 casts buffers without asking the module
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
        """After `to_empty` no state dict would bring the frequencies back."""
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def extra_repr(self) -> str:
        """Width, layout, base and scaling."""
        return f"{self.rotary_dim}, layout={self.layout!r}, base={self.base}, scaling={self.scaling}"


def frequencies(rotary_dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per token of each pair, `[R/2]`, fp32, on the CPU: not every device has fp64."""
    R = rotary_dim
    exponent = torch.arange(0, R, 2, dtype=torch.float64, device="cpu") / R
    plain = base**-exponent
    if scaling is None:
        return plain.float()
    factor = scaling.factor
    if scaling.kind == "linear":
        return (plain / factor).float()
    if scaling.kind == "ntk":
        # The first frequency stays 1, the last is divided by factor exactly (R = 2 has only the first).
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
    """Share of each frequency that is kept: a ramp over the index of the pair, its ends rounded
    outwards to whole indices as in the authors' code."""
    length = scaling.original_length
    assert length is not None

    def index_of(turns: float) -> float:
        return R * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), R - 1)
    span = max(high - low, 1e-3)
    ramp = ((torch.arange(R // 2, dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
    return 1 - ramp

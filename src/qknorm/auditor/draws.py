"""Random numbers that are the same whatever the user has set as default dtype, device and seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def drawn(shape: Sequence[int], seed: int, spread: float = 1.0) -> Tensor:
    """Normal numbers of this standard deviation, fp32 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

"""Random numbers that do not depend on the default dtype, device and seed that the user has set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def drawn(shape: Sequence[int], seed: int, spread: float = 1.0) -> Tensor:
    """Draw numbers from a normal distribution with mean 0.

    Args:
        shape: shape of the result.
        seed: seed of the generator.
        spread: standard deviation.

    Returns:
        An fp32 tensor on the CPU.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

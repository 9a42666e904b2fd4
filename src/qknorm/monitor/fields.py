"""What is kept of a layer between two records: a buffer of maxima and sums, one column per head."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of a buffer `[len(FIELDS), Hq]`. The first row is a maximum, the others are sums. Those of k hold
# one value per key head in their first Hk columns.
FIELDS = (
    "max_logit",
    "entropy",
    "ratio",
    "sink",
    "first",
    "rows",
    "ratio_rows",
    "q_rms",
    "q_rms_square",
    "q_rows",
    "k_rms",
    "k_rms_square",
    "k_rows",
)
FIELD = {name: i for i, name in enumerate(FIELDS)}
FUSED = ("max_logit", "entropy", "ratio", "sink", "rows", "ratio_rows")


def new_buffer(heads: int, device: torch.device) -> Tensor:
    """An empty buffer: -inf for the maximum, zeros for the sums. fp64 where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    with torch.inference_mode(False):
        buffer = torch.zeros(len(FIELDS), heads, dtype=dtype, device=device)
        buffer[0] = -torch.inf
    return buffer


def merge_(buffer: Tensor, other: Tensor) -> None:
    """Add another buffer of the same heads."""
    other = other.to(buffer)
    torch.maximum(buffer[0], other[0], out=buffer[0])
    buffer[1:] += other[1:]

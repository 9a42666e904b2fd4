"""What is kept of a layer between two records: a buffer of maxima and sums, one column per head."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HEADS = 512

# Rows of a buffer `[len(FIELDS), MAX_HEADS]`, of which the first Hq columns count. The first row is a
# maximum, the others are sums. Those of k hold one value per key head in their first Hk columns.
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


def new_buffer(heads: int, device: torch.device) -> Tensor:
    """An empty buffer: -inf for the maximum, zeros for the sums. fp64 where the device has it."""
    buffer = torch.zeros(
        len(FIELDS), heads, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device
    )
    return clear_(buffer)


def clear_(buffer: Tensor) -> Tensor:
    """Empty it in place."""
    buffer.zero_()[0].fill_(-torch.inf)
    return buffer

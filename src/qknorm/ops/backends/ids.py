"""Documents and padding in the form that kernels compare: one integer id per token."""

from __future__ import annotations

import torch
from torch import Tensor


def token_ids(
    q: Tensor, k: Tensor, documents: Tensor | None, key_padding: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return int64 ids of the queries `[B, Tq]` and of the keys `[B, Tk]`, or None twice if not needed.

    As far as documents and padding go, a pair is visible if its two ids are equal and not negative.
    """
    if documents is None and key_padding is None:
        return None, None
    B, Tq, Tk = q.shape[0], q.shape[2], k.shape[2]
    if documents is None:
        keys, queries = (torch.zeros(B, T, dtype=torch.int64, device=q.device) for T in (Tk, Tq))
    else:
        keys = documents.long().clamp(min=-1)
        queries = keys[:, Tk - Tq :].contiguous()
    if key_padding is not None:
        keys = torch.where(key_padding, keys, -1)
    return queries, keys.contiguous()

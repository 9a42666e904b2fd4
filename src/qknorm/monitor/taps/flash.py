"""What the flash function of transformers tells its kernel: whole rows, rows without their padding, or
documents one behind the other.

Shapes: B batch, Tq / Tk tokens, N documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qknorm.monitor.view import MaskOf

_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Places(NamedTuple):
    """Where tokens stand, each `[B or 1, T]`: document, -1 for none, and distance from its end."""

    document: Tensor
    to_end: Tensor

    @classmethod
    def of_rows(cls, real: Tensor) -> Places:
        """Rows without what is not real, bool `[B, T]`."""
        to_end = real.flip(1).long().cumsum(1).flip(1)
        return cls(torch.where(real, 0, -1), to_end)

    @classmethod
    def of_ends(cls, ends: Tensor, tokens: int) -> Places:
        """Documents that end at `ends[1:]` and start at `ends[:-1]`, of one row."""
        place = torch.arange(tokens, device=ends.device)
        ends = ends.long()
        document = torch.searchsorted(ends[1:].contiguous(), place, right=True)
        outside = (place < ends[0]) | (document >= len(ends) - 1)
        to_end = ends[1:][document.clamp(max=len(ends) - 2)] - place
        return cls(torch.where(outside, -1, document)[None], to_end[None])


def shown(q: Places, k: Places, *, causal: bool, window: int | None) -> MaskOf:
    """What a kernel for sequences of unequal lengths shows: a query sees keys of its own document, and
    both are aligned at its end."""

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        own, other = q.document[:, queries, None], k.document[:, None, keys]
        visible = (own == other) & (own >= 0)
        distance = k.to_end[:, None, keys] - q.to_end[:, queries, None]
        if causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance < window) & (distance > -window)
        return visible[:, None]

    return mask_of


def places(
    shape: tuple[int, int, int], mask: Tensor | None, options: dict[str, Any]
) -> tuple[Places, Places] | None:
    """Of queries and keys, decided in the order of `_flash_attention_forward`; None for whole rows.

    `shape`: B, Tq, Tk. With `cu_seq_lens_q` the rows of a batch are one behind the other.
    """
    B, Tq, Tk = shape
    if mask is not None:
        real = mask.bool()
        cut = torch.nn.functional.pad(real, (0, Tk - real.shape[1]))  # keys beyond the mask are cut off
        if Tq == real.shape[1]:
            own = real
        elif Tq == 1:
            own = real.new_ones(B, 1)
        else:
            own = real[:, -Tq:]
        return Places.of_rows(own), Places.of_rows(cut)
    if all(options.get(name) is not None for name in _VARLEN):
        q_ends, k_ends = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
        return Places.of_ends(q_ends, B * Tq), Places.of_ends(k_ends, B * Tk)
    from transformers import modeling_flash_attention_utils as theirs

    positions = options.get("position_ids")
    if not theirs._is_packed_sequence(positions, B):
        return None
    (q_ends, k_ends), _ = theirs.prepare_fa_kwargs_from_position_ids(positions)
    return Places.of_ends(q_ends, Tq), Places.of_ends(k_ends, Tk)

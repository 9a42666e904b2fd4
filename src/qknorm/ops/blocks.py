"""Which keys a block of queries can see, so that backends can skip the blocks that a mask hides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from qknorm.spec import Mask


class Span(NamedTuple):
    """Queries `[q_lo, q_hi)` and the smallest known range of keys `[k_lo, k_hi)` that they may see."""

    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int


def spans(mask: Mask, Tq: int, Tk: int, rows: int) -> Iterator[Span]:
    """Yield blocks of `rows` queries, each with the keys that it may see.

    A block that sees no key has an empty range of keys. Documents narrow the range only on the CPU,
    because reading them on another device would wait for it.
    """
    for q_lo in range(0, Tq, rows):
        q_hi = min(q_lo + rows, Tq)
        first, last = q_lo + Tk - Tq, q_hi - 1 + Tk - Tq  # the tokens of the block's queries
        k_lo, k_hi = 0, Tk
        if mask.causal:
            k_hi = min(k_hi, last + 1)
        if mask.window is not None:
            k_lo = max(k_lo, first - mask.window + 1)
            k_hi = min(k_hi, last + mask.window)
        k_hi = max(k_hi, 0)
        if mask.documents is not None and mask.documents.device.type == "cpu" and k_lo < k_hi:
            k_lo, k_hi = _document_range(mask.documents, first, last, k_lo, k_hi)
        yield Span(q_lo, q_hi, min(k_lo, k_hi), k_hi)


def _document_range(
    documents_BT: Tensor, first: int, last: int, k_lo: int, k_hi: int
) -> tuple[int, int]:
    """Return the range of keys that lie in a document of the block's queries, in any batch entry."""
    own = documents_BT[:, first : last + 1]
    lowest, highest = own.amin(1, keepdim=True), own.amax(1, keepdim=True)
    keys = documents_BT[:, k_lo:k_hi]
    # An id between the lowest and the highest need not occur in the block. The mask hides such keys.
    near = ((keys >= lowest.clamp(min=0)) & (keys <= highest)).any(0).nonzero()
    if near.numel() == 0:
        return k_lo, k_lo
    return k_lo + int(near[0]), k_lo + int(near[-1]) + 1


def hides_within(mask: Mask, Tq: int, Tk: int, span: Span) -> bool:
    """Whether the mask may hide a pair inside the span. No tensor is read to find out."""
    if mask.documents is not None or mask.key_padding is not None:
        return True
    first, last = span.q_lo + Tk - Tq, span.q_hi - 1 + Tk - Tq
    if mask.causal and span.k_hi - 1 > first:
        return True
    if mask.window is None:
        return False
    return last - span.k_lo >= mask.window or span.k_hi - 1 - first >= mask.window

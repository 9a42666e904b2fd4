"""Which keys a query sees in an attention that somebody else wrote, whatever form its mask has.

Shapes: B batch, Hq query heads, Tq / Tk tokens, n queries and m keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qknorm.ops.blocks import Span

# An additive mask hides a pair by this or less: a little above the smallest that models use (-1e4),
# which bf16 rounds and to which a bias may be added. Its probability is 0 in any dtype.
HIDES = -9e3
# Pairs that a survey looks at at once.
SURVEYED = 1 << 20

# The mask of queries [n] and keys [m]: [B or 1, Hq or 1, n, m], bool (True: visible) or additive.
MaskOf = Callable[[Tensor, Tensor], Tensor]
# From scaled products [B, Hq, n, m] of queries [n] and keys [m] to logits, before the mask.
Change = Callable[[Tensor, Tensor, Tensor], Tensor]
# FlexAttention's: (score, batch, head, query, key) -> score, on scalars.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def softcap(limit: float) -> Change:
    """Logits of which a soft-cap makes those that count. May work in place."""
    return lambda s, queries, keys: s.div_(limit).tanh_().mul_(limit)


def score_modified(score_mod: ScoreMod) -> Change:
    """FlexAttention's function of single scores as one of blocks."""
    changed = per_pair(score_mod, is_score=True)

    def change(s: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        b, h = (torch.arange(n, device=s.device) for n in s.shape[:2])
        return changed(s, b, h, queries, keys).to(s.dtype)

    return change


def per_pair(mod: Callable[..., Tensor], *, is_score: bool) -> Callable[..., Tensor]:
    """A function of FlexAttention on scalars as one of whole axes: batch, heads, queries, keys."""
    for axis in (3, 2, 1, 0):
        over = [0 if i == axis else None for i in range(4)]
        mod = torch.vmap(mod, in_dims=(0, *over) if is_score else tuple(over))
    return mod


def as_mask_of(mask: Tensor | MaskOf | None) -> MaskOf | None:
    """Any mask as a function of queries and keys."""
    if not isinstance(mask, Tensor):
        return mask
    mask = mask[(None,) * (4 - mask.dim())]
    for axis in (0, 1, 2):
        if mask.stride(axis) == 0:  # without the copies that an expanded axis stands for
            mask = mask.narrow(axis, 0, 1)
    rows, columns = mask.shape[2] > 1, mask.shape[3] > 1

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        some = mask[:, :, queries] if rows else mask.expand(-1, -1, len(queries), -1)
        return some[..., keys] if columns else some.expand(-1, -1, -1, len(keys))

    return mask_of


def both(a: MaskOf | None, b: MaskOf | None) -> MaskOf | None:
    """Two masks at once: what either hides is hidden, and what they add is added."""
    if a is None or b is None:
        return b if a is None else a

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        x, y = a(queries, keys), b(queries, keys)
        if x.dtype == torch.bool and y.dtype == torch.bool:
            return x & y
        x, y = (torch.where(m, 0.0, -torch.inf) if m.dtype == torch.bool else m for m in (x, y))
        return x + y

    return mask_of


@dataclass(frozen=True, kw_only=True)
class View:
    """A mask in any form, as `qknorm.ops.online_softmax.View`.

    Attributes:
        Tq, Tk: tokens of the whole call.
        queries: int64 `[n]`, ascending, those that are looked at; on the CPU, whose values are known
            without waiting for a device.
        mask_of: of which only one block exists at a time. An additive entry at or below HIDES hides the
            pair.
        causal, window: as in `Mask`, beside the mask.
        change: soft-cap or `score_mod`.
        change_hides: what `change` sends to -inf is hidden, as by a mask.
        batch, heads: see `online_softmax.View`.
    """

    Tq: int
    Tk: int
    queries: Tensor
    mask_of: MaskOf | None = None
    causal: bool = False
    window: int | None = None
    change: Change | None = None
    change_hides: bool = False
    batch: int = 1
    heads: int = 1

    def sizes(self, B: int, Hq: int, device: torch.device) -> dict[str, Any]:
        """`batch` and `heads`, as the mask shows them by a look at one pair."""
        if self.change_hides:
            return {"batch": B, "heads": Hq}
        if self.mask_of is None:
            return {}
        one = torch.zeros(1, dtype=torch.int64, device=device)
        batch, heads = self.mask_of(one, one).shape[:2]
        return {"batch": batch, "heads": heads}

    def spans(self, rows: int) -> Iterator[Span]:
        """Blocks of queries. Causality and windows limit their keys; no other mask is looked at."""
        token = [query + self.Tk - self.Tq for query in self.queries.tolist()]
        for q_lo in range(0, len(token), rows):
            q_hi = min(q_lo + rows, len(token))
            k_lo, k_hi = 0, self.Tk
            if self.causal:
                k_hi = min(k_hi, token[q_hi - 1] + 1)
            if self.window is not None:
                k_lo = max(k_lo, token[q_lo] - self.window + 1)
                k_hi = min(k_hi, token[q_hi - 1] + self.window)
            yield Span(q_lo, q_hi, min(k_lo, max(k_hi, 0)), max(k_hi, 0))

    def logits(self, s: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """The logits as they enter the softmax, -inf where hidden, and what is visible."""
        queries = self.queries[span.q_lo : span.q_hi].to(s.device)
        keys = torch.arange(span.k_lo, span.k_hi, device=s.device)
        if self.change is not None:
            s = self.change(s, queries, keys)
        visible = self._near(queries, keys)
        if self.change_hides:
            shown = s != -torch.inf
            visible = shown if visible is None else visible & shown
        if self.mask_of is not None:
            mask = self.mask_of(queries, keys)
            shown = mask if mask.dtype == torch.bool else ~(mask <= HIDES)  # a NaN hides nothing
            visible = shown if visible is None else visible & shown
            if mask.dtype != torch.bool:
                s = s + mask
        return (s if visible is None else s.masked_fill(~visible, -torch.inf)), visible

    def _near(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """What causality and the window show, bool `[1, 1, n, m]`; None for all."""
        if not self.causal and self.window is None:
            return None
        distance = queries[:, None] + (self.Tk - self.Tq) - keys
        near = distance > (-1 if self.causal else -(self.window or self.Tk))
        return (near if self.window is None else near & (distance < self.window))[None, None]

    def survey(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Of all queries, whether looked at or not: which keys any of them sees, bool `[batch, Tk]`, and
        the first key that each sees, int64 `[batch, heads, Tq]` (0 where it sees none).

        Args:
            s: any tensor of the device and dtype of the scores.
        """
        change = self.change if self.change_hides else None
        whole = replace(self, queries=torch.arange(self.Tq), change=change)
        seen = torch.zeros(self.batch, self.Tk, dtype=torch.bool, device=s.device)
        first = torch.zeros(self.batch, self.heads, self.Tq, dtype=torch.int64, device=s.device)
        rows = max(1, SURVEYED // max(1, self.batch * self.heads * self.Tk))
        for span in whole.spans(rows):
            n, m = span.q_hi - span.q_lo, span.k_hi - span.k_lo
            if m == 0:
                continue
            _, visible = whole.logits(s.new_zeros(self.batch, self.heads, n, m), span)
            if visible is None:
                first[:, :, span.q_lo : span.q_hi] = span.k_lo
                seen[:, span.k_lo : span.k_hi] = True
            else:
                at = visible.byte().argmax(-1) + span.k_lo
                first[:, :, span.q_lo : span.q_hi] = torch.where(visible.any(-1), at, 0)
                seen[:, span.k_lo : span.k_hi] |= visible.any(2).any(1)
        return seen, first

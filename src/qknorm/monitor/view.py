"""Which keys a query sees in an attention that somebody else wrote, whatever form its mask has.

Shapes: B batch, Hq query heads, Tq / Tk tokens, n queries and m keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qknorm.ops.blocks import Span

# An additive mask hides a pair by this or less; its probability is 0 in any dtype.
HIDES = -1e4
# Pairs that a survey looks at at once.
SURVEYED = 1 << 20

# Visibility of queries [n] and keys [m]: bool [B or 1, Hq or 1, n, m].
MaskOf = Callable[[Tensor, Tensor], Tensor]
# From scaled products [B, Hq, n, m] of queries [n] and keys [m] to logits, before the mask.
Change = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False, kw_only=True)
class View:
    """A mask in any form, as `qknorm.ops.online_softmax.View`.

    Attributes:
        batch, heads: see there.
        Tq, Tk: tokens of the whole call.
        queries: int64 `[n]`, ascending, those that are looked at; on the CPU, whose values are known
            without waiting for a device.
        mask: None, bool (True: visible), or additive, of four axes that broadcast to
            `[B, Hq, Tq, Tk]`. An additive entry at or below HIDES hides the pair.
        mask_of: the same as a function, of which only one block exists at a time.
        causal, window: as in `Mask`, beside the mask.
        change: soft-cap or `score_mod`.
        change_hides: what `change` sends to -inf is hidden, as by a mask.
    """

    batch: int
    heads: int
    Tq: int
    Tk: int
    queries: Tensor
    mask: Tensor | None = None
    mask_of: MaskOf | None = None
    causal: bool = False
    window: int | None = None
    change: Change | None = None
    change_hides: bool = False

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
        if self.mask is not None:
            rows = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, queries]
            rows = rows if rows.shape[3] == 1 else rows[..., span.k_lo : span.k_hi]
            shown = rows if rows.dtype == torch.bool else rows > HIDES
            shown = shown.expand(-1, -1, len(queries), len(keys))
            visible = shown if visible is None else visible & shown
            if rows.dtype != torch.bool:
                s = s + rows
        if self.mask_of is not None:
            shown = self.mask_of(queries, keys)
            visible = shown if visible is None else visible & shown
        if self.change_hides:
            shown = s != -torch.inf
            visible = shown if visible is None else visible & shown
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
        whole = replace(
            self, queries=torch.arange(self.Tq), change=self.change if self.change_hides else None
        )
        seen = torch.zeros(self.batch, self.Tk, dtype=torch.bool, device=s.device)
        first = torch.zeros(self.batch, self.heads, self.Tq, dtype=torch.int64, device=s.device)
        rows = max(1, SURVEYED // (self.batch * self.heads * self.Tk))
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

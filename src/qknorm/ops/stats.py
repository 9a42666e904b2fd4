"""Exact statistics of attention: per row, per head, and how parts of them merge.

Shapes: B batch, T tokens, Hq query heads. Rows are queries of one head. All values are fp32
(fp64 for fp64 input) and carry no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qknorm.spec import ByValue

StatsRequest = bool | Literal["rows"]


def check_request(stats: StatsRequest) -> None:
    """Refuse anything but False, True and "rows"."""
    if not isinstance(stats, bool) and stats != "rows":
        raise ValueError(f'stats must be False, True or "rows"; got {stats!r}')


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(ByValue):
    """The values of each row, over its visible keys.

    The log-sum-exp is kept as a maximum and the log of a sum relative to it: at logits near 1000
    their total is only good to 6e-5 in fp32, too coarse to merge entropies with.

    Attributes:
        max_logit: `[B, Hq, Tq]`; -inf where no key is visible.
        log_sum: `[B, Hq, Tq]` nats, ln(sum exp(logit - max_logit)); -inf where no key is visible.
        entropy_nats: `[B, Hq, Tq]`, of the softmax over the keys; 0 where no key is visible.
        visible_keys: `[B or 1, Tq]`, int64.
        is_real: `[B or 1, Tq]`, bool; False for a query whose own token is padding.
        sink_logit: `[B, Hq, Tq]` or None.
    """

    max_logit: Tensor
    log_sum: Tensor
    entropy_nats: Tensor
    visible_keys: Tensor
    is_real: Tensor
    sink_logit: Tensor | None = None

    @property
    def key_lse(self) -> Tensor:
        """`[B, Hq, Tq]` nats: log of the sum of exp(logit) over the keys, without the sink."""
        return self.max_logit + self.log_sum

    @property
    def lse(self) -> Tensor:
        """`[B, Hq, Tq]` nats: log of the whole denominator, the sink included."""
        if self.sink_logit is None:
            return self.key_lse
        return torch.logaddexp(self.key_lse, self.sink_logit)

    @property
    def sink_mass(self) -> Tensor:
        """`[B, Hq, Tq]`: the probability of the sink, 1 / (1 + exp(key_lse - sink))."""
        if self.sink_logit is None:
            return torch.zeros_like(self.log_sum)
        return torch.sigmoid(self.sink_logit - self.max_logit - self.log_sum)

    def merge_keys(self, *others: Rows) -> Rows:
        """The rows over the union of disjoint key splits.

        A sink counts once, whichever parts carry it; a query counts if it is real for any part.
        With d_i = lse - lse_i and weights exp(-d_i):
        H = sum_i exp(-d_i) (H_i + d_i), from H = lse - E[s].
        """
        parts = (self, *others)
        sink = _common_sink([part.sink_logit for part in parts])
        maxima = torch.stack([part.max_logit for part in parts])
        maximum = maxima.amax(0)
        origin = torch.where(maximum == -torch.inf, 0.0, maximum)
        relative = maxima - origin + torch.stack([part.log_sum for part in parts])
        log_sum = relative.logsumexp(0)
        seen = maxima != -torch.inf
        below = torch.where(seen, log_sum - relative, 0.0)
        weight = torch.where(seen, torch.exp(-below), 0.0)
        entropies = torch.stack([part.entropy_nats for part in parts])
        return Rows(
            max_logit=maximum,
            log_sum=log_sum,
            entropy_nats=(weight * (entropies + below)).sum(0),
            visible_keys=functools.reduce(torch.add, [part.visible_keys for part in parts]),
            is_real=functools.reduce(torch.logical_or, [part.is_real for part in parts]),
            sink_logit=sink,
        )


def _common_sink(sinks: Sequence[Tensor | None]) -> Tensor | None:
    """The sink of the parts that carry one. Raises ValueError if theirs differ."""
    carried = [sink for sink in sinks if sink is not None]
    if not all(sink is carried[0] or torch.equal(sink, carried[0]) for sink in carried):
        raise ValueError("the parts have different sinks: key splits share the sink of their attention")
    return carried[0] if carried else None


def amax(x: Tensor) -> Tensor:
    """Largest entry along the last axis; -inf where there is none, which torch refuses."""
    return x.amax(-1) if x.shape[-1] > 0 else x.new_full(x.shape[:-1], -torch.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stats(ByValue):
    """Statistics per query head over the counted rows: real queries that see a key.

    Kept as maxima, sums and counts, so that micro-batches, ranks and key splits merge exactly. A
    mean over no row is NaN, the maximum over none -inf.

    Attributes:
        max_logit: `[Hq]`, the largest visible logit, before the sink.
        entropy_sum: `[Hq]` nats, summed over counted rows.
        ratio_sum: `[Hq]`, entropy / ln(visible keys), summed over counted rows with two keys or more.
        sink_sum: `[Hq]`, the probability that went to the sink, summed over counted rows.
        row_count, ratio_count: `[]`, int64.
        rows: the values of each row, where they were asked for.
    """

    max_logit: Tensor
    entropy_sum: Tensor
    ratio_sum: Tensor
    sink_sum: Tensor
    row_count: Tensor
    ratio_count: Tensor
    rows: Rows | None = None

    @property
    def entropy_nats(self) -> Tensor:
        """`[Hq]`, mean over counted rows of the entropy of the softmax over the keys, in nats."""
        return self.entropy_sum / self.row_count

    @property
    def entropy_ratio(self) -> Tensor:
        """`[Hq]` in 0..1, mean of entropy / ln(visible keys) over rows with two keys or more."""
        return self.ratio_sum / self.ratio_count

    @property
    def sink_mass(self) -> Tensor:
        """`[Hq]` in 0..1, mean probability of the sink; 0 without one."""
        return self.sink_sum / self.row_count

    @staticmethod
    def from_rows(rows: Rows, *, keep_rows: bool = False) -> Stats:
        """Reduce rows to heads."""
        keys_B1T = rows.visible_keys[:, None]
        B, _, Tq = rows.max_logit.shape
        counted_B1T = (rows.is_real & (rows.visible_keys > 0)).expand(B, Tq)[:, None]
        choice_B1T = counted_B1T & (keys_B1T > 1)
        counted, has_choice = (x.expand(rows.max_logit.shape) for x in (counted_B1T, choice_B1T))
        ratio = rows.entropy_nats / torch.log(keys_B1T.clamp(min=2).to(rows.entropy_nats.dtype))

        def total(x: Tensor, where: Tensor) -> Tensor:
            return torch.where(where, x, 0.0).sum((0, 2))

        return Stats(
            max_logit=amax(torch.where(counted, rows.max_logit, -torch.inf).transpose(0, 1).flatten(1)),
            entropy_sum=total(rows.entropy_nats, counted),
            ratio_sum=total(ratio, has_choice),
            sink_sum=total(rows.sink_mass, counted),
            row_count=counted_B1T.sum(),
            ratio_count=choice_B1T.sum(),
            rows=rows if keep_rows else None,
        )

    def merge(self, *others: Stats) -> Stats:
        """The statistics over the rows of all parts (micro-batches, ranks); row values are dropped."""
        parts = (self, *others)

        def total(name: str) -> Tensor:
            return torch.stack([getattr(part, name) for part in parts]).sum(0)

        return Stats(
            max_logit=torch.stack([part.max_logit for part in parts]).amax(0),
            entropy_sum=total("entropy_sum"),
            ratio_sum=total("ratio_sum"),
            sink_sum=total("sink_sum"),
            row_count=total("row_count"),
            ratio_count=total("ratio_count"),
        )

    def merge_keys(self, *others: Stats) -> Stats:
        """The statistics of the same queries over the union of disjoint key splits.

        Needs parts made with `stats="rows"`, whose sinks, where they have one, are the same. Raises
        ValueError otherwise.
        """
        rows = [part.rows for part in (self, *others) if part.rows is not None]
        if len(rows) != 1 + len(others):
            raise ValueError('merging key splits needs row values: ask for them with stats="rows"')
        return Stats.from_rows(rows[0].merge_keys(*rows[1:]), keep_rows=True)

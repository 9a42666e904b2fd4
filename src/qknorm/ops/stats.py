"""Exact statistics of attention per row (`Rows`) and per head (`Stats`), and how to merge them.

A row is one query of one head. All values are fp32 (fp64 for fp64 input) and carry no gradient.

Shapes: B batch, Tq query tokens, Hq query heads.
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
    """Raise ValueError unless `stats` is False, True or "rows"."""
    if not isinstance(stats, bool) and stats != "rows":
        raise ValueError(f'stats must be False, True or "rows"; got {stats!r}')


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(ByValue):
    """Statistics of each row over its visible keys.

    The log-sum-exp is stored in two parts, the maximum and the log of a sum relative to it. Their total
    is accurate only to 6e-5 in fp32 at logits near 1000, which is too coarse for merging entropies.

    Attributes:
        max_logit: `[B, Hq, Tq]`, the largest logit; -inf for a row that sees no key.
        log_sum: `[B, Hq, Tq]` in nats, ln(sum exp(logit - max_logit)); -inf for a row that sees no key.
        entropy_nats: `[B, Hq, Tq]`, the entropy of the softmax over the keys, without the sink; 0 for a
            row that sees no key.
        visible_keys: int64 `[1 or B, Tq]`, the number of visible keys.
        is_real: bool `[1 or B, Tq]`, False for a query whose own token is padding.
        sink_logit: `[B, Hq, Tq]`, or None without a sink.
    """

    max_logit: Tensor
    log_sum: Tensor
    entropy_nats: Tensor
    visible_keys: Tensor
    is_real: Tensor
    sink_logit: Tensor | None = None

    @property
    def key_lse(self) -> Tensor:
        """The log-sum-exp over the keys, without the sink, in nats; `[B, Hq, Tq]`."""
        return self.max_logit + self.log_sum

    @property
    def lse(self) -> Tensor:
        """The log of the whole softmax denominator, with the sink, in nats; `[B, Hq, Tq]`."""
        if self.sink_logit is None:
            return self.key_lse
        return torch.logaddexp(self.key_lse, self.sink_logit)

    @property
    def sink_mass(self) -> Tensor:
        """The probability of the sink, 1 / (1 + exp(key_lse - sink_logit)), `[B, Hq, Tq]`; else 0."""
        if self.sink_logit is None:
            return torch.zeros_like(self.log_sum)
        return torch.sigmoid(self.sink_logit - self.max_logit - self.log_sum)

    def merge_keys(self, *others: Rows) -> Rows:
        """Merge the rows of the same queries over disjoint parts of the keys.

        A sink counts once, whichever of the parts carry it. A query counts as real if it is real in any
        part. The entropies H_i merge as H = sum_i exp(-d_i) (H_i + d_i) with d_i = lse - lse_i, which
        follows from H = lse - E[s].

        Args:
            others: rows of the same shapes over other keys.

        Returns:
            The rows over the union of the keys.

        Raises:
            ValueError: the parts carry different sinks.
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
    """Return the sink of the parts that have one, or None. Raises ValueError if their sinks differ."""
    carried = [sink for sink in sinks if sink is not None]
    if not all(sink is carried[0] or torch.equal(sink, carried[0]) for sink in carried):
        raise ValueError(
            "the parts have different sinks: give each part the sink of the whole attention, or no sink"
        )
    return carried[0] if carried else None


def amax(x: Tensor) -> Tensor:
    """Return the largest entry along the last axis, or -inf if it is empty, where torch would raise."""
    return x.amax(-1) if x.shape[-1] > 0 else x.new_full(x.shape[:-1], -torch.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stats(ByValue):
    """Statistics of each query head over the rows that count.

    A row counts if its own token is not padding and it sees at least one key. The statistics are stored
    as maxima, sums and counts, so those of micro-batches and of ranks merge exactly. A mean over no row
    is NaN, and a maximum over no row is -inf.

    Attributes:
        max_logit: `[Hq]`, the largest visible logit; the sink is not among them.
        entropy_sum: `[Hq]` in nats, the sum of the entropies of the rows.
        ratio_sum: `[Hq]`, the sum of entropy / ln(visible keys) over the rows with two keys or more.
        sink_sum: `[Hq]`, the sum of the probabilities of the sink.
        row_count: int64 `[]`, the number of rows that count, per head.
        ratio_count: int64 `[]`, the number of them with two keys or more.
        rows: the values of each row if the call had `stats="rows"`, else None.
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
        """The mean entropy of a row's softmax over the keys, without the sink, in nats; `[Hq]`."""
        return self.entropy_sum / self.row_count

    @property
    def entropy_ratio(self) -> Tensor:
        """The mean of entropy / ln(visible keys) over rows with two keys or more, `[Hq]` from 0 to 1."""
        return self.ratio_sum / self.ratio_count

    @property
    def sink_mass(self) -> Tensor:
        """The mean probability of the sink, `[Hq]` from 0 to 1; 0 without a sink."""
        return self.sink_sum / self.row_count

    @staticmethod
    def from_rows(rows: Rows, *, keep_rows: bool = False) -> Stats:
        """Reduce the values of rows to those of heads.

        Args:
            rows: the values of each row.
            keep_rows: if True, the result keeps `rows`.

        Returns:
            `Stats` with values `[Hq]`.
        """
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
        """Merge statistics over different rows, such as those of micro-batches or ranks.

        Args:
            others: statistics of the same heads over other rows.

        Returns:
            The statistics over all rows, without the values of each row.
        """
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
        """Merge statistics of the same queries over disjoint parts of the keys.

        Args:
            others: statistics of the same queries over other keys. All parts need `stats="rows"`.

        Returns:
            The statistics over the union of the keys, with the values of each row.

        Raises:
            ValueError: a part lacks the values of its rows, or the parts carry different sinks.
        """
        rows = [part.rows for part in (self, *others) if part.rows is not None]
        if len(rows) != 1 + len(others):
            raise ValueError(
                'merging parts of the keys needs the values of each row: compute each with stats="rows"'
            )
        return Stats.from_rows(rows[0].merge_keys(*rows[1:]), keep_rows=True)

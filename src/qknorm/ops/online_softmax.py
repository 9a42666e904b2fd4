"""The online softmax: the statistics of rows of logits, computed from one block of keys after the other.

The operator `qknorm::logit_stats`, the dense definition (with a single block) and the monitor all
compute their statistics with this code.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk query / key heads, G = Hq / Hk, D head width,
n queries and m keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.blocks import Span
from qknorm.ops.products import exact_matmul

# Hidden logits are clamped to this value. Its exp is zero in fp32 and in fp64, and 0 times it is 0,
# whereas 0 * -inf is NaN.
HIDDEN = -800.0

# The number of keys in a block, and of scores held at once. On the CPU the scores should stay in a cache
# (2 MiB in fp32). On other devices fewer and larger launches are worth 64 MiB.
KEY_BLOCK = {"cpu": 512}
DEVICE_KEY_BLOCK = 4096
SCORE_BUDGET = {"cpu": 1 << 19}
DEVICE_SCORE_BUDGET = 1 << 24


class OnlineSoftmax:
    """Running values of n rows: the maximum m, l = sum exp(s - m) and t = sum exp(s - m) (s - m).

    The entropy is ln(l) - t / l. Unlike lse - E[s], this form loses no digits to cancellation at large
    logits.

    Args:
        like: a tensor `[..., n]` that gives shape, dtype and device of the rows. Its values are not
            used.
    """

    def __init__(self, like: Tensor) -> None:
        self.maximum = torch.full_like(like, -torch.inf)
        self._l = torch.zeros_like(like)
        self._t = torch.zeros_like(like)

    def add(self, s: Tensor) -> None:
        """Add the logits `[..., n, m]` of m more keys, with -inf at hidden pairs. Overwrites `s`."""
        if s.shape[-1] == 0:
            return
        m = torch.maximum(self.maximum, s.amax(-1))
        origin = torch.where(m == -torch.inf, 0.0, m)
        s.sub_(origin[..., None]).clamp_(min=HIDDEN)
        p = s.exp()
        is_first = self.maximum == -torch.inf
        shrink = torch.where(is_first, 0.0, self.maximum - origin)
        decay = torch.where(is_first, 0.0, shrink.exp())
        self._t = decay * (self._t + self._l * shrink)
        self._l = decay * self._l + p.sum(-1)
        self._t = self._t + p.mul_(s).sum(-1)
        self.maximum = m

    @property
    def log_sum(self) -> Tensor:
        """ln(l) of each row, in nats; -inf for a row that saw no key."""
        return torch.where(self.maximum == -torch.inf, -torch.inf, self._l.log())

    @property
    def entropy_nats(self) -> Tensor:
        """The entropy of the softmax over the keys of each row, in nats; 0 for a row that saw no key."""
        entropy = torch.where(self.maximum == -torch.inf, 0.0, self._l.log() - self._t / self._l)
        return entropy.clamp(min=0.0)  # for a row with one key rounding can give -1e-7


class View(Protocol):
    """Which pairs are visible, and how their products become logits."""

    @property
    def batch(self) -> int:
        """1 if visibility is the same for all batch entries, else B."""
        ...

    @property
    def heads(self) -> int:
        """1 if visibility is the same for all heads, else Hq."""
        ...

    def spans(self, rows: int) -> Iterator[Span]:
        """Yield blocks of at most `rows` queries, each with the smallest known range of visible keys."""
        ...

    def logits(self, s: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """Turn the scaled products of a span into logits.

        Args:
            s: scaled products `[B, Hq, n, m]`; they may be overwritten.
            span: the queries and keys of the block.

        Returns:
            The logits `[B, Hq, n, m]`, with -inf at hidden pairs, and which pairs are visible, bool
            `[batch, heads, n, m]`. None instead of the second means that all pairs are visible.
        """
        ...


class RowValues(NamedTuple):
    """The values of each row.

    Attributes:
        max_logit: `[B, Hq, Tq]`, -inf for a row that sees no key.
        log_sum: `[B, Hq, Tq]`, ln(sum exp(logit - max_logit)) in nats; -inf for a row that sees no key.
        entropy_nats: `[B, Hq, Tq]`, 0 for a row that sees no key.
        visible_keys: int64 `[batch, heads, Tq]`, the number of visible keys.
        first_key: int64 `[batch, heads, Tq]`, the index of the first visible key; 0 if there is none.
        first_logit: `[B, Hq, Tq]`, the logit of the first visible key; -inf if there is none.
    """

    max_logit: Tensor
    log_sum: Tensor
    entropy_nats: Tensor
    visible_keys: Tensor
    first_key: Tensor
    first_logit: Tensor


def stream_rows(q_BHTD: Tensor, k_BHTD: Tensor, view: View, scale: float) -> RowValues:
    """Return the values of each row in fp32 (fp64 for fp64 input), without a gradient.

    The memory grows linearly with Tq and Tk.

    Args:
        q_BHTD: queries `[B, Hq, Tq, D]` as they enter the product.
        k_BHTD: keys `[B, Hk, Tk, D]` as they enter the product; Hq is a multiple of Hk.
        view: which pairs are visible.
        scale: factor of the products.
    """
    B, Hq, Tq, D = q_BHTD.shape
    Hk, Tk = k_BHTD.shape[1:3]
    device, wide = q_BHTD.device, spec.compute_dtype(q_BHTD.dtype)
    maximum = torch.full((B, Hq, Tq), -torch.inf, dtype=wide, device=device)
    log_sum, first_logit = maximum.clone(), maximum.clone()
    entropy = torch.zeros_like(maximum)
    visible_keys = torch.zeros(view.batch, view.heads, Tq, dtype=torch.int64, device=device)
    first_key = torch.zeros_like(visible_keys)

    width = min(KEY_BLOCK.get(device.type, DEVICE_KEY_BLOCK), max(1, Tk))
    budget = SCORE_BUDGET.get(device.type, DEVICE_SCORE_BUDGET)
    rows = max(1, min(Tq, budget // max(1, B * Hq * width)))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for span in view.spans(rows):
            some = slice(span.q_lo, span.q_hi)
            n = span.q_hi - span.q_lo
            q = q_BHTD[:, :, some].to(wide).reshape(B, Hk, Hq // Hk * n, D)
            softmax = OnlineSoftmax(maximum[:, :, some])
            for k_lo in range(span.k_lo, span.k_hi, width):
                block = span._replace(k_lo=k_lo, k_hi=min(k_lo + width, span.k_hi))
                keys = k_BHTD[:, :, block.k_lo : block.k_hi].to(wide)
                s = exact_matmul(q, keys.mT).view(B, Hq, n, -1).mul_(scale)
                s, visible = view.logits(s, block)
                before = visible_keys[:, :, some]
                if visible is None:
                    at, count = torch.zeros_like(before), torch.full_like(before, s.shape[-1])
                else:
                    at, count = visible.byte().argmax(-1), visible.sum(-1)
                is_new = (before == 0) & (count > 0)
                value = s.gather(-1, at.expand(B, Hq, n)[..., None])[..., 0]
                first_logit[:, :, some] = torch.where(is_new, value, first_logit[:, :, some])
                first_key[:, :, some] = torch.where(is_new, at + block.k_lo, first_key[:, :, some])
                visible_keys[:, :, some] = before + count
                softmax.add(s)
            maximum[:, :, some] = softmax.maximum
            log_sum[:, :, some] = softmax.log_sum
            entropy[:, :, some] = softmax.entropy_nats
    return RowValues(maximum, log_sum, entropy, visible_keys, first_key, first_logit)

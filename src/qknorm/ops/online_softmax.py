"""The softmax of a row of logits, block by block of keys, and what it tells of the row.

Every statistic of the library comes from this one step, whatever produced the logits: the operator
`qknorm::logit_stats`, the dense definition (one block), and the monitor.

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

# exp of anything below this is zero in fp32 and in fp64, and 0 * it is 0 where 0 * -inf is NaN.
HIDDEN = -800.0

# Keys of a block, and scores held at once: 2 MiB in fp32 where they should stay in a cache, 64 MiB on a
# device, whose launches cost more than its memory.
KEY_BLOCK = {"cpu": 512}
DEVICE_KEY_BLOCK = 4096
SCORE_BUDGET = {"cpu": 1 << 19}
DEVICE_SCORE_BUDGET = 1 << 24


class OnlineSoftmax:
    """Running values of some rows: their maximum m, l = sum exp(s - m) and t = sum exp(s - m) (s - m).

    The entropy is then ln(l) - t / l. Unlike lse - E[s] it does not cancel at large logits.

    Args:
        like: any tensor `[..., n]` of the rows' shape, dtype and device; its values do not matter.
    """

    def __init__(self, like: Tensor) -> None:
        self.maximum = torch.full_like(like, -torch.inf)
        self._l = torch.zeros_like(like)
        self._t = torch.zeros_like(like)

    def add(self, s: Tensor) -> None:
        """Take in logits `[..., n, m]` of further keys, -inf where hidden. Overwrites them."""
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
        """ln(l) in nats; -inf where no key was visible."""
        return torch.where(self.maximum == -torch.inf, -torch.inf, self._l.log())

    @property
    def entropy_nats(self) -> Tensor:
        """Of the softmax over the keys; 0 where none was visible."""
        entropy = torch.where(self.maximum == -torch.inf, 0.0, self._l.log() - self._t / self._l)
        return entropy.clamp(min=0.0)  # rounding can leave a row of one key at -1e-7


class View(Protocol):
    """Which pairs are visible, and what becomes of their products."""

    @property
    def batch(self) -> int:
        """1 where all rows of the batch see the same, else B."""
        ...

    @property
    def heads(self) -> int:
        """1 where all heads see the same, else Hq."""
        ...

    def spans(self, rows: int) -> Iterator[Span]:
        """Blocks of at most `rows` queries, each with the smallest known range of keys it may see."""
        ...

    def logits(self, s: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """From scaled products `[B, Hq, n, m]`, which may be overwritten, to logits, -inf where hidden;
        and which pairs are visible, bool `[batch, heads, n, m]`, or None if all are."""
        ...


class RowValues(NamedTuple):
    """Maximum, ln(l), entropy and the logit of the first visible key `[B, Hq, Tq]`; how many keys are
    visible, and which is the first, `[batch, heads, Tq]` int64. A row without a key has first key 0."""

    max_logit: Tensor
    log_sum: Tensor
    entropy_nats: Tensor
    visible_keys: Tensor
    first_key: Tensor
    first_logit: Tensor


def stream_rows(q_BHTD: Tensor, k_BHTD: Tensor, view: View, scale: float) -> RowValues:
    """The values of each row, in fp32 (fp64 for fp64 input), without a gradient and linear in memory.

    Args:
        q_BHTD: queries as they enter the product.
        k_BHTD: keys as they enter it; Hq is a multiple of Hk.
        view: what is visible.
        scale: of the products.
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

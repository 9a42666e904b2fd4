"""The statistics alone, streamed over blocks of scores, for any attention kernel.

Registered as `qknorm::logit_stats`, so that a compiled graph sees one opaque node, and so that a device
can have a kernel of its own for it.

Shapes: B batch, Tq / Tk tokens, Hq / Hk heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qknorm import checks, spec
from qknorm.ops import registry
from qknorm.ops.blocks import Span, hides_within, spans
from qknorm.ops.norm_rope import qk_norm_rope
from qknorm.ops.online_softmax import stream_rows
from qknorm.ops.sinks import sink_logits
from qknorm.ops.stats import Rows, Stats, StatsRequest, check_request
from qknorm.spec import Mask, Rope, Sink


class MaskView:
    """What a `Mask` shows, as `online_softmax.View`.

    Args:
        tokens: int64 `[Tq]`, ascending, those of the queries where they are a sample; else the queries
            are the last Tq tokens.
    """

    heads = 1

    def __init__(self, mask: Mask, B: int, Tq: int, Tk: int, tokens: Tensor | None = None) -> None:
        self.mask, self.Tq, self.Tk, self.tokens = mask, Tq, Tk, tokens
        self.batch = 1 if mask.documents is None and mask.key_padding is None else B

    def spans(self, rows: int) -> Iterator[Span]:
        """Where the tokens of a sample lie is not asked: it would wait for the device."""
        if self.tokens is None:
            yield from spans(self.mask, self.Tq, self.Tk, rows)
            return
        for q_lo in range(0, self.Tq, rows):
            yield Span(q_lo, min(q_lo + rows, self.Tq), 0, self.Tk)

    def logits(self, s: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """The products themselves, -inf where hidden."""
        keys = (span.k_lo, span.k_hi)
        if self.tokens is not None:
            visible = self.mask.visible_to(self.tokens[span.q_lo : span.q_hi], self.Tk, keys)
        elif hides_within(self.mask, self.Tq, self.Tk, span):
            visible = self.mask.visible(self.Tq, self.Tk, s.device, (span.q_lo, span.q_hi), keys)
        else:
            return s, None
        visible = visible[:, None]
        return s.masked_fill_(~visible, -torch.inf), visible


def rows_by_stream(
    q: Tensor,
    k: Tensor,
    tokens: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """The operator in tensor code: row maximum, ln(sum exp(s - maximum)), entropy and logit of the first
    visible key `[B, Hq, Tq]`; how many keys are visible, and which is the first, `[1 or B, Tq]`."""
    mask = Mask(causal, window, documents, key_padding)
    view = MaskView(mask, q.shape[0], q.shape[2], k.shape[2], tokens)
    found = stream_rows(q, k, view, scale)
    of_rows = (found.max_logit, found.log_sum, found.entropy_nats, found.first_logit)
    return *of_rows, found.visible_keys[:, 0], found.first_key[:, 0]


def _fake(
    q: Tensor,
    k: Tensor,
    tokens: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    *options: object,
) -> tuple[Tensor, ...]:
    row = q.new_empty(q.shape[:3], dtype=spec.compute_dtype(q.dtype))
    per_row = 1 if documents is None and key_padding is None else q.shape[0]
    keys = q.new_empty((per_row, q.shape[2]), dtype=torch.int64)
    return *(torch.empty_like(row) for _ in range(4)), keys, torch.empty_like(keys)


registry.define(
    "logit_stats",
    "(Tensor q, Tensor k, Tensor? tokens, Tensor? documents, Tensor? key_padding, bool causal, "
    "int? window, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    CompositeExplicitAutograd=rows_by_stream,
)


def rows_of(
    q_hat: Tensor,
    k_hat: Tensor,
    mask: Mask,
    scale: float,
    sink_logit: Tensor | None,
    sample: Tensor | None = None,
) -> Rows:
    """Rows of q and k as the attention kernel sees them: normalised, rotated and rounded.

    `sink_logit` broadcasts to `[B, Hq, Tq]`; `sample` holds the queries that are looked at, ascending.
    """
    Tq, Tk = q_hat.shape[2], k_hat.shape[2]
    is_real = mask.real_queries(Tq, Tk, q_hat.device)
    tokens = None
    if sample is not None:
        tokens, is_real, q_hat = sample + (Tk - Tq), is_real[:, sample], q_hat[:, :, sample]
        if sink_logit is not None and sink_logit.shape[-1] > 1:
            sink_logit = sink_logit[..., sample]
    maximum, log_sum, entropy, _, keys, _ = torch.ops.qknorm.logit_stats(
        q_hat.detach(),
        k_hat.detach(),
        tokens,
        mask.ids,
        mask.key_padding,
        mask.causal,
        mask.window,
        scale,
    )
    if sink_logit is not None:
        sink_logit = sink_logit.detach().to(log_sum.dtype).expand(log_sum.shape)
    return Rows(
        max_logit=maximum,
        log_sum=log_sum,
        entropy_nats=entropy,
        visible_keys=keys,
        is_real=is_real,
        sink_logit=sink_logit,
    )


def logit_stats(
    q: Tensor,
    k: Tensor,
    *,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
    rope: Rope | None = None,
    mask: Mask = Mask(causal=True),
    sink: Sink | None = None,
    scale: float | None = None,
    stats: StatsRequest = True,
    sample: int | None = None,
) -> Stats:
    """Exact statistics of an attention that runs elsewhere: max logit, entropy, sink mass.

    Takes no gradient and holds no T x T buffer. Arguments are those of `qknorm.attention`; pass q
    and k before the norm with their gains, or after it without. They are taken as they are, also under
    autocast: cast them first if the attention that runs elsewhere casts them.

    Args:
        q: `[B, Hq, Tq, D]`.
        k: `[B, Hk, Tk, D]`.
        stats: True, or "rows" to keep the values of each row.
        sample: look at this many queries only, evenly spaced, the last one among them; None for all.
            The maximum is then that of the sample.

    Returns:
        `Stats`, each value fp32 `[Hq]` (fp64 for fp64 input).

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_request(stats)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        checks.check_qk(q, k, q_gain, k_gain, eps, rope)
        checks.check_mask(mask, q, k.shape[2])
        checks.check_sink(sink, q, k.shape[1], None)
        scale = spec.default_scale(q.shape[-1]) if scale is None else scale
        q_hat, k_hat = qk_norm_rope(q, k, q_gain=q_gain, k_gain=k_gain, eps=eps, rope=rope)
        sink_logit = sink_logits(q, sink, q_gain=q_gain, k_gain=k_gain, eps=eps, scale=scale)
        some = None if sample is None else sampled_queries(q.shape[2], sample, q.device)
        rows = rows_of(q_hat, k_hat, mask, scale, sink_logit, some)
        return Stats.from_rows(rows, keep_rows=stats == "rows")


def sampled_queries(Tq: int, sample: int, device: torch.device) -> Tensor | None:
    """Evenly spaced queries, the last among them; None if that is all of them."""
    if sample < 1:
        raise ValueError(f"sample must be at least 1 query; got {sample}. Use sample=None for all.")
    if sample >= Tq:
        return None
    steps = torch.arange(sample, device=device) * (Tq - 1) // max(sample - 1, 1)
    return Tq - 1 - steps.flip(0)

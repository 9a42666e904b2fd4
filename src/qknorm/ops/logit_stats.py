"""Statistics of the logits without the attention itself, for an attention that another kernel computes.

The computation is an operator of torch, `qknorm::logit_stats`. A compiled graph sees it as one opaque
node, and a device can register its own kernel for it, as the Triton backend does for CUDA.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk query / key heads, D head width.
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
    """A `Mask` as the `View` that `online_softmax.stream_rows` takes.

    Args:
        mask: which pairs are visible.
        B: batch size.
        Tq: number of queries.
        Tk: number of keys.
        tokens: int64 `[Tq]`, ascending, the token of each query if the queries are a sample. With None
            the queries are the last Tq tokens.
    """

    heads = 1

    def __init__(self, mask: Mask, B: int, Tq: int, Tk: int, tokens: Tensor | None = None) -> None:
        self.mask, self.Tq, self.Tk, self.tokens = mask, Tq, Tk, tokens
        self.batch = 1 if mask.documents is None and mask.key_padding is None else B

    def spans(self, rows: int) -> Iterator[Span]:
        """Yield blocks of at most `rows` queries, each with the range of keys that it may see.

        For a sample of queries the range is all keys, since reading the tokens would wait for the
        device.
        """
        if self.tokens is None:
            yield from spans(self.mask, self.Tq, self.Tk, rows)
            return
        for q_lo in range(0, self.Tq, rows):
            yield Span(q_lo, min(q_lo + rows, self.Tq), 0, self.Tk)

    def logits(self, s: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """Return the logits, which are the products with -inf at hidden pairs, and the visible pairs."""
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
    """Compute the operator `qknorm::logit_stats` in tensor code.

    Args:
        q: `[B, Hq, Tq, D]`, normalised and rotated.
        k: `[B, Hk, Tk, D]`, normalised and rotated.
        tokens: int64 `[Tq]`, the tokens of the queries if they are a sample, else None.
        documents: `[B, Tk]`, see `Mask`.
        key_padding: `[B, Tk]`, see `Mask`.
        causal: see `Mask`.
        window: see `Mask`.
        scale: factor of the products.

    Returns:
        Four tensors `[B, Hq, Tq]`: the largest logit of each row, ln(sum exp(logit - largest)), the
        entropy in nats, and the logit of the first visible key. Two int64 tensors `[1 or B, Tq]`: the
        number of visible keys, and the index of the first.
    """
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
    """Return the values of each row, given q and k as the attention kernel multiplies them.

    Args:
        q_hat: `[B, Hq, Tq, D]`, normalised, rotated and rounded.
        k_hat: `[B, Hk, Tk, D]`, likewise.
        mask: which pairs are visible.
        scale: factor of the products.
        sink_logit: broadcasts to `[B, Hq, Tq]`, or None without a sink.
        sample: int64, ascending, the indices of the queries to look at; None for all.
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
    """Return exact statistics of an attention that another kernel computes.

    The statistics are max logit, entropy and sink mass. They carry no gradient, and no buffer of size T
    x T is made. Pass q and k before the norm together with their gains, or after the norm without gains.
    Autocast does not change q and k here; if it casts them for the attention, pass them cast.

    Args:
        q: `[B, Hq, Tq, D]`, any strides; fp16, bf16, fp32 or fp64.
        k: `[B, Hk, Tk, D]` in q's dtype; Hq is a multiple of Hk.
        q_gain: `[Hq, D]`; None if q has no norm or is normalised already.
        k_gain: `[Hk, D]`; None if k has no norm or is normalised already.
        eps: added to the mean of squares; positive, and at least 1e-6 for half-precision input.
        rope: the rotary table of all Tk tokens; None if there is none or q and k are rotated already.
        mask: which pairs are visible, see `Mask`.
        sink: as in `qknorm.attention`.
        scale: factor of the logits; 1/sqrt(D) if None.
        stats: "rows" keeps the values of each row in the result; True keeps those of the heads only.
        sample: the number of queries to look at, evenly spaced and with the last one among them; None
            for all. All statistics are then those of the sample.

    Returns:
        `Stats` with values `[Hq]` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: the arguments do not fit together; the message says which.
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
    """Return the indices of evenly spaced queries, ascending, with the last one; None for all."""
    if sample < 1:
        raise ValueError(f"sample must be at least 1 query; got {sample}. Use sample=None for all.")
    if sample >= Tq:
        return None
    steps = torch.arange(sample, device=device) * (Tq - 1) // max(sample - 1, 1)
    return Tq - 1 - steps.flip(0)

"""The statistics alone, streamed over blocks of scores, for any attention kernel.

One pass over QK^T in fp32, linear in memory. Registered as `qknorm::logit_stats` so that a
compiled graph sees one opaque node.

Shapes: B batch, Tq / Tk tokens, Hq / Hk heads, G = Hq / Hk, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.blocks import Span, hides_within, spans
from qknorm.ops.norm_rope import qk_norm_rope
from qknorm.ops.sinks import sink_logits
from qknorm.ops.stats import Rows, Stats, StatsRequest, check_request
from qknorm.spec import Mask, Rope, Sink

KEY_BLOCK = 512
# Scores held at once: 2 MiB in fp32, two such buffers alive.
SCORE_BUDGET = 1 << 19
# exp of anything below this is zero in fp32 and in fp64, and 0 * it is 0 where 0 * -inf is NaN.
HIDDEN = -800.0


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """Statistics stay exact when the user lets fp32 products round (TF32, bf16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


torch.library.define(
    "qknorm::logit_stats",
    "(Tensor q, Tensor k, Tensor? tokens, Tensor? documents, Tensor? key_padding, bool causal, "
    "int? window, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
)


def stream(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    tokens: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row maximum m, ln(l), entropy `[B, Hq, Tq]` and visible keys `[1 or B, Tq]`.

    `tokens` `[Tq]`, ascending: those of the queries where they are a sample; else the last Tq.
    With m the running maximum, l = sum exp(s - m) and t = sum exp(s - m) (s - m), the entropy is
    ln(l) - t / l. Unlike lse - E[s] it does not cancel at large logits.
    """
    mask = Mask(causal, window, documents, key_padding)
    B, Hq, Tq, D = q_BHTD.shape
    Hk, Tk = k_BHTD.shape[1:3]
    wide = spec.compute_dtype(q_BHTD.dtype)
    device = q_BHTD.device
    maximum = torch.full((B, Hq, Tq), -torch.inf, dtype=wide, device=device)
    log_sum = torch.full_like(maximum, -torch.inf)
    entropy = torch.zeros_like(maximum)
    per_row = 1 if documents is None and key_padding is None else B
    visible_keys = torch.zeros(per_row, Tq, dtype=torch.int64, device=device)

    rows = max(1, min(Tq, SCORE_BUDGET // max(1, B * Hq * min(KEY_BLOCK, Tk))))
    with torch.no_grad(), full_precision_matmul():
        for span in spans(mask, Tq, Tk, rows) if tokens is None else _sampled_spans(Tq, Tk, rows):
            queries = (span.q_lo, span.q_hi)
            n = span.q_hi - span.q_lo
            q = q_BHTD[:, :, span.q_lo : span.q_hi].to(wide).reshape(B, Hk, Hq // Hk * n, D)
            m = torch.full((B, Hq, n), -torch.inf, dtype=wide, device=device)
            l = torch.zeros_like(m)  # noqa: E741 - the name of the literature
            t = torch.zeros_like(m)
            for k_lo in range(span.k_lo, span.k_hi, KEY_BLOCK):
                k_hi = min(k_lo + KEY_BLOCK, span.k_hi)
                k = k_BHTD[:, :, k_lo:k_hi].to(wide)
                s = (q @ k.mT).view(B, Hq, n, k_hi - k_lo).mul_(scale)
                if tokens is not None or hides_within(mask, Tq, Tk, span._replace(k_lo=k_lo, k_hi=k_hi)):
                    if tokens is None:
                        visible = mask.visible(Tq, Tk, device, queries, (k_lo, k_hi))
                    else:
                        visible = mask.visible_to(tokens[span.q_lo : span.q_hi], Tk, (k_lo, k_hi))
                    visible_keys[:, span.q_lo : span.q_hi] += visible.sum(-1)
                    s.masked_fill_(~visible[:, None], -torch.inf)
                else:
                    visible_keys[:, span.q_lo : span.q_hi] += k_hi - k_lo
                m_new = torch.maximum(m, s.amax(-1))
                origin = torch.where(m_new == -torch.inf, 0.0, m_new)
                s.sub_(origin[..., None]).clamp_(min=HIDDEN)
                p = s.exp()
                shrink = torch.where(m == -torch.inf, 0.0, m - origin)
                decay = torch.where(m == -torch.inf, 0.0, shrink.exp())
                t = decay * (t + l * shrink)
                l = decay * l + p.sum(-1)  # noqa: E741
                t = t + p.mul_(s).sum(-1)
                m = m_new
            seen = m != -torch.inf
            maximum[:, :, span.q_lo : span.q_hi] = m
            log_sum[:, :, span.q_lo : span.q_hi] = l.log()
            entropy[:, :, span.q_lo : span.q_hi] = torch.where(seen, l.log() - t / l, 0.0)
    # Rounding can leave a one-key row at -1e-7.
    return maximum, log_sum, entropy.clamp_(min=0.0), visible_keys


# `impl` as a decorator would leave None in the place of the function.
torch.library.impl("qknorm::logit_stats", "CompositeExplicitAutograd")(stream)


def _sampled_spans(Tq: int, Tk: int, rows: int) -> Iterator[Span]:
    """Where the tokens of a sample lie is not asked: it would wait for the device."""
    for q_lo in range(0, Tq, rows):
        yield Span(q_lo, min(q_lo + rows, Tq), 0, Tk)


@torch.library.register_fake("qknorm::logit_stats")
def _(
    q: Tensor,
    k: Tensor,
    tokens: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = q.new_empty(q.shape[:3], dtype=spec.compute_dtype(q.dtype))
    per_row = 1 if documents is None and key_padding is None else q.shape[0]
    keys = q.new_empty((per_row, q.shape[2]), dtype=torch.int64)
    return row, torch.empty_like(row), torch.empty_like(row), keys


def stream_rows(
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
    maximum, log_sum, entropy, keys = torch.ops.qknorm.logit_stats(
        q_hat.detach(),
        k_hat.detach(),
        tokens,
        mask.documents,
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
    rows: int | None = None,
) -> Stats:
    """Exact statistics of an attention that runs elsewhere: max logit, entropy, sink mass.

    Takes no gradient and holds no T x T buffer. Arguments are those of `qknorm.attention`; pass q
    and k before the norm with their gains, or after it without.

    Args:
        q: `[B, Hq, Tq, D]`.
        k: `[B, Hk, Tk, D]`.
        stats: True, or "rows" to keep the values of each row.
        rows: look at this many queries only, evenly spaced, the last one among them; None for all. The
            maximum is then that of the sample.

    Returns:
        `Stats`, each value fp32 `[Hq]` (fp64 for fp64 input).

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_request(stats)
    with torch.no_grad():
        spec.check_attention(
            q,
            k,
            k,
            q_gain=q_gain,
            k_gain=k_gain,
            eps=eps,
            rope=rope,
            mask=mask,
            sink=None,
        )
        spec.check_sink(sink, q, k.shape[1], None)
        scale = spec.default_scale(q.shape[-1]) if scale is None else scale
        q_hat, k_hat = qk_norm_rope(q, k, q_gain=q_gain, k_gain=k_gain, eps=eps, rope=rope)
        sink_logit = sink_logits(q, sink, q_gain=q_gain, k_gain=k_gain, eps=eps, scale=scale)
        sample = None if rows is None else _sample(q.shape[2], rows, q.device)
        found = stream_rows(q_hat, k_hat, mask, scale, sink_logit, sample)
        return Stats.from_rows(found, keep_rows=stats == "rows")


def _sample(Tq: int, rows: int, device: torch.device) -> Tensor | None:
    """Evenly spaced queries, the last among them; None if that is all of them."""
    if rows < 1:
        raise ValueError(f"rows must be at least 1; got {rows}. Use rows=None for all.")
    if rows >= Tq:
        return None
    steps = torch.arange(rows, device=device) * (Tq - 1) // max(rows - 1, 1)
    return Tq - 1 - steps.flip(0)

"""What is measured at one call of attention, from q and k as they enter the product.

A mask of causality, window, documents and padding goes to `qknorm::logit_stats`, for which a device may
have a kernel of its own. Biases, soft-caps and `score_mod` are streamed in blocks.

Shapes: B batch, Tq / Tk tokens, Hq / Hk heads, D head width, n queries that are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from qknorm import spec
from qknorm.monitor.fields import FIELD, FUSED, new_buffer
from qknorm.monitor.view import Change, MaskOf, View, as_mask_of, both
from qknorm.ops.logit_stats import sampled_queries
from qknorm.ops.online_softmax import RowValues, stream_rows
from qknorm.spec import Mask


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How an attention was called, beside q and k.

    Attributes:
        scale: of the products.
        mask: bool (True: visible) or additive, of at most four axes that broadcast to
            `[B, Hq, Tq, Tk]`, or a function that makes a block of one.
        documents: integer ids `[1 or B, Tk]`, as in `qknorm.Mask`.
        sink: a logit per query head `[Hq]`.
        causal, window: as in `qknorm.Mask`.
        change: soft-cap or `score_mod`.
        change_hides: what `change` sends to -inf is hidden, as by a mask.
        sample: how many queries are looked at; None for all.
        cross: queries and keys are of different sequences, whatever their lengths.
    """

    scale: float
    mask: Tensor | MaskOf | None = None
    documents: Tensor | None = None
    sink: Tensor | None = None
    causal: bool = False
    window: int | None = None
    change: Change | None = None
    change_hides: bool = False
    sample: int | None = None
    cross: bool = False


class Rows(NamedTuple):
    """What is known of the rows and tokens of a call.

    Attributes:
        values: of the queries that are looked at.
        real: bool, broadcastable to `[B, Hq, n]`: those that count; None for all.
        starts: bool, the same: the first key that the query sees is one before which its own query sees
            nothing, the start of a sequence or document; None where that is not known.
        q_real, k_real: bool `[B or 1, T]`: tokens that are no padding; None for all.
    """

    values: RowValues
    real: Tensor | None
    starts: Tensor | None
    q_real: Tensor | None
    k_real: Tensor | None


def of_call(q: Tensor, k: Tensor, seen: Seen) -> Tensor:
    """The buffer of one call, q `[B, Hq, Tq, D]` and k `[B, Hk, Tk, D]` as they enter the product.

    Raises ValueError if they do not fit together.
    """
    (B, Hq, _, D), (Bk, Hk, _, Dk) = q.shape, k.shape
    if (Bk, Dk) != (B, D) or Hk == 0 or Hq % Hk:
        raise ValueError(f"q of shape {list(q.shape)} and k of shape {list(k.shape)} do not fit")
    buffer = new_buffer(Hq, q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        rows = rows_of(q, k, seen)
        _add_rows(buffer, rows, seen.sink)
        _add_rms(buffer, "q", q, rows.q_real)
        _add_rms(buffer, "k", k, rows.k_real)
    return buffer


def of_fused_call(q: Tensor, k: Tensor, *found: Tensor) -> Tensor:
    """The buffer of a call of which a fused pass found the fields of FUSED, per head or for all alike.
    Which of q and k are padding it does not say: their RMS is over all tokens."""
    buffer = new_buffer(q.shape[1], q.device)
    with torch.no_grad():
        for name, x in zip(FUSED, found, strict=True):
            buffer[FIELD[name]] = x
        _add_rms(buffer, "q", q, None)
        _add_rms(buffer, "k", k, None)
    return buffer


def rows_of(q: Tensor, k: Tensor, seen: Seen) -> Rows:
    """The statistics of each row, by the plainest way that serves the mask."""
    (B, _, Tq, _), Tk = q.shape, k.shape[2]
    queries = None if seen.sample is None else sampled_queries(Tq, seen.sample, torch.device("cpu"))
    if seen.change is not None:
        return _streamed_rows(q, k, seen, queries)
    if seen.mask is None:
        return _plain_rows(q, k, seen, None, queries)
    if isinstance(seen.mask, Tensor) and seen.mask.dtype == torch.bool:
        mask = seen.mask[(None,) * (4 - seen.mask.dim())]
        if all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (1, 2)):
            return _plain_rows(q, k, seen, mask[:, 0, 0].expand(B, Tk), queries)
    return _streamed_rows(q, k, seen, queries)


def _plain_rows(
    q: Tensor, k: Tensor, seen: Seen, key_padding: Tensor | None, queries: Tensor | None
) -> Rows:
    (B, _, Tq, _), Tk = q.shape, k.shape[2]
    documents = None if seen.documents is None else seen.documents.expand(B, Tk)
    mask = Mask(seen.causal, seen.window, documents, key_padding)
    some = None if queries is None else queries.to(q.device)
    tokens = None if some is None else some + (Tk - Tq)
    *of_rows, keys, first = torch.ops.qknorm.logit_stats(
        *(q if some is None else q[:, :, some], k, tokens, mask.ids, mask.key_padding),
        *(mask.causal, mask.window, seen.scale),
    )
    maximum, log_sum, entropy, first_logit = of_rows
    values = RowValues(maximum, log_sum, entropy, keys[:, None], first[:, None], first_logit)
    k_real = None
    if documents is not None or key_padding is not None:
        k_real = mask.real_queries(Tk, Tk, q.device)
    if seen.cross or Tq != Tk:
        return Rows(values, None, None, None, k_real)
    if tokens is None:
        starts = (first == torch.arange(Tq, device=q.device)).gather(1, first)
    else:
        starts = ~_sees_before(mask, first)
    real = k_real if k_real is None or some is None else k_real[:, some]
    return Rows(values, None if real is None else real[:, None], starts[:, None], k_real, k_real)


def _sees_before(mask: Mask, token: Tensor) -> Tensor:
    """Bool `[B or 1, n]`: whether the query at a token `[B or 1, n]` sees a key before its own."""
    Tk = int(token.max()) + 1
    key = torch.arange(Tk, device=token.device)
    before = key < token[..., None]
    if mask.window is not None:
        before = before & (token[..., None] - key < mask.window)
    if mask.ids is not None:
        ids = mask.ids[:, :Tk]
        before = before & (ids[:, None] == ids.gather(1, token.expand(len(ids), -1))[..., None])
    if mask.key_padding is not None:
        before = before & mask.key_padding[:, None, :Tk]
    return before.any(-1)


def _streamed_rows(q: Tensor, k: Tensor, seen: Seen, queries: Tensor | None) -> Rows:
    (B, Hq, Tq, _), Tk = q.shape, k.shape[2]
    mask_of = as_mask_of(seen.mask)
    if seen.documents is not None:
        mask_of = both(mask_of, _documents_of(seen.documents, Tk - Tq))
    view = View(
        Tq=Tq,
        Tk=Tk,
        queries=torch.arange(Tq) if queries is None else queries,
        mask_of=mask_of,
        causal=seen.causal,
        window=seen.window,
        change=seen.change,
        change_hides=seen.change_hides,
    )
    some = None if queries is None else queries.to(q.device)
    view = replace(view, **view.sizes(B, Hq, q.device))
    values = stream_rows(q if some is None else q[:, :, some], k, view, seen.scale)
    shown, first = view.survey(values.log_sum)
    first = values.first_key if queries is None else first
    k_real = None if mask_of is None and not seen.change_hides else shown
    if seen.cross or Tq != Tk:
        return Rows(values, None, None, None, k_real)
    starts = (first == torch.arange(Tq, device=q.device)).gather(2, values.first_key)
    real = k_real if k_real is None or some is None else k_real[:, some]
    return Rows(values, None if real is None else real[:, None], starts, k_real, k_real)


def _documents_of(documents: Tensor, shift: int) -> MaskOf:
    """Own documents, as a mask of blocks; query i is token i + shift."""
    mask = Mask(documents=documents)

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        return mask.visible_to(queries + shift, documents.shape[1])[:, None][..., keys]

    return mask_of


def _add_rows(buffer: Tensor, rows: Rows, sink: Tensor | None) -> None:
    """Reduce rows to heads."""
    values = rows.values
    top, log_sum, entropy = values.max_logit, values.log_sum, values.entropy_nats
    counted = values.visible_keys > 0
    if rows.real is not None:
        counted = counted & rows.real
    choice = (counted & (values.visible_keys > 1)).expand(top.shape)
    counted = counted.expand(top.shape)
    ratio = entropy / values.visible_keys.clamp(min=2).to(entropy.dtype).log()
    sink_mass = torch.zeros_like(top)
    if sink is not None:
        sink_mass = torch.sigmoid(sink[:, None].to(top) - top - log_sum)
    first_mass = (values.first_logit - top - log_sum).exp() * (1 - sink_mass)
    if rows.starts is not None:
        first_mass = torch.where(rows.starts, first_mass, 0.0)

    def total(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0.0).sum((0, 2), dtype=buffer.dtype)

    buffer[FIELD["max_logit"]] = (
        torch.where(counted, top, -torch.inf).transpose(0, 1).flatten(1).amax(-1)
    )
    for name, x in (("entropy", entropy), ("sink", sink_mass), ("first", first_mass)):
        buffer[FIELD[name]] = total(x, counted)
    buffer[FIELD["ratio"]] = total(ratio, choice)
    buffer[FIELD["rows"]] = counted.sum((0, 2))
    buffer[FIELD["ratio_rows"]] = choice.sum((0, 2))


def _add_rms(buffer: Tensor, name: str, x_BHTD: Tensor, real: Tensor | None) -> None:
    """Root mean square of each vector of real tokens: sum, sum of squares, count, per head."""
    B, H, T, D = x_BHTD.shape
    squares = x_BHTD.to(spec.compute_dtype(x_BHTD.dtype)).square().sum(-1)
    rows: Tensor | int = B * T
    if real is not None:
        real = real.expand(B, T)
        squares, rows = torch.where(real[:, None], squares, 0.0), real.sum()
    at = FIELD[f"{name}_rms"]
    buffer[at + 1, :H] = squares.sum((0, 2), dtype=buffer.dtype) / D
    buffer[at, :H] = squares.sqrt_().sum((0, 2), dtype=buffer.dtype) / D**0.5
    buffer[at + 2, :H] = rows

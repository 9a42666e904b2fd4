"""Functions that launch the kernels. None of them waits for the device, and grids depend on shapes only.

Shapes: q [B, Hq, Tq, D]; k [B, Hk, Tk, D]; v [B, Hk, Tk, V]. The stride of the last axis is 1.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qknorm.ops.backends.fused import NONE, ROWS, Found, Inputs
from qknorm.ops.backends.triton import tiles as t
from qknorm.ops.backends.triton.kernels import (
    backward as backward_kernels,
)
from qknorm.ops.backends.triton.kernels import (
    decode as decode_kernels,
)
from qknorm.ops.backends.triton.kernels import (
    documents as document_kernels,
)
from qknorm.ops.backends.triton.kernels.forward import attention_forward
from qknorm.ops.backends.triton.kernels.logit_stats import logit_stats_rows
from qknorm.ops.backends.triton.kernels.prep import prep_backward, prep_forward
from qknorm.ops.backends.triton.problem import LOG2E, Problem, readable

LAYOUTS = {None: 0, "half": 1, "interleaved": 2}


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _launch(kernel: Any, grid: tuple[int, ...], tiles: t.Tiles, *args: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first tensor argument, which may not be the current device.

    enable_fp_fusion is set explicitly, because its default differs between releases of Triton.
    """
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](
            *args,
            **constants,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,
        )


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return x, or `other` if x is None.

    A kernel needs a tensor for every pointer argument, even for one that its constants keep it from
    reading.
    """
    return other if x is None else x


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


# -- norm and RoPE


def prepare(p: Problem, *, with_q: bool = True) -> Problem:
    """Return the problem with q and k normalised and rotated, or with k only if `with_q` is False."""
    needs_k = p.k_gain is not None or p.cos is not None
    needs_q = with_q and (p.q_gain is not None or p.cos is not None)
    q_hat = p.q.new_empty(p.q.shape) if needs_q else p.q
    k_hat = p.k.new_empty(p.k.shape) if needs_k else p.k
    if needs_q or needs_k:
        _prepare(p, q_hat if needs_q else None, k_hat if needs_k else None)
    if with_q:
        return replace(p, q=q_hat, k=k_hat, q_gain=None, k_gain=None, cos=None, sin=None, layout=None)
    return replace(p, k=k_hat, k_gain=None)


def _prepare(p: Problem, q_hat: Tensor | None, k_hat: Tensor | None) -> None:
    B, Hq, Hk, Tq, Tk, D, _ = p.sizes
    heads_q, heads_k = Hq if q_hat is not None else 0, Hk if k_hat is not None else 0
    tiles = p.tiles("prep")
    longest = max(Tq if heads_q else 0, Tk if heads_k else 0)
    grid = (_cdiv(longest, tiles.rows), heads_q + heads_k, B)
    _launch(
        prep_forward, grid, tiles,
        p.q, *_strides(p.q), _or(p.q_gain, p.q), _or(q_hat, p.q), heads_q, Tq,
        p.k, *_strides(p.k), _or(p.k_gain, p.k), _or(k_hat, p.k), heads_k, Tk,
        _or(p.cos, p.q), _or(p.sin, p.q), p.rope_stride(), p.eps,
        D=D, R=p.rotary_width, Q_NORM=p.q_gain is not None, K_NORM=p.k_gain is not None,
        ROPE=LAYOUTS[p.layout], BLOCK_T=tiles.rows, BLOCK_D=t.block(D),
    )  # fmt: skip


def unprepare(
    p: Problem, dq_hat: Tensor, dk_hat: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and both gains, given those of q_hat and k_hat (contiguous)."""
    if p.is_prepared():
        return dq_hat, dk_hat, None, None
    B, Hq, Hk, Tq, Tk, D, _ = p.sizes
    tiles = p.tiles("prep")
    counts = _cdiv(Tq, tiles.rows), _cdiv(Tk, tiles.rows)
    dq, dk = torch.empty_like(dq_hat), torch.empty_like(dk_hat)
    parts = [
        None if gain is None else gain.new_empty(B * count, *gain.shape)
        for gain, count in zip((p.q_gain, p.k_gain), counts, strict=True)
    ]
    _launch(
        prep_backward, (max(counts), Hq + Hk, B), tiles,
        dq_hat, p.q, *_strides(p.q), _or(p.q_gain, p.q), dq, _or(parts[0], p.q), Hq, Tq, counts[0],
        dk_hat, p.k, *_strides(p.k), _or(p.k_gain, p.k), dk, _or(parts[1], p.k), Hk, Tk, counts[1],
        _or(p.cos, p.q), _or(p.sin, p.q), p.rope_stride(), p.eps,
        D=D, R=p.rotary_width, Q_NORM=p.q_gain is not None, K_NORM=p.k_gain is not None,
        ROPE=LAYOUTS[p.layout], BLOCK_T=tiles.rows, BLOCK_D=t.block(D),
    )  # fmt: skip
    dq_gain, dk_gain = (None if part is None else part.sum(0) for part in parts)
    return dq, dk, dq_gain, dk_gain


# -- documents


def _ranges(own: Tensor, other: Tensor, block: int) -> Tensor:
    """Return the ranges that the kernel `tile_ranges` computes, int32 `[B, tiles, 2]`."""
    B, T = own.shape
    count = _cdiv(T, block)
    ranges = torch.empty(B, count, 2, dtype=torch.int32, device=own.device)
    one = t.Tiles(block, 0, 4, 1)
    _launch(
        document_kernels.tile_ranges, (count, B), one, own, other, ranges, T, other.shape[1],
        BLOCK=block, CHUNK=t.ID_CHUNK,
    )  # fmt: skip
    return ranges


def _query_ranges(p: Problem, block: int) -> Tensor | None:
    if p.query_ids is None or p.key_ids is None:
        return None
    return _ranges(p.query_ids, p.key_ids, block)


def _signed_counts(p: Problem, tokens: Tensor | None = None) -> Tensor:
    """Return the signed counts that the kernel `visible_keys` computes, int32 `[B, Tq]`."""
    assert p.query_ids is not None
    assert p.key_ids is not None
    B, _, _, Tq, Tk, *_ = p.sizes
    tiles = t.Tiles(64, 64, 4, 1)
    counts = torch.empty(B, Tq, dtype=torch.int32, device=p.q.device)
    ranges = _ranges(p.query_ids, p.key_ids, tiles.rows)
    _launch(
        document_kernels.visible_keys, (_cdiv(Tq, tiles.rows), B), tiles,
        p.query_ids, p.key_ids, _or(tokens, counts), ranges, counts, Tq, Tk, p.window or 0,
        SAMPLED=tokens is not None, CAUSAL=p.causal, WINDOW=p.window is not None,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
    )  # fmt: skip
    return counts


def _counts_by_position(p: Problem, tokens: Tensor | None = None) -> Tensor:
    """Return the number of visible keys of each row, int32 `[1, Tq]`, for a mask without ids."""
    Tq, Tk = p.q.shape[2], p.k.shape[2]
    token = torch.arange(Tk - Tq, Tk, device=p.q.device, dtype=torch.int32)
    token = token if tokens is None else tokens.int()
    lo, hi = torch.zeros_like(token), torch.full_like(token, Tk)
    if p.causal:
        hi = torch.minimum(hi, token + 1)
    if p.window is not None:
        lo = (token - p.window + 1).clamp(min=0)
        hi = torch.minimum(hi, token + p.window)
    return (hi - lo).clamp(min=0)[None]


class _Wanted:
    """The buffers into which kernels write the statistics of one call.

    Args:
        p: the call.
        parts: the number of programs that write partial results for each head.
        stats: NONE, HEADS or ROWS.
    """

    def __init__(self, p: Problem, parts: int, stats: int) -> None:
        self.p, self.stats = p, stats
        B, Hq, _, Tq, *_ = p.sizes
        make = p.q.new_empty
        self.counts = _signed_counts(p) if stats and p.key_ids is not None else None
        self.heads = make((4, parts, Hq) if stats else 0, dtype=torch.float32)
        self.rows = make((3, B, Hq, Tq) if stats == ROWS else 0, dtype=torch.float32)

    def finish(self, out: Tensor, lse: Tensor) -> Found:
        """Reduce the partial results in a fixed order, and return all results of the call."""
        p, wants_rows = self.p, self.stats == ROWS
        if self.stats == NONE:
            nothing = self.heads.new_empty(0, dtype=torch.int64)
            return Found(out, lse, self.heads, nothing, self.rows, nothing.clone())
        counts = _counted_by_position(p) if self.counts is None else None
        visible = self.heads.new_empty(0, dtype=torch.int64)
        if counts is None or wants_rows:
            signed = _counts_by_position(p) if self.counts is None else self.counts
            if counts is None:
                times = p.q.shape[0] if self.counts is None else 1
                counts = torch.stack([(signed > 0).sum(), (signed > 1).sum()]) * times
            if wants_rows:
                visible = torch.where(signed < 0, -1 - signed, signed).long()
        heads = torch.cat([self.heads[:1].amax(1), self.heads[1:].sum(1)])
        return Found(out, lse, heads, counts, self.rows, visible)


def _counted_by_position(p: Problem) -> Tensor | None:
    """Return the number of rows with one key or more and with two or more, int64 `[2]`.

    The result is None if the numbers do not follow from the sizes by a simple formula.
    """
    if p.window is not None and not (p.causal and p.window > 1):
        return None
    B, _, _, Tq, Tk, *_ = p.sizes
    counts = p.q.new_empty(2, dtype=torch.int64)
    for i, least in enumerate((1, 2)):
        rows = Tq if Tk >= least else 0
        if p.causal:
            rows = min(rows, max(0, Tk - least + 1))
        counts[i].fill_(B * rows)  # fill_ launches a kernel; a copy from the host would wait
    return counts


# -- attention


def forward(p: Problem, stats: int) -> Found:
    """Run the forward pass.

    Its results are out `[B, Hq, Tq, V]`, lse `[2, B, Hq, Tq]` and the statistics. The two parts of lse
    are an exponent and the log2 of the sum relative to it, with the sink.
    """
    B, Hq, Hk, Tq, Tk, D, V = p.sizes
    out = p.q.new_empty(B, Hq, Tq, V)
    lse = p.q.new_empty(2, B, Hq, Tq, dtype=torch.float32)
    if Tk == 0 or lse.numel() == 0:
        return _without_pairs(p, out, lse, stats)
    if Tq * (Hq // Hk) <= t.DECODE_ROWS and Tk > Tq:
        return _decode(prepare(p), out, lse, stats)
    p = prepare(p, with_q=False)
    tiles = p.tiles("forward")
    count = _cdiv(Tq, tiles.rows)
    wanted = _Wanted(p, B * count, stats)
    cos, sin = p.cos, p.sin
    if cos is not None and sin is not None:
        cos, sin = cos[..., Tk - Tq :, :], sin[..., Tk - Tq :, :]
    _launch(
        attention_forward, (count, Hq, B), tiles,
        p.q, *_strides(p.q), p.k, *_strides(p.k), p.v, *_strides(p.v),
        _or(p.q_gain, p.q), _or(cos, p.q), _or(sin, p.q), p.rope_stride(),
        _or(p.sink, p.q), _or(p.query_ids, p.q), _or(p.key_ids, p.q),
        _or(_query_ranges(p, tiles.rows), p.q), _or(wanted.counts, p.q),
        out, lse, wanted.heads, wanted.rows,
        Hq, Hk, Tq, Tk, p.window or 0, p.eps, abs(p.scale), abs(p.log2_scale),
        D=D, V=V, R=p.rotary_width, NORM=p.q_gain is not None, ROPE=LAYOUTS[p.layout],
        NEGATIVE=p.scale < 0, **p.mask, SINK=p.sink is not None, STATS=stats,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, **p.blocks(),
    )  # fmt: skip
    return wanted.finish(out, lse)


def _without_pairs(p: Problem, out: Tensor, lse: Tensor, stats: int) -> Found:
    """Return the results of a call without queries or without keys, where no row sees a key."""
    out.zero_()
    lse.zero_()
    if p.sink is not None:
        lse[0] = (p.sink * LOG2E)[:, None]
    wanted = _Wanted(replace(p, query_ids=None, key_ids=None), 1, stats)
    if not stats:
        return wanted.finish(out, lse)
    wanted.heads.zero_()[0] = -torch.inf
    if stats == ROWS:
        wanted.rows[:2] = -torch.inf
        wanted.rows[2] = 0.0
    found = wanted.finish(out, lse)
    visible = found.visible.new_zeros(p.rows_of_batch, p.q.shape[2]) if stats == ROWS else found.visible
    return found._replace(counts=found.counts.zero_(), visible=visible)


def _decode(p: Problem, out: Tensor, lse: Tensor, stats: int) -> Found:
    """Run the forward pass for few queries and many keys, see kernels/decode.py."""
    B, Hq, Hk, Tq, Tk, D, V = p.sizes
    tiles = p.tiles("decode")
    splits = min(_cdiv(Tk, t.DECODE_KEYS), t.MAX_SPLITS)
    per_split = _cdiv(_cdiv(Tk, splits), tiles.keys) * tiles.keys
    acc = p.q.new_empty(B, Hk, splits, tiles.rows, V, dtype=torch.float32)
    mlt = p.q.new_empty(3, B, Hk, splits, tiles.rows, dtype=torch.float32)
    wanted = _Wanted(p, B, stats)
    sizes = Hq, Hk, Tq, Tk
    c = abs(p.log2_scale)
    _launch(
        decode_kernels.decode_split, (splits, Hk, B), tiles,
        p.q, *_strides(p.q), p.k, *_strides(p.k), p.v, *_strides(p.v),
        _or(p.query_ids, p.q), _or(p.key_ids, p.q), acc, mlt, *sizes, p.window or 0, c, per_split,
        D=D, V=V, NEGATIVE=p.scale < 0, **p.mask, ENTROPY=stats > 0,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, **p.blocks(),
    )  # fmt: skip
    _launch(
        decode_kernels.decode_merge, (Hq, B), tiles,
        acc, mlt, _or(p.sink, p.q), _or(wanted.counts, p.q), out, lse, wanted.heads, wanted.rows,
        *sizes, splits, p.window or 0, abs(p.scale), c,
        V=V, **p.mask, SINK=p.sink is not None, STATS=stats,
        BLOCK_T=1 << (Tq - 1).bit_length(), SPLIT_M=tiles.rows, BLOCK_V=t.block(V),
    )  # fmt: skip
    return wanted.finish(out, lse)


def backward(
    p: Problem, d_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, both gains and the sink."""
    B, Hq, Hk, Tq, Tk, D, V = p.sizes
    dq, dk, dv = (x.new_empty(x.shape) for x in (p.q, p.k, p.v))
    if Tk == 0 or lse.numel() == 0:
        for x in (dq, dk, dv):
            x.zero_()
        q_gain, k_gain, sink = (
            None if x is None else torch.zeros_like(x) for x in (p.q_gain, p.k_gain, p.sink)
        )
        return dq, dk, dv, q_gain, k_gain, sink
    d_out = readable(d_out)
    hat = prepare(p)
    rows = p.tiles("dq").rows
    count = _cdiv(Tq, rows)
    delta = torch.empty_like(lse[0])
    d_sink = None if p.sink is None else p.sink.new_empty(B * count, Hq)
    _launch(
        backward_kernels.delta_and_sink, (count, Hq, B), t.Tiles(rows, 0, 4, 1),
        d_out, *_strides(d_out), out, lse, _or(p.sink, p.q), delta, _or(d_sink, p.q), Hq, Tq,
        V=V, SINK=p.sink is not None, BLOCK_M=rows, BLOCK_V=t.block(V),
    )  # fmt: skip
    tensors = (
        d_out, *_strides(d_out), hat.q, *_strides(hat.q), hat.k, *_strides(hat.k), p.v, *_strides(p.v),
        lse, delta, _or(p.query_ids, p.q), _or(p.key_ids, p.q),
    )  # fmt: skip
    sizes = Hq, Hk, Tq, Tk, p.window or 0, p.scale, p.log2_scale
    tiles = p.tiles("dq")
    _launch(
        backward_kernels.attention_dq, (count, Hq, B), tiles,
        *tensors, _or(_query_ranges(p, tiles.rows), p.q), dq, *sizes,
        D=D, V=V, **p.mask, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, **p.blocks(),
        FULL_LOOP=tiles.full_loop and p.key_ids is None,
    )  # fmt: skip
    tiles = p.tiles("dkdv")
    ranges = None
    if p.query_ids is not None and p.key_ids is not None:
        ranges = _ranges(p.key_ids, p.query_ids, tiles.keys)
    _launch(
        backward_kernels.attention_dkdv, (_cdiv(Tk, tiles.keys), Hk, B), tiles,
        *tensors, _or(ranges, p.q), dk, dv, *sizes,
        D=D, V=V, **p.mask, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, **p.blocks(),
        FULL_LOOP=tiles.full_loop and p.key_ids is None,
    )  # fmt: skip
    dq, dk, dq_gain, dk_gain = unprepare(p, dq, dk)
    return dq, dk, dv, dq_gain, dk_gain, None if d_sink is None else d_sink.sum(0)


def logit_stats(
    q: Tensor,
    k: Tensor,
    tokens: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Compute the operator `qknorm::logit_stats`, see `qknorm.ops.logit_stats.rows_by_stream`."""
    p = Problem.of(
        Inputs(
            q, k, k, documents=documents, key_padding=key_padding,
            causal=causal, window=window, scale=scale,
        )
    )  # fmt: skip
    B, Hq, Hk, Tq, Tk, D, _ = p.sizes
    rows = p.q.new_empty(3, B, Hq, Tq, dtype=torch.float32)
    if tokens is not None and documents is not None:
        p = replace(p, query_ids=documents.long().clamp(min=-1)[:, tokens].contiguous())
    if Tk == 0 or rows.numel() == 0:
        rows[:2] = -torch.inf
        rows[2] = 0.0
        visible = rows.new_zeros(p.rows_of_batch, Tq, dtype=torch.int64)
        return *(x.clone() for x in rows), rows[0].clone(), visible, visible.clone()
    tiles = p.tiles("logit_stats")
    _launch(
        logit_stats_rows, (_cdiv(Tq, tiles.rows), Hq, B), tiles,
        p.q, *_strides(p.q), p.k, *_strides(p.k), _or(tokens, p.q),
        _or(p.query_ids, p.q), _or(p.key_ids, p.q), _or(_query_ranges(p, tiles.rows), p.q),
        rows, Hq, Hk, Tq, Tk, p.window or 0, abs(p.scale), abs(p.log2_scale),
        D=D, NEGATIVE=p.scale < 0, SAMPLED=tokens is not None, **p.mask,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_D=t.block(D),
    )  # fmt: skip
    signed = _counts_by_position(p, tokens) if p.key_ids is None else _signed_counts(p, tokens)
    visible = torch.where(signed < 0, -1 - signed, signed).long()
    first_key = _first_keys(p, visible, tokens)
    first_logit = _logits_of(p, first_key).masked_fill(visible[:, None] == 0, -torch.inf)
    # The results of an operator may not share memory.
    return *(x.clone() for x in rows), first_logit, visible, first_key


def _first_keys(p: Problem, visible: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the index of the first visible key of each query, int64 `[1 or B, Tq]`; 0 if none is."""
    Tq, Tk = p.q.shape[2], p.k.shape[2]
    token = torch.arange(Tk - Tq, Tk, device=p.q.device) if tokens is None else tokens
    first = (
        token.new_zeros(1, len(token)) if p.window is None else (token - p.window + 1).clamp(min=0)[None]
    )
    if p.key_ids is not None and p.query_ids is not None:
        # The keys are sorted by id and then by position, and each id is replaced by its rank. Then
        # rank * Tk + key ascends, and bisection finds the first key of an id that is not before `first`.
        order = p.key_ids.argsort(dim=1, stable=True)
        ascending = p.key_ids.gather(1, order)
        rank = torch.nn.functional.pad((ascending[:, 1:] != ascending[:, :-1]).cumsum(1), (1, 0))
        place = torch.searchsorted(ascending, p.query_ids.contiguous()).clamp(max=Tk - 1)
        wanted = rank.gather(1, place) * Tk + first
        at = torch.searchsorted(rank * Tk + order, wanted).clamp(max=Tk - 1)
        first = order.gather(1, at)
    return torch.where(visible > 0, first, 0)


def _logits_of(p: Problem, key: Tensor) -> Tensor:
    """Return the logits of one given key for each query, fp32 `[B, Hq, Tq]`."""
    B, Hq, Hk, Tq, _, D, _ = p.sizes
    chosen = p.k.float().gather(2, key.expand(B, Tq)[:, None, :, None].expand(B, Hk, Tq, D))
    q = p.q.float().view(B, Hk, Hq // Hk, Tq, D)
    return p.scale * (q * chosen[:, :, None]).sum(-1).flatten(1, 2)

"""Norm, RoPE, attention and statistics in one pass of C++ (csrc/), forward and backward.

Blocks of the scores live in cache, hidden blocks are skipped, and the statistics fall out of the
softmax that is computed anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qknorm.ops.backends.call import Call, Case, refuse_second_derivative, token_ids
from qknorm.ops.backends.cpu_library import DTYPES, LIBRARY, ROPE, Args, Library
from qknorm.ops.stats import Stats, StatsRequest

MAX_WIDTH = 256
INT32_MAX = 2**31 - 1


def refuses(case: Case) -> str | None:
    """What it cannot do in this case, or None."""
    if case.device != "cpu":
        return f"tensors on {case.device}"
    if case.dtype not in DTYPES:
        return f"{str(case.dtype).removeprefix('torch.')} inputs"
    if max(case.head_dim, case.value_dim) > MAX_WIDTH:
        return f"heads wider than {MAX_WIDTH}"
    if case.sink_by_row:
        return "sinks whose logit differs by query"
    if case.zero_scale:
        return "a scale of 0"
    return f"this machine ({LIBRARY})" if isinstance(LIBRARY, str) else None


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """out `[B, Hq, Tq, Dv]` in v's dtype, and the statistics if they are asked for."""
    cos, sin, layout = (None, None, None) if call.rope is None else _table(call)
    sink = None if call.sink_logit is None else call.sink_logit[:, 0]
    mask = call.mask
    out, heads, counts, top, log_sum, entropy, keys = _CpuAttention.apply(
        *(call.q, call.k, call.v, call.q_gain, call.k_gain, sink),
        *(cos, sin, mask.documents, mask.key_padding, layout),
        *(mask.causal, mask.window, call.eps, call.scale, _WANTED[call.stats]),
    )
    if not call.stats:
        return out, None
    return out, call.packed(heads, counts, top, log_sum, entropy, keys)


# What `stats` of the C++ operator takes.
_NONE, _HEADS, _ROWS = range(3)
_WANTED: dict[StatsRequest, int] = {False: _NONE, True: _HEADS, "rows": _ROWS}


def _table(call: Call) -> tuple[Tensor, Tensor, str]:
    assert call.rope is not None
    return call.rope.cos, call.rope.sin, call.rope.layout


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? q_gain, Tensor? k_gain, Tensor? sink"
_OPTIONS = (
    "Tensor? cos, Tensor? sin, Tensor? documents, Tensor? key_padding, str? layout, bool causal, "
    "int? window, float eps, float scale"
)
torch.library.define(
    "qknorm::cpu_forward",
    f"({_INPUTS}, {_OPTIONS}, int stats) -> ({', '.join(['Tensor'] * 8)})",
)
torch.library.define(
    "qknorm::cpu_backward",
    f"(Tensor d_out, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class _CpuAttention(torch.autograd.Function):
    """Ties the forward to the backward. Second derivatives are refused, not wrong."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        out, lse, *statistics = torch.ops.qknorm.cpu_forward(*arguments)
        inputs, options = arguments[:6], arguments[6:-1]
        ctx.save_for_backward(out, lse, *inputs, *options[:4])
        ctx.options = options[4:]
        ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *statistics: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("cpu")
        saved = ctx.saved_tensors
        grads = torch.ops.qknorm.cpu_backward(d_out, *saved, *ctx.options)
        inputs = saved[2:8]
        return *(None if x is None else g for x, g in zip(inputs, grads, strict=True)), *(None,) * 10


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    sink: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    layout: str | None,
    causal: bool,
    window: int | None,
    eps: float,
    scale: float,
) -> tuple[Args, list[Tensor | None]]:
    """The structure of a call, and the tensors that it points into and that must outlive it."""
    args = Args()
    args.B, args.Hq, args.Tq, args.D = q.shape
    args.Hk, args.Tk = k.shape[1:3]
    args.Dv = v.shape[3]
    args.dtype, args.rope = DTYPES[q.dtype], ROPE[layout]
    args.causal = causal
    args.window = min(window or 0, args.Tq + args.Tk)  # as good as none, and cannot overflow
    args.eps, args.scale = eps, scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    small = [None if x is None else x.float().contiguous() for x in (q_gain, k_gain, cos, sin, sink)]
    q_gain, k_gain, cos, sin, sink = small
    if cos is not None:
        args.R = 2 * cos.shape[-1]
        args.rope_stride = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
    query_ids, key_ids = _ids(q, k, documents, key_padding)
    args.point(q=q, k=k, v=v, query_ids=query_ids, key_ids=key_ids)
    args.point(q_gain=q_gain, k_gain=k_gain, cos=cos, sin=sin, sink=sink)
    return args, [q, k, v, *small, query_ids, key_ids]


def _ids(
    q: Tensor, k: Tensor, documents: Tensor | None, key_padding: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The ids of `token_ids` in int32."""
    if documents is not None and documents.numel() and int(documents.long().max()) > INT32_MAX:
        documents = documents.long()
        documents = torch.where(documents < 0, -1, torch.unique(documents, return_inverse=True)[1])
    queries, keys = token_ids(q, k, documents, key_padding)
    return (None, None) if queries is None or keys is None else (queries.int(), keys.int())


def _library() -> Library:
    assert not isinstance(LIBRARY, str)  # the support table has seen to it
    return LIBRARY


@torch.library.impl("qknorm::cpu_forward", "CPU")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *call, stats = arguments
    q, v = call[0], call[2]
    args, keep = _arguments(*call)
    shape = q.shape[:3]
    out = q.new_empty(*shape, v.shape[-1])
    lse = torch.empty(2, *shape, dtype=torch.float32)  # see args.h
    args.point(out=out, lse=lse)
    per_row = q.shape[0] if args.key_ids else 1
    heads, counts, rows, keys = _empty_statistics(lse[0], per_row, stats)
    if stats:
        args.point(head_stats=heads, row_counts=counts)
    if stats == _ROWS:
        args.point(row_max=rows[0], row_log_sum=rows[1], row_entropy=rows[2], visible_keys=keys)
    if lse.numel():
        _library().run("forward", args)
    elif stats:
        counts.zero_()
        heads.zero_()[0].fill_(-torch.inf)
    del keep
    return out, lse, heads, counts, *rows, keys


def _empty_statistics(
    row: Tensor, batch: int, stats: int
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Head statistics `[4, Hq]`, counts `[2]`, three values of each row and its keys `[batch, Tq]`;
    empty where they are not asked for."""
    rows = [torch.empty_like(row) if stats == _ROWS else row.new_empty(0) for _ in range(3)]
    return (
        row.new_empty((4, row.shape[1]) if stats else 0),
        row.new_empty(2 if stats else 0, dtype=torch.int64),
        rows,
        row.new_zeros((batch, row.shape[2]) if stats == _ROWS else 0, dtype=torch.int64),
    )


@torch.library.impl("qknorm::cpu_backward", "CPU")
def _backward(d_out: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    q, k, v, q_gain, k_gain, sink = call[:6]
    args, keep = _arguments(*call)
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    library = _library()
    some = lse.numel() > 0 and k.shape[:3].numel() > 0
    make = torch.empty if some else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype) for x in (q, k, v))
    parts = [
        None if gain is None else make(x.shape[0] * -(-x.shape[2] // part), x.shape[1], x.shape[3])
        for x, gain, part in ((q, q_gain, library.query_part), (k, k_gain, library.key_part))
    ]
    d_sink = None if sink is None else make(q.shape[:2])
    args.point(out=out, lse=lse, d_out=d_out, dq=dq, dk=dk, dv=dv)
    args.point(dq_gain=parts[0], dk_gain=parts[1], d_sink=d_sink)
    if some:
        _library().run("backward", args)
    del keep
    small = [
        q.new_empty(0) if like is None or part is None else part.sum(0).to(like.dtype)
        for like, part in zip((q_gain, k_gain, sink), (*parts, d_sink), strict=True)
    ]
    return dq, dk, dv, *small


@torch.library.register_fake("qknorm::cpu_forward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    q, v, stats = arguments[0], arguments[2], arguments[-1]
    masked = arguments[8] is not None or arguments[9] is not None
    lse = q.new_empty(2, *q.shape[:3], dtype=torch.float32)
    heads, counts, rows, keys = _empty_statistics(lse[0], q.shape[0] if masked else 1, stats)
    return q.new_empty(*q.shape[:3], v.shape[-1]), lse, heads, counts, *rows, keys


@torch.library.register_fake("qknorm::cpu_backward")
def _(d_out: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    q, k, v, q_gain, k_gain, sink = call[:6]
    small = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q_gain, k_gain, sink)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *small

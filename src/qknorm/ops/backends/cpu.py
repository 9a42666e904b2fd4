"""The `cpu` backend: norm, RoPE, attention and statistics in C++ (csrc/), forward and backward.

The scores are computed block by block and stay in cache, hidden blocks are skipped, and the statistics
come from the softmax that attention needs anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qknorm.ops.backends import fused
from qknorm.ops.backends.call import Backend, Call, Case, refuses_derivatives
from qknorm.ops.backends.cpu_library import (
    DTYPES,
    KEY_PART,
    LIBRARY,
    QUERY_PART,
    ROPE,
    Args,
    Library,
)
from qknorm.ops.backends.fused import Found, Inputs
from qknorm.ops.backends.ids import token_ids
from qknorm.ops.stats import Stats

MAX_WIDTH = 256
INT32_MAX = 2**31 - 1


def refuses(case: Case) -> str | None:
    """Return what the backend does not support about this case, or None."""
    if case.device != "cpu":
        return f"tensors on {case.device}"
    if case.dtype not in DTYPES:
        return f"{case.type_name} inputs"
    if max(case.head_dim, case.value_dim) > MAX_WIDTH:
        return f"heads wider than {MAX_WIDTH}"
    if case.sink_by_row:
        return "sinks whose logit differs by query"
    if case.zero_scale:
        return "a scale of 0"
    if (reason := refuses_derivatives(case)) is not None:
        return reason
    return f"this machine ({LIBRARY})" if isinstance(LIBRARY, str) else None


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """Run a call. Returns out `[B, Hq, Tq, Dv]`, and `Stats` or None."""
    return fused.run("cpu", Inputs.of(call), call.stats)


BACKEND = Backend(
    name="cpu",
    purpose="C++ for x86-64 (AVX2, AVX-512, bf16, AMX)",
    memory="linear in T",
    refuses=refuses,
    run=attention,
)


def _arguments(x: Inputs) -> tuple[Args, list[Tensor | None]]:
    """Return the C structure of a call, and the tensors it points to. The caller keeps them alive."""
    args = Args()
    args.B, args.Hq, args.Tq, args.D = x.q.shape
    args.Hk, args.Tk = x.k.shape[1:3]
    args.Dv = x.v.shape[3]
    args.dtype, args.rope = DTYPES[x.q.dtype], ROPE[x.layout]
    args.causal = x.causal
    args.window = min(x.window or 0, args.Tq + args.Tk)  # hides nothing at this size; avoids overflow
    args.eps, args.scale = x.eps, x.scale
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in x[:3])
    small = [
        None if t is None else t.float().contiguous() for t in (x.q_gain, x.k_gain, x.cos, x.sin, x.sink)
    ]
    q_gain, k_gain, cos, sin, sink = small
    if cos is not None:
        args.R = 2 * cos.shape[-1]
        args.rope_stride = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
    query_ids, key_ids = _ids(x)
    args.point(q=q, k=k, v=v, query_ids=query_ids, key_ids=key_ids)
    args.point(q_gain=q_gain, k_gain=k_gain, cos=cos, sin=sin, sink=sink)
    return args, [q, k, v, *small, query_ids, key_ids]


def _ids(x: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of `token_ids` as int32. If one does not fit, all are replaced by their ranks."""
    documents = x.documents
    if documents is not None and documents.numel() and int(documents.max()) > INT32_MAX:
        documents = torch.where(documents < 0, -1, torch.unique(documents, return_inverse=True)[1])
    queries, keys = token_ids(x.q, x.k, documents, x.key_padding)
    return (None, None) if queries is None or keys is None else (queries.int(), keys.int())


def _library() -> Library:
    assert not isinstance(LIBRARY, str)  # `refuses` has checked this
    return LIBRARY


def _forward(x: Inputs, stats: int) -> Found:
    args, keep = _arguments(x)
    out = x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])
    lse = _fake_lse(x)
    heads, counts, rows, visible = fused.empty_statistics(x, stats)
    if lse.numel():
        args.point(out=out, lse=lse)
        if stats:
            args.point(head_stats=heads, row_counts=counts)
        if stats == fused.ROWS:
            args.point(row_max=rows[0], row_log_sum=rows[1], row_entropy=rows[2])
            args.point(visible_keys=visible.zero_())
        _library().run("forward", args)
    elif stats:
        counts.zero_()
        heads.zero_()[0].fill_(-torch.inf)
    del keep
    return Found(out, lse, heads, counts, rows, visible)


def _fake_lse(x: Inputs) -> Tensor:
    """Return an unwritten tensor for `lse` `[2, B, Hq, Tq]`, see csrc/args.h."""
    return torch.empty(2, *x.q.shape[:3], dtype=torch.float32, device=x.q.device)


def _backward(d_out: Tensor, out: Tensor, lse: Tensor, x: Inputs) -> fused.Grads:
    args, keep = _arguments(x)
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    some = lse.numel() > 0 and x.k.shape[:3].numel() > 0
    make = torch.empty if some else torch.zeros

    def partial(gain: Tensor | None, of: Tensor, rows: int) -> Tensor | None:
        if gain is None:
            return None
        B, H, T, D = of.shape
        return make(B * -(-T // rows), H, D, dtype=torch.float32, device="cpu")

    dq, dk, dv = (make(t.shape, dtype=t.dtype, device="cpu") for t in (x.q, x.k, x.v))
    dq_gain = partial(x.q_gain, x.q, QUERY_PART)
    dk_gain = partial(x.k_gain, x.k, KEY_PART)
    d_sink = None if x.sink is None else make(*x.q.shape[:2], dtype=torch.float32, device="cpu")
    if some:
        args.point(out=out, lse=lse, d_out=d_out, dq=dq, dk=dk, dv=dv)
        args.point(dq_gain=dq_gain, dk_gain=dk_gain, d_sink=d_sink)
        _library().run("backward", args)
    del keep
    dq_gain, dk_gain = (None if part is None else part.sum(0) for part in (dq_gain, dk_gain))
    return dq, dk, dv, dq_gain, dk_gain, None if d_sink is None else d_sink.sum(0)[:, None], None


fused.define("cpu", ("CPU",), _forward, _backward, _fake_lse)

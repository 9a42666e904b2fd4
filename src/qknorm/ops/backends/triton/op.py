"""The operators `qknorm::triton_*`, and what ties the forward to the backward.

Pairs of fixed arity: without statistics, and with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qknorm.ops.backends.call import SMALLEST_FP32, Call, Case, refuse_second_derivative
from qknorm.ops.logit_stats import stream
from qknorm.ops.stats import Stats

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? q_gain, Tensor? k_gain, Tensor? sink"
_OPTIONS = (
    "Tensor? cos, Tensor? sin, Tensor? documents, Tensor? key_padding, str? layout, bool causal, "
    "int? window, float eps, float scale"
)
_DEVICES = ("CUDA", "CPU")  # on CPU by the interpreter
torch.library.define("qknorm::triton_forward", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    "qknorm::triton_forward_stats",
    f"({_INPUTS}, {_OPTIONS}, bool rows) -> ({', '.join(['Tensor'] * 6)})",
)
torch.library.define(
    "qknorm::triton_backward",
    f"(Tensor d_out, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * 6)})",
)
_PREPARED = (
    "Tensor q, Tensor k, Tensor? q_gain, Tensor? k_gain, Tensor? cos, Tensor? sin, str? layout, "
    "float eps"
)
torch.library.define("qknorm::triton_prepare", f"({_PREPARED}) -> (Tensor, Tensor)")
torch.library.define(
    "qknorm::triton_unprepare",
    f"(Tensor dq_hat, Tensor dk_hat, {_PREPARED}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """out `[B, Hq, Tq, Dv]` in v's dtype, and the statistics if they are asked for."""
    mask, rope = call.mask, call.rope
    sink = None if call.sink_logit is None else call.sink_logit[:, 0]
    out, *found = _TritonAttention.apply(
        *(call.q, call.k, call.v, call.q_gain, call.k_gain, sink),
        *((None, None) if rope is None else (rope.cos, rope.sin)),
        *(mask.documents, mask.key_padding, None if rope is None else rope.layout),
        *(mask.causal, mask.window, call.eps, call.scale, call.stats),
    )
    if not call.stats:
        return out, None
    heads, counts, of_rows, visible = found
    top, log_sum, entropy = of_rows if call.stats == "rows" else (of_rows,) * 3
    return out, call.packed(heads, counts, top, log_sum, entropy, visible)


class _TritonAttention(torch.autograd.Function):
    """Ties the forward to the backward. Second derivatives are refused, not wrong."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *call, stats = arguments
        if stats:
            out, lse, *found = torch.ops.qknorm.triton_forward_stats(*call, stats == "rows")
        else:
            out, lse = torch.ops.qknorm.triton_forward(*call)
            found = []
        inputs, options = call[:6], call[6:]
        ctx.save_for_backward(out, lse, *inputs, *options[:4])
        ctx.options = options[4:]
        ctx.mark_non_differentiable(*found)
        return out, *found

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *found: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("triton")
        saved = ctx.saved_tensors
        grads = torch.ops.qknorm.triton_backward(d_out, *saved, *ctx.options)
        inputs = saved[2:8]
        return *(None if x is None else g for x, g in zip(inputs, grads, strict=True)), *(None,) * 10


def _forward(*call: Any) -> tuple[Tensor, Tensor]:
    from qknorm.ops.backends.triton import launch, problem

    out, lse, _ = launch.forward(problem.Problem.of(*call), launch.NONE)
    return out, lse


def _forward_stats(*arguments: Any) -> tuple[Tensor, ...]:
    from qknorm.ops.backends.triton import launch, problem

    *call, rows = arguments
    out, lse, found = launch.forward(problem.Problem.of(*call), launch.ROWS if rows else launch.HEADS)
    assert found is not None
    return out, lse, found.heads, found.counts, found.rows, found.visible


def _backward(d_out: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    from qknorm.ops.backends.triton import launch, problem

    dq, dk, dv, *small = launch.backward(problem.Problem.of(*call), d_out, out, lse)
    return dq, dk, dv, *_like(out, call[3:6], small)


def _like(out: Tensor, inputs: Any, grads: Any) -> list[Tensor]:
    """Gradients of gains and sink in their dtype; empty where there is no input."""
    return [out.new_empty(0) if x is None else g.to(x.dtype) for x, g in zip(inputs, grads, strict=True)]


for _device in _DEVICES:
    torch.library.impl("qknorm::triton_forward", _device)(_forward)
    torch.library.impl("qknorm::triton_forward_stats", _device)(_forward_stats)
    torch.library.impl("qknorm::triton_backward", _device)(_backward)


@torch.library.register_fake("qknorm::triton_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(2, *q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("qknorm::triton_forward_stats")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    rows, has_ids = options[-1], options[5] is not None or options[6] is not None
    B, Hq, Tq, _ = q.shape
    return (
        q.new_empty(B, Hq, Tq, v.shape[-1]),
        q.new_empty(2, B, Hq, Tq, dtype=torch.float32),
        q.new_empty(4, Hq, dtype=torch.float32),
        q.new_empty(2, dtype=torch.int64),
        q.new_empty((3, B, Hq, Tq) if rows else 0, dtype=torch.float32),
        q.new_empty((B if has_ids else 1, Tq) if rows else 0, dtype=torch.int64),
    )


@torch.library.register_fake("qknorm::triton_backward")
def _(d_out: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    q, k, v, q_gain, k_gain, sink = call[:6]
    small = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q_gain, k_gain, sink)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *small


# -- norm and RoPE alone


def prepare(call: Call) -> tuple[Tensor, Tensor]:
    """q and k, normalised, rotated and rounded once; differentiable."""
    rope = call.rope
    if call.q_gain is None and call.k_gain is None and rope is None:
        return call.q, call.k
    table = (None, None, None) if rope is None else (rope.cos, rope.sin, rope.layout)
    q_hat, k_hat = _Prepare.apply(call.q, call.k, call.q_gain, call.k_gain, *table, call.eps)
    return q_hat, k_hat


class _Prepare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*arguments[:6])
        ctx.options = arguments[6:]
        return torch.ops.qknorm.triton_prepare(*arguments)

    @staticmethod
    def backward(ctx: Any, dq_hat: Tensor, dk_hat: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("triton")
        saved = ctx.saved_tensors
        grads = torch.ops.qknorm.triton_unprepare(dq_hat, dk_hat, *saved, *ctx.options)
        given = zip(saved[:4], grads, strict=True)
        return *(None if x is None else g for x, g in given), *(None,) * 4


def _problem_of_qk(*arguments: Any) -> Any:
    from qknorm.ops.backends.triton import problem

    q, k, q_gain, k_gain, cos, sin, layout, eps = arguments
    return problem.Problem.of(
        *(q, k, k, q_gain, k_gain, None, cos, sin, None, None, layout, False, None, eps, 1.0)
    )


def _prepare(*arguments: Any) -> tuple[Tensor, Tensor]:
    from qknorm.ops.backends.triton import launch

    hat = launch.prepare(_problem_of_qk(*arguments))
    return _fresh(hat.q, arguments[0]), _fresh(hat.k, arguments[1])


def _fresh(x: Tensor, given: Tensor) -> Tensor:
    """An operator returns no input of its own."""
    return x.clone(memory_format=torch.contiguous_format) if x is given else x


def _unprepare(dq_hat: Tensor, dk_hat: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from qknorm.ops.backends.triton import launch

    p = _problem_of_qk(*arguments)
    dq, dk, *gains = launch.unprepare(p, dq_hat.contiguous(), dk_hat.contiguous())
    return dq, dk, *_like(dq, arguments[2:4], gains)


for _device in _DEVICES:
    torch.library.impl("qknorm::triton_prepare", _device)(_prepare)
    torch.library.impl("qknorm::triton_unprepare", _device)(_unprepare)


@torch.library.register_fake("qknorm::triton_prepare")
def _(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake("qknorm::triton_unprepare")
def _(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, ...]:
    gains = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in options[:2]]
    return q.new_empty(q.shape), k.new_empty(k.shape), *gains


# -- the statistics alone: the CUDA side of an operator that is defined in qknorm.ops.logit_stats


@torch.library.impl("qknorm::logit_stats", "CUDA")
def _(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, ...]:
    from qknorm.ops.backends import triton

    B, H, _, D = q.shape
    zero_scale = abs(options[-1]) < SMALLEST_FP32
    case = Case(
        device="cuda", dtype=q.dtype, head_dim=D, value_dim=D, batch=B, heads=H, zero_scale=zero_scale
    )
    if triton.refuses(case):
        return stream(q, k, *options)
    from qknorm.ops.backends.triton import launch

    return launch.logit_stats(q, k, *options)

"""The operators `qknorm::triton_*`, through which a call reaches the kernels.

They are registered for CUDA, and for the CPU, where Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qknorm.ops import registry
from qknorm.ops.backends import fused
from qknorm.ops.backends.call import Call
from qknorm.ops.backends.fused import Found, Inputs
from qknorm.ops.stats import Stats

_KEYS = ("CUDA", "CPU")


def attention(call: Call) -> tuple[Tensor, Stats | None]:
    """Run a call. Returns out `[B, Hq, Tq, Dv]`, and `Stats` or None."""
    return fused.run("triton", Inputs.of(call), call.stats)


def _forward(x: Inputs, stats: int) -> Found:
    from qknorm.ops.backends.triton import launch, problem

    return launch.forward(problem.Problem.of(x), stats)


def _backward(d_out: Tensor, out: Tensor, lse: Tensor, x: Inputs) -> fused.Grads:
    from qknorm.ops.backends.triton import launch, problem

    *grads, d_sink = launch.backward(problem.Problem.of(x), d_out, out, lse)
    return *grads, None if d_sink is None else d_sink[:, None], None


def _fake_lse(x: Inputs) -> Tensor:
    return x.q.new_empty(2, *x.q.shape[:3], dtype=torch.float32)


fused.define("triton", _KEYS, _forward, _backward, _fake_lse)


# -- norm and RoPE alone

_PREPARED = (
    "Tensor q, Tensor k, Tensor? q_gain, Tensor? k_gain, Tensor? cos, Tensor? sin, str? layout, "
    "float eps"
)


def prepare(call: Call) -> tuple[Tensor, Tensor]:
    """Return q and k after the norm and RoPE, rounded once and differentiable."""
    rope = call.rope
    if call.q_gain is None and call.k_gain is None and rope is None:
        return call.q, call.k
    table = (None, None, None) if rope is None else (rope.cos, rope.sin, rope.layout)
    q_hat, k_hat = _Prepare.apply(call.q, call.k, call.q_gain, call.k_gain, *table, call.eps)
    return q_hat, k_hat


class _Prepare(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.qknorm.triton_prepare(*arguments)

    @staticmethod
    def setup_context(ctx: Any, arguments: tuple[Any, ...], found: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*arguments[:6])
        ctx.options = arguments[6:]

    @staticmethod
    def backward(ctx: Any, dq_hat: Tensor, dk_hat: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = fused.once(
            torch.ops.qknorm.triton_unprepare, "triton", dq_hat, dk_hat, *saved, *ctx.options
        )
        given = zip(saved[:4], grads, strict=True)
        return *(None if x is None else g for x, g in given), *(None,) * 4


def _problem_of_qk(arguments: Iterable[Any]) -> Any:
    from qknorm.ops.backends.triton import problem

    q, k, q_gain, k_gain, cos, sin, layout, eps = arguments
    return problem.Problem.of(
        Inputs(q, k, k, q_gain=q_gain, k_gain=k_gain, cos=cos, sin=sin, layout=layout, eps=eps)
    )


def _prepare(*arguments: Any) -> tuple[Tensor, Tensor]:
    from qknorm.ops.backends.triton import launch

    hat = launch.prepare(_problem_of_qk(arguments))
    return _fresh(hat.q, arguments[0]), _fresh(hat.k, arguments[1])


def _fresh(x: Tensor, given: Tensor) -> Tensor:
    """Return x, or a copy if it is the input `given`. An operator may not return one of its inputs."""
    return x.clone(memory_format=torch.contiguous_format) if x is given else x


def _unprepare(dq_hat: Tensor, dk_hat: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from qknorm.ops.backends.triton import launch

    p = _problem_of_qk(arguments)
    grads = launch.unprepare(p, dq_hat.contiguous(), dk_hat.contiguous())
    return fused.present(arguments[:4], grads)


registry.define(
    "triton_prepare",
    f"({_PREPARED}) -> (Tensor, Tensor)",
    fake=lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    **dict.fromkeys(_KEYS, _prepare),
)
registry.define(
    "triton_unprepare",
    f"(Tensor dq_hat, Tensor dk_hat, {_PREPARED}) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda dq, dk, *given: fused.present(given[:4], fused.alike(given[:4])),
    **dict.fromkeys(_KEYS, _unprepare),
)


# -- the statistics alone: the CUDA kernel of the operator that qknorm.ops.logit_stats defines


def _logit_stats(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, ...]:
    from qknorm.ops.backends.call import Case, is_zero
    from qknorm.ops.backends.triton import refuses
    from qknorm.ops.logit_stats import rows_by_stream

    B, H, _, D = q.shape
    case = Case(
        device="cuda",
        dtype=q.dtype,
        head_dim=D,
        value_dim=D,
        batch=B,
        heads=H,
        zero_scale=is_zero(options[-1], q.dtype),
    )
    if refuses(case):
        return rows_by_stream(q, k, *options)
    from qknorm.ops.backends.triton import launch

    return launch.logit_stats(q, k, *options)


registry.implement("logit_stats", "CUDA", _logit_stats)

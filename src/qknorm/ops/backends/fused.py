"""The arguments, the schema and the derivative that all backends with operators of torch share.

A backend gives `define` a forward and a backward pass on `Inputs`. They are registered as the operators
`qknorm::NAME_forward` and `qknorm::NAME_backward`. The autograd function `_Attention` makes the second
the derivative of the first; `register_autograd` would cost more for each call.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk query / key heads, D head width, Dv value width,
R rotary width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops import registry
from qknorm.ops.backends import vmap
from qknorm.ops.backends.call import Call
from qknorm.ops.stats import Rows, Stats, StatsRequest


class Inputs(NamedTuple):
    """The arguments of a forward pass, in the order of the schema.

    The first `DIFFERENTIABLE` fields get a gradient, and the first `TENSORS` fields are tensors.
    """

    q: Tensor  # [B, Hq, Tq, D]
    k: Tensor  # [B, Hk, Tk, D]
    v: Tensor  # [B, Hk, Tk, Dv]
    q_gain: Tensor | None = None  # [Hq, D]
    k_gain: Tensor | None = None  # [Hk, D]
    sink: Tensor | None = None  # [Hq, 1] or [B, Hq, Tq], in the compute dtype
    sink_value: Tensor | None = None  # [Hq, Dv]
    cos: Tensor | None = None  # [Tk, R/2] or [1 or B, Tk, R/2]
    sin: Tensor | None = None
    documents: Tensor | None = None  # [B, Tk]
    key_padding: Tensor | None = None  # [B, Tk]
    layout: str | None = None
    causal: bool = False
    window: int | None = None
    eps: float = 1e-6
    scale: float = 1.0

    @property
    def mask(self) -> spec.Mask:
        """The mask as a `Mask`."""
        return spec.Mask(self.causal, self.window, self.documents, self.key_padding)

    @staticmethod
    def of(call: Call) -> Inputs:
        """Return the arguments of a call."""
        mask, rope = call.mask, call.rope
        return Inputs(
            q=call.q,
            k=call.k,
            v=call.v,
            q_gain=call.q_gain,
            k_gain=call.k_gain,
            sink=call.sink_logit(),
            sink_value=call.sink_value(),
            cos=None if rope is None else rope.cos,
            sin=None if rope is None else rope.sin,
            documents=mask.ids,
            key_padding=mask.key_padding,
            layout=None if rope is None else rope.layout,
            causal=mask.causal,
            window=mask.window,
            eps=call.eps,
            scale=call.logit_scale,
        )


DIFFERENTIABLE = 7
TENSORS = 11
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_gain, Tensor? k_gain, Tensor? sink, Tensor? sink_value, "
    "Tensor? cos, Tensor? sin, Tensor? documents, Tensor? key_padding, str? layout, bool causal, "
    "int? window, float eps, float scale"
)

# The values of the argument `stats` of a forward operator.
NONE, HEADS, ROWS = range(3)
_WANTED: dict[StatsRequest, int] = {False: NONE, True: HEADS, "rows": ROWS}


class Found(NamedTuple):
    """The results of a forward pass. Statistics that the call does not want are tensors of size 0.

    Attributes:
        out: `[B, Hq, Tq, Dv]` in v's dtype.
        lse: the log-sum-exp of each row, in whatever form the backend's backward pass reads it.
        heads: `[4, Hq]`, which are the max logit and the sums of entropy, entropy ratio and sink mass.
        counts: int64 `[2]`, the number of rows that count and of those with two keys or more.
        rows: `[3, B, Hq, Tq]`, which are the max logit, the log of the sum relative to it, and the
            entropy.
        visible: int64 `[1 or B, Tq]`, the number of visible keys of each row.
    """

    out: Tensor
    lse: Tensor
    heads: Tensor
    counts: Tensor
    rows: Tensor
    visible: Tensor


Grads = Iterable[Tensor | None]  # the gradients of the differentiable inputs, in their order
Forward = Callable[[Inputs, int], Found]  # takes the inputs and `stats`
Backward = Callable[[Tensor, Tensor, Tensor, Inputs], Grads]  # takes d_out, out, lse and the inputs


def empty_statistics(x: Inputs, stats: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unwritten buffers for the last four fields of `Found`, of the right shapes and dtypes."""
    B, Hq, Tq, _ = x.q.shape
    masked = x.documents is not None or x.key_padding is not None
    wide, device = spec.compute_dtype(x.q.dtype), x.q.device
    counted, by_row = stats != NONE, stats == ROWS
    return (
        torch.empty((4, Hq) if counted else 0, dtype=wide, device=device),
        torch.empty(2 if counted else 0, dtype=torch.int64, device=device),
        torch.empty((3, B, Hq, Tq) if by_row else 0, dtype=wide, device=device),
        torch.empty((B if masked else 1, Tq) if by_row else 0, dtype=torch.int64, device=device),
    )


def define(
    name: str, keys: Iterable[str], forward: Forward, backward: Backward, fake_lse: Callable[..., Tensor]
) -> None:
    """Register the operators of a backend.

    Args:
        name: name of the backend.
        keys: dispatch keys of the operators, such as "CPU".
        forward: the forward pass.
        backward: the backward pass.
        fake_lse: takes `Inputs` and returns an unwritten tensor like the `lse` that `forward` returns.
    """

    def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
        *inputs, stats = arguments
        return tuple(forward(Inputs(*inputs), stats))

    def run_backward(d_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        x = Inputs(*inputs)
        return present(inputs[:DIFFERENTIABLE], backward(d_out, out, lse, x))

    def fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
        *inputs, stats = arguments
        x = Inputs(*inputs)
        out = x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])
        return out, fake_lse(x), *empty_statistics(x, stats)

    def fake_backward(d_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        given = inputs[:DIFFERENTIABLE]
        return present(given, alike(given))

    six, seven = ", ".join(["Tensor"] * 6), ", ".join(["Tensor"] * DIFFERENTIABLE)
    saved = "Tensor d_out, Tensor out, Tensor lse"
    registry.define(
        f"{name}_forward",
        f"({_INPUTS}, int stats) -> ({six})",
        fake=fake_forward,
        vmap=vmap.rule(f"{name}_forward", 0, vmap.FOUND_HEADS),
        **dict.fromkeys(keys, run_forward),
    )
    registry.define(
        f"{name}_backward",
        f"({saved}, {_INPUTS}) -> ({seven})",
        fake=fake_backward,
        vmap=vmap.rule(f"{name}_backward", len(vmap.SAVED_HEADS), vmap.INPUT_HEADS),
        **dict.fromkeys(keys, run_backward),
    )


def present(inputs: Iterable[Tensor | None], grads: Grads) -> tuple[Tensor, ...]:
    """Return the gradients in the dtypes of their inputs, with an empty tensor in place of None.

    An operator can return tensors only. The first input must not be None.
    """
    pairs = list(zip(inputs, grads, strict=True))
    first = pairs[0][0]
    assert first is not None
    return tuple(
        first.new_empty(0) if x is None or grad is None else grad.to(x.dtype) for x, grad in pairs
    )


def alike(inputs: Iterable[Tensor | None]) -> Grads:
    """Return unwritten gradients, for tracing."""
    return [None if x is None else x.new_empty(x.shape) for x in inputs]


def run(name: str, x: Inputs, stats: StatsRequest) -> tuple[Tensor, Stats | None]:
    """Call the operators of a backend. Returns out `[B, Hq, Tq, Dv]`, and `Stats` or None."""
    found = Found(*_function(x)(name, _WANTED[stats], *x))
    if not stats:
        return found.out, None
    rows = None
    if stats == "rows":
        top, log_sum, entropy = found.rows
        rows = Rows(
            max_logit=top,
            log_sum=log_sum,
            entropy_nats=entropy,
            visible_keys=found.visible,
            is_real=x.mask.real_queries(x.q.shape[2], x.k.shape[2], x.q.device),
            sink_logit=None if x.sink is None else x.sink.detach().expand(top.shape),
        )
    return found.out, Stats(
        max_logit=found.heads[0],
        entropy_sum=found.heads[1],
        ratio_sum=found.heads[2],
        sink_sum=found.heads[3],
        row_count=found.counts[0],
        ratio_count=found.counts[1],
        rows=rows,
    )


def _function(x: Inputs) -> Callable[..., tuple[Tensor, ...]]:
    """Return the autograd function, or the operator alone in a compiled graph that needs no gradient.

    In such a graph dynamo (torch 2.13) calls `forward` of an autograd function as if the class had no
    `setup_context`, which fails.
    """
    if torch.compiler.is_compiling():
        leaves = (t for t in x[:DIFFERENTIABLE] if isinstance(t, Tensor))
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in leaves)):
            return _forward
    return _Attention.apply


def _forward(name: str, stats: int, *inputs: Any) -> tuple[Tensor, ...]:
    return getattr(torch.ops.qknorm, f"{name}_forward")(*inputs, stats)


class _Attention(torch.autograd.Function):
    """The forward operator of a backend, with the backward operator as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, arguments: tuple[Any, ...], found: tuple[Tensor, ...]) -> None:
        ctx.name, _, *inputs = arguments
        out, lse, *statistics = found
        ctx.save_for_backward(out, lse, *inputs[:TENSORS])
        ctx.options = inputs[TENSORS:]
        ctx.mark_non_differentiable(lse, *statistics)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        operator = getattr(torch.ops.qknorm, f"{ctx.name}_backward")
        grads = once(operator, ctx.name, d_out, out, lse, *tensors, *ctx.options)
        found = (None if x is None else g for x, g in zip(tensors, grads, strict=False))
        return None, None, *found, *(None,) * (len(Inputs._fields) - DIFFERENTIABLE)


def once(operator: Callable[..., Any], backend: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Call a backward operator so that a second derivative raises an error.

    Autograd may differentiate the result again (`create_graph=True`, `torch.func.grad`). That must not
    silently give a wrong result. torch's `once_differentiable` is not enough: it raises only where d_out
    needs a gradient, and misses that dq also depends on q.
    """
    if torch.is_grad_enabled():
        return _Once.apply(operator, backend, *arguments)
    return operator(*arguments)


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Callable[..., Any], backend: str, *arguments: Any) -> tuple[Tensor, ...]:
        return operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, arguments: tuple[Any, ...], grads: tuple[Tensor, ...]) -> None:
        ctx.backend = arguments[1]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f'the {ctx.backend} backend has no second derivative: use backend="reference"'
        )

"""Find the attentions of a model while it runs.

An attention is a product of two activations that goes through a softmax and then multiplies a third
activation, or a call of `F.scaled_dot_product_attention`. Tensors are followed from one torch function
to the next, so the names of modules do not matter. This needs eager code, see `plainly`.

Shapes: B batch, Hq query heads, Tq / Tk tokens, D / Dv head widths.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qknorm.auditor import thresholds as at
from qknorm.auditor.guard import Guarded
from qknorm.ops.backends import by_definition

# Objects that `torch.jit.script` makes. A `TorchFunctionMode` does not see their calls.
SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
# Python functions that hide their inner calls from a `TorchFunctionMode`.
COMPOSITE = (F.multi_head_attention_forward,)
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum")
WITH_WEIGHTS = (*PRODUCTS, "linear", "addmm")


@dataclass(frozen=True, eq=False)
class Frame:
    """A module that is running.

    Attributes:
        path: the path of the module in the model.
        module: the module.
        args: positional arguments of its call.
        kwargs: keyword arguments of its call.
        first_product: how many products with parameters were computed before its call.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first_product: int


@dataclass(eq=False)
class Product:
    """A product of an activation with a parameter.

    Attributes:
        index: how many products with parameters were computed before this one.
        parameter: the parameter.
    """

    index: int
    parameter: nn.Parameter


@dataclass(eq=False)
class SeenAttention:
    """One attention that the trace saw.

    Attributes:
        frames: the modules that were running, outermost first.
        last_product: how many products with parameters were computed before the attention.
        q: the queries in the product q.k, `[B, Hq, Tq, D]`.
        k: the keys in the product q.k, `[B, Hq or Hk, Tk, D]`.
        v: the values that the weights multiply, `[B, Hq or Hk, Tk, Dv]`.
        logits: fp64 `[B, Hq, Tq, Tk]`, the input of the softmax, far below 0 where a pair is hidden.
            None if the trace did not see them.
        has_softmax: whether the trace saw a softmax. Without one, these may be two products in a row
            that are no attention.
        sink: fp64 `[B, Hq, Tq]`, the logit of the sink; None without a sink.
    """

    frames: list[Frame]
    last_product: int
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    logits: Tensor | None = None
    has_softmax: bool = False
    sink: Tensor | None = None

    @property
    def path(self) -> str:
        """The path of the innermost module."""
        return self.frames[-1].path if self.frames else ""

    def to_cpu(self) -> None:
        """Move all tensors to the CPU."""
        self.q, self.k = self.q.cpu(), self.k.cpu()
        self.v, self.logits, self.sink = (
            None if x is None else x.cpu() for x in (self.v, self.logits, self.sink)
        )


@dataclass(eq=False)
class _Score:
    """A tensor that was computed from q.k.

    Attributes:
        attention: the attention to which it belongs.
        stage: how far the softmax has been computed.
        unshifted: the logits before a number, such as the maximum, was subtracted from each row; None if
            none was.
    """

    attention: SeenAttention
    stage: Literal["logits", "exp", "weights"] = "logits"
    unshifted: Tensor | None = None


Override = Callable[[int, nn.Parameter, Callable[[], Tensor]], Tensor]


class Trace(TorchFunctionMode):
    """A torch function mode that follows one run of a model, or of a part of it.

    Args:
        model: the model whose parameters and modules are followed.
        override: a function that returns the output of a product with a parameter. It receives the index
            of the product, the parameter, and a function that computes the original output. None keeps
            all outputs.
        stop_after: raise `Stopped` once this many attentions have been seen; None never does.

    Attributes:
        products: the products with parameters, in the order of the run.
        attentions: the attentions, in the order of the run.
        failed: a sentence for each part that could not be followed.
        opaque: operators of other libraries that may compute attention, by the path of their module.
        replaced: the backends of `qknorm.attention` in whose place its definition ran.
    """

    def __init__(
        self,
        model: nn.Module,
        override: Override | None = None,
        stop_after: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.override = override
        self.stop_after = stop_after
        self.products: list[Product] = []
        self.attentions: list[SeenAttention] = []
        self.failed: list[str] = []
        self.opaque: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._frames: list[Frame] = []
        self._parameters = {id(p): p for p in model.parameters()}
        self._scores: dict[int, _Score] = {}
        self._kept: list[Tensor] = []  # so that Python gives no id to another tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSITE:
            with self:
                return opened(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            with Guarded(self.failed, self.path or "the model"):
                self._done(self._sdpa(*args, **kwargs))
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = list(tensors_of((args, tuple(kwargs.values()))))
        # If a function takes a weight and a bias, the weight is the one with more axes.
        parameter = max(
            (p for t in tensors if (p := self._parameters.get(id(t))) is not None),
            key=lambda p: p.dim(),
            default=None,
        )
        is_product = parameter is not None and parameter.dim() >= 2 and name in WITH_WEIGHTS
        if parameter is not None and is_product and len(tensors) > 1:
            return self._product(parameter, partial(func, *args, **kwargs))
        self._keep_what_is_overwritten(name, tensors)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor | tuple | list):
            return out
        if _may_hide_attention(func, tensors):
            self.opaque[self.path] = str(func)
        with Guarded(self.failed, self.path or "the model"):
            if parameter is not None and len(tensors) == 1:
                # A view of a weight, or a weight that is computed from it, counts as that weight.
                for part in tensors_of(out):
                    self._parameters[id(part)] = parameter
                    self._kept.append(part)
            elif name in PRODUCTS and isinstance(out, Tensor):
                self._activation_product(name, args, tensors, out)
            else:
                self._follow(name, tensors, out)
        return out

    @property
    def path(self) -> str:
        """The path of the module that is running."""
        return self._frames[-1].path if self._frames else ""

    def _product(self, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
        index = len(self.products)
        out = compute() if self.override is None else self.override(index, parameter, compute)
        self.products.append(Product(index, parameter))
        return out

    def _activation_product(
        self, name: str, args: tuple[Any, ...], tensors: list[Tensor], out: Tensor
    ) -> None:
        score = next((s for t in tensors if (s := self._scores.get(id(t))) is not None), None)
        if score is not None:
            if score.attention.v is None:
                others = [t for t in tensors if id(t) not in self._scores]
                if others:
                    score.attention.v = others[-1]
                    if score.stage == "weights":
                        _note_sink(score.attention, next(t for t in tensors if id(t) in self._scores))
                    self._done(score.attention)
            return
        operands = _operands(name, args, tensors)
        if operands is None:
            return
        q, k = operands
        attention = SeenAttention(list(self._frames), len(self.products), q, k)
        self._tag(out, _Score(attention))

    def _follow(self, name: str, tensors: list[Tensor], out: Any) -> None:
        followed = next((t for t in tensors if id(t) in self._scores), None)
        if followed is None:
            return
        score = self._scores[id(followed)]
        attention = score.attention
        if score.stage == "logits" and ("softmax" in name or name in ("exp", "exp_")):
            attention.has_softmax = True
            _set_logits(attention, followed if score.unshifted is None else score.unshifted)
            score = _Score(attention, "weights" if "softmax" in name else "exp")
        elif score.stage == "exp" and "div" in name:
            score = _Score(attention, "weights")
        elif score.stage == "logits":
            is_shift = "sub" in name and len(tensors) == 2 and tensors[1].shape[-1:] == (1,)
            before = followed if score.unshifted is None else score.unshifted
            score = _Score(attention, unshifted=before if is_shift else None)
        for result in tensors_of(out):
            if result.is_floating_point():
                self._tag(result, score)

    def _keep_what_is_overwritten(self, name: str, tensors: list[Tensor]) -> None:
        """Copy logits that the next function overwrites in place."""
        score = self._scores.get(id(tensors[0])) if tensors else None
        if name in ("exp_", "sub_", "__isub__") and score is not None and score.unshifted is None:
            score.unshifted = tensors[0].detach().clone()

    def _tag(self, tensor: Tensor, score: _Score) -> None:
        self._scores[id(tensor)] = score
        self._kept.append(tensor)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> SeenAttention:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attention = SeenAttention(list(self._frames), len(self.products), query, key, value)
        with torch.no_grad():
            q, k = four(query).double(), four(key).double()
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            s = q @ k.mT * scale
            if is_causal:
                hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril().logical_not()
                s = s.masked_fill(hidden, -torch.inf)
            if attn_mask is not None:
                if attn_mask.dtype == torch.bool:
                    s = s.masked_fill(~attn_mask, -torch.inf)
                else:
                    s = s + attn_mask
        # A last key of zeros with a value of zeros adds a constant to the denominator, so it is a sink.
        if key.shape[-2] > 1 and not bool(key[..., -1, :].any()) and not bool(value[..., -1, :].any()):
            attention.sink = s[..., -1]
            attention.k, attention.v, s = key[..., :-1, :], value[..., :-1, :], s[..., :-1]
        attention.logits, attention.has_softmax = s, True
        return attention

    def _done(self, attention: SeenAttention) -> None:
        attention.q, attention.k = four(attention.q), four(attention.k)
        if attention.v is not None:
            attention.v = four(attention.v)
        self.attentions.append(attention)
        if len(self.attentions) == self.stop_after:
            raise Stopped

    @contextmanager
    def scripted(self) -> Iterator[None]:
        """Follow tensors through scripted functions too, without seeing the operators inside."""
        calls = [kind.__call__ for kind in SCRIPTED]

        def seen(call: Any) -> Any:
            def wrapper(function: Any, *args: Any, **kwargs: Any) -> Any:
                out = call(function, *args, **kwargs)
                tensors = list(tensors_of((args, tuple(kwargs.values()))))
                if _may_hide_attention(function, tensors):
                    self.opaque[self.path] = function.name
                for score in filter(None, map(self._scores.get, map(id, tensors))):
                    score.attention.has_softmax = True  # the function may contain one
                self._follow("", tensors, out)
                return out

            return wrapper

        try:
            for kind, call in zip(SCRIPTED, calls, strict=True):
                kind.__call__ = seen(call)
            yield
        finally:
            for kind, call in zip(SCRIPTED, calls, strict=True):
                kind.__call__ = call

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Keep `_frames` up to date with the modules that are running."""
        handles = []
        for path, module in self.model.named_modules():

            def enter(module: nn.Module, args: Any, kwargs: Any, *, path: str = path) -> None:
                self._frames.append(Frame(path, module, args, kwargs, len(self.products)))

            def leave(module: nn.Module, args: Any, out: Any) -> None:
                self._frames.pop()

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Stopped(BaseException):
    """Ends a run on purpose. It is a BaseException, so `except Exception` in a model lets it pass."""


def opened(function: Any) -> Callable[..., Any]:
    """Return a copy of a torch function that skips the check for `__torch_function__`.

    The copy runs its body under the mode, so the mode sees the functions that it calls.
    """
    blind = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        lambda *_: False,
    )
    opened = types.FunctionType(
        function.__code__, function.__globals__ | blind, function.__name__, function.__defaults__
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _may_hide_attention(func: Any, tensors: list[Tensor]) -> bool:
    """Whether a function might compute attention inside: a higher-order operator, or an operator from
    outside torch or a scripted function with three floating-point inputs of three axes or more."""
    if isinstance(func, HigherOrderOperator):
        return True
    if not isinstance(func, (OpOverload, OpOverloadPacket, *SCRIPTED)):
        return False
    name = str(func)
    wide = [t for t in tensors if t.is_floating_point() and t.dim() >= 3]
    return not name.startswith(("aten", "prim")) and len(wide) >= 3


def four(x: Tensor) -> Tensor:
    """Return x as `[B, H, T, D]`.

    Args:
        x: `[B, T, D]` for one head, `[B, H, T, D]`, or `[B, Hk, G, T, D]`, whose heads are merged.
    """
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(1)
    return x.flatten(1, x.dim() - 3)


def _operands(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return q `[..., Tq, D]` and k `[..., Tk, D]` if a product may be q.k, and None otherwise."""
    if name == "einsum":
        return _einsum_operands(args, tensors)
    if len(tensors) < 2 or name == "baddbmm":
        tensors = tensors[1:]
    if len(tensors) != 2 or min(t.dim() for t in tensors) < 3:
        return None
    q, k = tensors
    return (k.mT, q.mT) if name == "__rmatmul__" else (q, k.mT)


def _einsum_operands(args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    if not args or not isinstance(args[0], str) or len(tensors) != 2:
        return None
    inputs, _, output = args[0].replace(" ", "").partition("->")
    names = inputs.split(",")
    if "." in args[0] or len(names) != 2 or len(output) < 3:
        return None
    summed = [i for i in names[0] if i in names[1] and i not in output]
    rows = [i for i in output if i in names[0] and i not in names[1]]
    columns = [i for i in output if i in names[1] and i not in names[0]]
    if len(summed) != 1 or not rows or not columns:
        return None
    batch = [i for i in output if i in names[0] and i in names[1]]
    if len(columns) != 1:
        return None
    # Query heads that share a key head are axes of q alone, like the token, which is the last of them.
    heads = rows[:-1]
    q = tensors[0].permute([names[0].index(i) for i in (*batch, *heads, rows[-1], summed[0])])
    k = tensors[1].permute([names[1].index(i) for i in (*batch, columns[0], summed[0])])
    for _ in heads:
        k = k.unsqueeze(len(batch))
    k = k.expand(*q.shape[: len(batch) + len(heads)], *k.shape[-2:])
    return q, k


def _set_logits(attention: SeenAttention, scores: Tensor) -> None:
    Tq, Tk = attention.q.shape[-2], attention.k.shape[-2]
    scores = scores.detach()
    if scores.dim() < 3 or scores.shape[-2] != Tq or scores.shape[-1] < Tk:
        return
    logits = four(scores).double()
    others = logits.shape[-1] - Tk
    if others and _keys_come_last(attention, logits):
        logits = logits.roll(-others, -1)
    attention.logits = logits[..., :Tk]
    attention.sink = logits[..., Tk:].logsumexp(-1) if others else None


def _note_sink(attention: SeenAttention, weights: Tensor) -> None:
    """Find a sink from the weights of each row, which sum to 1 without a sink, or to 0 without a key."""
    logits = attention.logits
    if logits is None or attention.sink is not None or weights.shape[-1] != logits.shape[-1]:
        return
    seen = four(weights.detach()).double().sum(-1)
    low = at.SINK_LOW if weights.dtype in (torch.float16, torch.bfloat16) else at.SINK
    if bool(((seen > 0) & (seen < 1 - low)).any()):
        attention.sink = logits.logsumexp(-1) + ((1 - seen).clamp(min=0) / seen).log()


def _keys_come_last(attention: SeenAttention, scores: Tensor) -> bool:
    """Whether the keys are the last columns of the scores, behind those of a sink.

    They are if the last Tk columns correlate with q.k more strongly than the first Tk do.
    """
    Tk = attention.k.shape[-2]
    dots = four(attention.q.detach().double() @ attention.k.detach().double().mT)

    def likeness(logits: Tensor) -> float:
        visible = logits > at.HIDDEN
        pairs = torch.stack((dots[visible], logits[visible]))
        return float(pairs.corrcoef()[0, 1]) if pairs.shape[1] > 1 else 0.0

    return likeness(scores[..., -Tk:]) > likeness(scores[..., :Tk])


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        yield from tensors_of(tuple(value.values()))


@contextmanager
def plainly() -> Iterator[set[str]]:
    """Run compiled modules as eager code, and `qknorm.attention` by its definition.

    A trace sees nothing inside compiled code and kernels. The formula is therefore that of the eager
    code, and the audit compares it with the code that usually runs, as it compares any two paths.

    Yields:
        A set that receives the names of the backends that were replaced by the definition.
    """
    dynamo = sys.modules.get("torch._dynamo")  # without it, nothing has been compiled
    with dynamo.set_stance("force_eager") if dynamo else nullcontext(), by_definition() as replaced:
        yield replaced


def run(trace: Trace, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module under a trace.

    Args:
        trace: the trace.
        module: the module, or a function that calls it.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of the module; None if the trace ended the run.
    """
    with plainly() as trace.replaced, trace.modules(), trace.scripted(), trace:
        try:
            return module(*args, **kwargs)
        except Stopped:
            return None

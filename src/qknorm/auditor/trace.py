"""Finds attention in what a model computes, whatever it is called: a product of two activations whose
result becomes the weights of a softmax over a third, or a call of `F.scaled_dot_product_attention`.

Works on eager code. Tensors are followed from function to function, so nothing depends on names.

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

# What `torch.jit.script` makes: a mode does not see that it is called.
SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
# Python functions that would keep from a mode what they call.
COMPOSITE = (F.multi_head_attention_forward,)
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum")
WITH_WEIGHTS = (*PRODUCTS, "linear", "addmm")


@dataclass(frozen=True, eq=False)
class Frame:
    """A module that is running, and what it was called with."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first_product: int


@dataclass(eq=False)
class Product:
    """A product of an activation with a parameter."""

    index: int
    parameter: nn.Parameter


@dataclass(eq=False)
class Attention:
    """One attention.

    Attributes:
        frames: the modules that ran, outermost first.
        last_product: how many products with parameters came before.
        q, k, v: `[B, Hq, Tq, D]`, `[B, Hq or Hk, Tk, D]`, `[B, Hq or Hk, Tk, Dv]`, as multiplied.
        logits: `[B, Hq, Tq, Tk]` of the softmax; hidden ones far below 0. None where they were not seen.
        sink: `[B, Hq, Tq]`, the logit of what else the softmax had beside the keys; None without a sink.
    """

    frames: list[Frame]
    last_product: int
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    logits: Tensor | None = None
    sink: Tensor | None = None

    @property
    def path(self) -> str:
        """Of the innermost module."""
        return self.frames[-1].path if self.frames else ""

    def to_cpu(self) -> None:
        """What was seen, wherever the model is."""
        self.q, self.k = self.q.cpu(), self.k.cpu()
        self.v, self.logits, self.sink = (
            None if x is None else x.cpu() for x in (self.v, self.logits, self.sink)
        )


@dataclass(eq=False)
class _Score:
    """What is known of a tensor that comes from q.k."""

    attention: Attention
    stage: Literal["logits", "exp", "weights"] = "logits"
    unshifted: Tensor | None = None  # logits before their rows were shifted, as by their maximum


Override = Callable[[int, nn.Parameter, Callable[[], Tensor]], Tensor]


class Trace(TorchFunctionMode):
    """Follows one run of a model, or of a part of it.

    Args:
        model: whose parameters and modules are followed.
        override: what to put in place of the output of a product with a parameter, from its number, the
            parameter, and a function that computes the output.
        stop_after: end the run by `Stopped` once this many attentions have been seen.

    Attributes:
        products, attentions: in the order of the run.
        failed: what could not be followed.
        opaque: operators of other libraries that may be attentions, by the path of their module.
        replaced: backends of `qknorm.attention` for which its definition ran.
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
        self.attentions: list[Attention] = []
        self.failed: list[str] = []
        self.opaque: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._frames: list[Frame] = []
        self._parameters = {id(p): p for p in model.parameters()}
        self._scores: dict[int, _Score] = {}
        self._kept: list[Tensor] = []  # so that no id is given to another tensor

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
        # Of a bias and a weight the weight is meant.
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
                # A view of a weight, or weights computed from it, stands for it.
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
        """Of the module that is running."""
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
        attention = Attention(list(self._frames), len(self.products), q, k)
        self._tag(out, _Score(attention))

    def _follow(self, name: str, tensors: list[Tensor], out: Any) -> None:
        followed = next((t for t in tensors if id(t) in self._scores), None)
        if followed is None:
            return
        score = self._scores[id(followed)]
        attention = score.attention
        if score.stage == "logits" and ("softmax" in name or name in ("exp", "exp_")):
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
        """A shift of rows and an exponential in place leave nothing of the logits."""
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
    ) -> Attention:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attention = Attention(list(self._frames), len(self.products), query, key, value)
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
        # A key of zeros with values of zeros, and a bias of its own: a sink in disguise.
        if key.shape[-2] > 1 and not bool(key[..., -1, :].any()) and not bool(value[..., -1, :].any()):
            attention.sink = s[..., -1]
            attention.k, attention.v, s = key[..., :-1, :], value[..., :-1, :], s[..., :-1]
        attention.logits = s
        return attention

    def _done(self, attention: Attention) -> None:
        attention.q, attention.k = four(attention.q), four(attention.k)
        if attention.v is not None:
            attention.v = four(attention.v)
        self.attentions.append(attention)
        if len(self.attentions) == self.stop_after:
            raise Stopped

    @contextmanager
    def scripted(self) -> Iterator[None]:
        """Follow tensors through scripted functions too, whose own operators stay unseen."""
        calls = [kind.__call__ for kind in SCRIPTED]

        def seen(call: Any) -> Any:
            def wrapper(function: Any, *args: Any, **kwargs: Any) -> Any:
                out = call(function, *args, **kwargs)
                tensors = list(tensors_of((args, tuple(kwargs.values()))))
                if _may_hide_attention(function, tensors):
                    self.opaque[self.path] = function.name
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
        """Note which modules run."""
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
    """The run was ended on purpose: no error, and nothing that a model may catch."""


def opened(function: Any) -> Callable[..., Any]:
    """The same function, which no longer asks whether somebody wants to handle it."""
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
    """Whether this is an operator from outside torch, or scripted, that takes three activations."""
    if isinstance(func, HigherOrderOperator):
        return True
    if not isinstance(func, (OpOverload, OpOverloadPacket, *SCRIPTED)):
        return False
    name = str(func)
    wide = [t for t in tensors if t.is_floating_point() and t.dim() >= 3]
    return not name.startswith(("aten", "prim")) and len(wide) >= 3


def four(x: Tensor) -> Tensor:
    """As `[B, H, T, D]`: three axes are one head; of five, `[B, Hk, G, T, D]`, the heads are merged."""
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(1)
    return x.flatten(1, x.dim() - 3)


def _operands(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """q `[..., Tq, D]` and k `[..., Tk, D]` of a product that may be one of queries with keys."""
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
    # Groups of query heads on one key head are rows beside the token: the last row is the token.
    heads = rows[:-1]
    q = tensors[0].permute([names[0].index(i) for i in (*batch, *heads, rows[-1], summed[0])])
    k = tensors[1].permute([names[1].index(i) for i in (*batch, columns[0], summed[0])])
    for _ in heads:
        k = k.unsqueeze(len(batch))
    k = k.expand(*q.shape[: len(batch) + len(heads)], *k.shape[-2:])
    return q, k


def _set_logits(attention: Attention, scores: Tensor) -> None:
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


def _note_sink(attention: Attention, weights: Tensor) -> None:
    """The weights of a row that sees a key sum to 1, unless a sink has the rest."""
    logits = attention.logits
    if logits is None or attention.sink is not None or weights.shape[-1] != logits.shape[-1]:
        return
    seen = four(weights.detach()).double().sum(-1)
    low = at.SINK_LOW if weights.dtype in (torch.float16, torch.bfloat16) else at.SINK
    if bool(((seen > 0) & (seen < 1 - low)).any()):
        attention.sink = logits.logsumexp(-1) + ((1 - seen).clamp(min=0) / seen).log()


def _keys_come_last(attention: Attention, scores: Tensor) -> bool:
    """Whether the columns that are no keys come first: which of both ends goes up and down with q.k."""
    Tk = attention.k.shape[-2]
    dots = four(attention.q.detach().double() @ attention.k.detach().double().mT)

    def likeness(logits: Tensor) -> float:
        visible = logits > at.HIDDEN
        pairs = torch.stack((dots[visible], logits[visible]))
        return float(pairs.corrcoef()[0, 1]) if pairs.shape[1] > 1 else 0.0

    return likeness(scores[..., -Tk:]) > likeness(scores[..., :Tk])


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Those in tuples, lists and mappings, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        yield from tensors_of(tuple(value.values()))


@contextmanager
def plainly() -> Iterator[set[str]]:
    """Nothing compiled runs, and our own operator by its definition; yields which backends did not run.

    What is compiled, or a kernel, shows nothing. The price: a formula that is read back is that of the
    plain code, so what really runs has to be compared with it, as one path with another.
    """
    dynamo = sys.modules.get("torch._dynamo")  # nothing is compiled where it was never imported
    with dynamo.set_stance("force_eager") if dynamo else nullcontext(), by_definition() as replaced:
        yield replaced


def run(trace: Trace, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module, or what calls it, under a trace; None if the trace ended the run."""
    with plainly() as trace.replaced, trace.modules(), trace.scripted(), trace:
        try:
            return module(*args, **kwargs)
        except Stopped:
            return None

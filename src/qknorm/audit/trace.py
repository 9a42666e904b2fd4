"""Finds attention in what a model computes, whatever it is called: a product of two activations whose
result becomes the weights of a softmax over a third, or a call of `F.scaled_dot_product_attention`.

Works on eager code. Tensors are followed from function to function, so nothing depends on names.

Shapes: B batch, Hq query heads, Tq / Tk tokens, D / Dv head widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

HIDDEN = -1e3  # a logit below this is one that a mask has hidden

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
        sink: whether the softmax had more columns than there are keys.
    """

    frames: list[Frame]
    last_product: int
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    logits: Tensor | None = None
    sink: bool = False

    @property
    def path(self) -> str:
        """Of the innermost module."""
        return self.frames[-1].path if self.frames else ""


@dataclass(eq=False)
class _Score:
    """What is known of a tensor that comes from q.k."""

    attention: Attention
    is_softmax: bool = False


Override = Callable[[int, Tensor], Tensor]


class Trace(TorchFunctionMode):
    """Follows one run of a model, or of a part of it.

    Args:
        model: whose parameters and modules are followed.
        override: what to put in place of the output of a product with a parameter, from its number and
            the output.
        stop_after: end the run by `Stopped` once this many attentions have been seen.
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
        self._frames: list[Frame] = []
        self._parameters = {id(p): p for p in model.parameters()}
        self._scores: dict[int, _Score] = {}
        self._kept: list[Tensor] = []  # so that no id is given to another tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            attention = self._sdpa(*args, **kwargs)
            out = func(*args, **kwargs)
            self._done(attention)
            return out
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor | tuple | list):
            return out
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        # Of a bias and a weight the weight is meant.
        parameter = max(
            (p for t in tensors if (p := self._parameters.get(id(t))) is not None),
            key=lambda p: p.dim(),
            default=None,
        )
        if parameter is not None and len(tensors) == 1 and isinstance(out, Tensor):
            # A view of a weight, or weights computed from it, stands for it.
            self._parameters[id(out)] = parameter
            self._kept.append(out)
        elif parameter is not None and parameter.dim() >= 2 and name in WITH_WEIGHTS:
            return self._product(parameter, out)
        elif name in PRODUCTS:
            self._activation_product(name, args, tensors, out)
        else:
            self._follow(name, tensors, out)
        return out

    def _product(self, parameter: nn.Parameter, out: Tensor) -> Tensor:
        index = len(self.products)
        if self.override is not None:
            out = self.override(index, out)
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
                    self._done(score.attention)
            return
        operands = _operands(name, args, tensors)
        if operands is None:
            return
        q, k = operands
        attention = Attention(list(self._frames), len(self.products), q, k)
        self._tag(out, _Score(attention))

    def _follow(self, name: str, tensors: list[Tensor], out: Any) -> None:
        score = next((s for t in tensors if (s := self._scores.get(id(t))) is not None), None)
        if score is None:
            return
        if ("softmax" in name or name in ("exp", "exp_")) and not score.is_softmax:
            scores = next(t for t in tensors if id(t) in self._scores)
            _set_logits(score.attention, scores)
            score = _Score(score.attention, is_softmax=True)
        for result in _tensors(out):
            if result.is_floating_point():
                self._tag(result, score)

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
            attention.sink = True
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


class Stopped(Exception):  # noqa: N818 - not an error
    """The run was ended on purpose."""


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
    attention.sink = scores.shape[-1] > Tk
    attention.logits = four(scores)[..., :Tk].double()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def run(trace: Trace, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module under a trace; None if the trace ended the run."""
    with trace.modules(), trace:
        try:
            return module(*args, **kwargs)
        except Stopped:
            return None

"""Any module whose code calls `F.scaled_dot_product_attention`: the function is replaced, where the code
of the module finds it, by one that looks first.

Not by a torch function mode: under one a compiler cannot trace such methods as `Tensor.split`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.monitor.layer import Layer

NAME = "sdpa"
CALL = "scaled_dot_product_attention"


def serves(module: nn.Module) -> bool:
    """Whether a method of the module's class, or of a base outside torch, names the call."""
    return any(
        CALL in _names(code)
        for base in type(module).__mro__
        if not base.__module__.startswith("torch.")
        for method in vars(base).values()
        if (code := getattr(getattr(method, "__wrapped__", method), "__code__", None)) is not None
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class _Running:
    """The layer whose forward runs now."""

    layer: Layer | None = None


RUNNING = _Running()
_ORIGINAL = F.scaled_dot_product_attention


def _observed(*args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention`, seen."""
    layer = RUNNING.layer
    if layer is not None and layer.switch.on:
        _observe(layer, *args, **kwargs)
    return _ORIGINAL(*args, **kwargs)


def attributed(forward: Callable[..., Any], layer: Layer | None) -> Callable[..., Any]:
    """The forward, during which calls belong to `layer`, or to none."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        outer = RUNNING.layer
        RUNNING.layer = layer
        try:
            return forward(*args, **kwargs)
        finally:
            RUNNING.layer = outer

    return run


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give one module another forward; returns how to undo it."""
    before = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def install(layer: Layer) -> Callable[[], None]:
    """Let the module's forward say that it runs, and put the observed function where its code finds the
    original; returns how to undo it."""
    module = layer.module
    restore = replace_forward(module, attributed(module.forward, layer))
    places = [vars(F), *{id(g): g for g in _globals(type(module))}.values()]
    for place in places:
        _Patched.enter(place)

    def undo() -> None:
        for place in places:
            _Patched.leave(place)
        restore()

    return undo


def _globals(cls: type) -> Iterator[dict[str, Any]]:
    """The names that the methods of a class see, its bases included."""
    for base in cls.__mro__:
        for function in vars(base).values():
            if base is not nn.Module and hasattr(function, "__globals__"):
                yield function.__globals__


class _Patched:
    """Namespaces in which the original is replaced, by how many layers, and under which names."""

    users: ClassVar[dict[int, int]] = {}
    names: ClassVar[dict[int, list[str]]] = {}

    @classmethod
    def enter(cls, place: dict[str, Any]) -> None:
        cls.users[id(place)] = cls.users.get(id(place), 0) + 1
        if cls.users[id(place)] == 1:
            names = [name for name, value in place.items() if value is _ORIGINAL]
            cls.names[id(place)] = [n for n in names if place is not globals()]
            place.update(dict.fromkeys(cls.names[id(place)], _observed))

    @classmethod
    def leave(cls, place: dict[str, Any]) -> None:
        cls.users[id(place)] -= 1
        if cls.users[id(place)] == 0:
            place.update(dict.fromkeys(cls.names.pop(id(place)), _ORIGINAL))
            del cls.users[id(place)]


def _observe(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    if query.dim() != 4:
        layer.trouble = f"q of {query.dim()} axes; [B, H, T, D] is understood"
        return
    Tq, Tk = query.shape[2], key.shape[2]
    if is_causal and Tq != Tk:  # torch aligns at the first token
        is_causal, attn_mask = False, torch.ones(Tq, Tk, dtype=torch.bool, device=query.device).tril()
    layer.observe(query, key, mask=attn_mask, causal=is_causal, scale=scale)

"""Any module whose code calls `F.scaled_dot_product_attention`, `F.multi_head_attention_forward`, or
`flex_attention`, compiled or not: the function is replaced, where the code of the module finds it, by
one that looks first.

Not by a torch function mode: under one a compiler cannot trace such methods as `Tensor.split`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias

from qknorm.monitor.forward import Switch, watch
from qknorm.monitor.layer import Layer, Teller
from qknorm.monitor.operators import TOKEN, enter, is_running, leave
from qknorm.monitor.taps import translate
from qknorm.monitor.taps.code import bases, names, reached

NAME = "functional"


def serves(module: nn.Module) -> bool:
    """Whether the code of the module, or a function that it calls, names one of the functions."""
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__:
        return False  # its forward is not what runs, as in the processors of diffusers
    if isinstance(module, nn.MultiheadAttention):
        return True  # it is one of another forward, which may still call torch's
    functions = reached(module)
    named = names(*functions)
    return bool(named & (_OBSERVERS.keys() | _LEADING)) or any(
        name in named and _observer(_callable(value)) is not None
        for owner in _owners(module, functions)
        for name, value in vars(owner).items()
    )


# Functions that choose among kernels at run time, of which SDPA is the usual one: that of diffusers.
_LEADING = {"dispatch_attention_fn"}


# Calls belong to the layer whose forward runs when they do.
RUNNING = Teller()

# Of the monitors whose layers this tap serves: traced code cannot ask what runs.
SWITCHES: list[Switch] = []


def install(layer: Layer) -> Callable[[], None]:
    """Let the module's forward say that it runs, and put observed functions where its code finds the
    originals; returns how to undo it."""
    layer.around = _announced
    with ExitStack() as stack:
        owners = _owners(layer.module, reached(layer.module))  # before its forward is replaced
        stack.callback(watch(layer))
        SWITCHES.append(layer.switch)
        stack.callback(SWITCHES.remove, layer.switch)
        for owner in owners:
            _Patched.enter(owner)
            stack.callback(_Patched.leave, owner)
        return stack.pop_all().close


def _announced(
    layer: Layer, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    return _inside(layer.handle, original, module, *args, **kwargs)


def shut(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose calls inside are its own, not those of a module around it."""
    if not SWITCHES:
        return function(*args, **kwargs)
    return _inside(None, function, *args, **kwargs)


def _inside(handle: Tensor | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # which could not go on after a graph break inside `try`
        torch.ops.qknorm.monitor_enter(TOKEN, handle)
        out = function(*args, **kwargs)
        torch.ops.qknorm.monitor_leave(TOKEN)
        return out
    enter(handle)
    try:
        return function(*args, **kwargs)
    finally:
        leave()


class _Names:
    """The global names of a Python module as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def _owners(module: nn.Module, functions: list[FunctionType]) -> list[Any]:
    """What holds the names that the code of a module sees: F, Python modules, its class and bases."""
    spaces = {id(vars(F)): vars(F), id(vars(flex)): vars(flex)}
    for function in functions:
        spaces[id(function.__globals__)] = function.__globals__
    own = [_Names(space) for space in spaces.values() if space is not globals()]
    return own + [base for base in bases(type(module)) if base is not object]


def _callable(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


class _Patched:
    """Namespaces in which originals are replaced, by how many layers, and what was there."""

    users: ClassVar[dict[int, int]] = {}
    before: ClassVar[dict[int, dict[str, Any]]] = {}

    @classmethod
    def enter(cls, owner: Any) -> None:
        place = id(owner.__dict__) if isinstance(owner, _Names) else id(owner)
        cls.users[place] = cls.users.get(place, 0) + 1
        if cls.users[place] > 1:
            return
        found = {name: v for name, v in vars(owner).items() if _observer(_callable(v)) is not None}
        cls.before[place] = found
        for name, value in found.items():
            wrapped = _observed(_callable(value))
            # A builtin on a class does not become a method; the function that stands for it would.
            is_static = isinstance(value, staticmethod) or (
                isinstance(owner, type) and not isinstance(value, FunctionType)
            )
            setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)

    @classmethod
    def leave(cls, owner: Any) -> None:
        place = id(owner.__dict__) if isinstance(owner, _Names) else id(owner)
        cls.users[place] -= 1
        if cls.users[place] == 0:
            for name, value in cls.before.pop(place).items():
                setattr(owner, name, value)
            del cls.users[place]


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    """One of the functions, seen."""
    observe = _observer(original)
    assert observe is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_watching():
            RUNNING.tell(observe, *args, **kwargs)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if isinstance(mask, CausalBias):
            # It looks whether it is used in the function that torch has under its name: in this one.
            return shut(CausalBias._dispatch, *args, **kwargs)
        return original(*args, **kwargs)

    return call


def _is_watching() -> bool:
    if torch.compiler.is_compiling():
        return any(switch.on for switch in SWITCHES)
    return is_running()


_OBSERVERS: dict[str, Callable[..., None]] = {
    "scaled_dot_product_attention": translate.sdpa,
    "flex_attention": translate.flex,
    "multi_head_attention_forward": translate.multi_head,
}
_ORIGINALS: dict[Any, Callable[..., None]] = {
    F.scaled_dot_product_attention: translate.sdpa,
    flex.flex_attention: translate.flex,
    F.multi_head_attention_forward: translate.multi_head,
}


def _observer(value: Any) -> Callable[..., None] | None:
    """What looks at the arguments of such a function; None for any other value."""
    # torch.compile(flex_attention), as it is usually called
    try:
        return _ORIGINALS.get(getattr(value, "_torchdynamo_orig_callable", value))
    except (
        Exception
    ):  # anything at all may be found under a name: not hashable, or failing when looked at
        return None

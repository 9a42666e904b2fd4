"""Any module whose code calls `F.scaled_dot_product_attention` or `flex_attention`, compiled or not: the
function is replaced, where the code of the module finds it, by one that looks first.

Not by a torch function mode: under one a compiler cannot trace such methods as `Tensor.split`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias, CausalVariant

from qknorm.monitor.forward import Switch, watch
from qknorm.monitor.layer import Layer, Teller
from qknorm.monitor.operators import TOKEN, enter, is_running, leave

NAME = "functional"


def serves(module: nn.Module) -> bool:
    """Whether a method of the module's class, or of a base outside torch, names one of the functions."""
    named: set[str] = set()
    for base in _bases(type(module)):
        for method in vars(base).values():
            code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
            if code is not None:
                named.update(_names(code))
    return bool(named & _OBSERVERS.keys()) or any(
        name in named and _observer(_callable(value)) is not None
        for place in _places(type(module))
        for name, value in place.items()
    )


def _bases(cls: type) -> Iterator[type]:
    return (base for base in cls.__mro__ if not base.__module__.startswith("torch."))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# Calls belong to the layer whose forward runs when they do.
RUNNING = Teller()

# Of the monitors whose layers this tap serves: traced code cannot ask what runs.
SWITCHES: list[Switch] = []


def install(layer: Layer) -> Callable[[], None]:
    """Let the module's forward say that it runs, and put observed functions where its code finds the
    originals; returns how to undo it."""
    layer.around = _announced
    with ExitStack() as stack:
        stack.callback(watch(layer))
        SWITCHES.append(layer.switch)
        stack.callback(SWITCHES.remove, layer.switch)
        for owner in _owners(type(layer.module)):
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


def _owners(cls: type) -> list[Any]:
    """What holds the names that the methods of a class see: F, its modules, itself and its bases."""
    spaces = {id(vars(F)): vars(F), id(vars(flex)): vars(flex)}
    for base in _bases(cls):
        for method in vars(base).values():
            function = getattr(method, "__wrapped__", method)  # also once its forward is replaced
            if hasattr(function, "__globals__"):
                spaces[id(function.__globals__)] = function.__globals__
    return [_Names(space) for space in spaces.values() if space is not globals()] + list(_bases(cls))


def _places(cls: type) -> list[Any]:
    return [vars(owner) for owner in _owners(cls)]


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


def _sdpa(
    layer: Teller,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    Tq, Tk = query.shape[-2], key.shape[-2]
    if isinstance(attn_mask, CausalBias):
        is_upper = attn_mask.variant == CausalVariant.UPPER_LEFT
        attn_mask = torch.ones(Tq, Tk, dtype=torch.bool, device=query.device).tril(
            0 if is_upper else Tk - Tq
        )
    elif attn_mask is not None and type(attn_mask) not in (Tensor, nn.Parameter, nn.Buffer):
        raise TypeError(f"a mask of type {type(attn_mask).__name__} is not understood")
    if is_causal and Tq != Tk:  # torch aligns at the first token
        is_causal, attn_mask = False, torch.ones(Tq, Tk, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dim() > 2 and query.dim() != 4:
        attn_mask = _four(attn_mask.expand(*query.shape[:-2], Tq, Tk))
    layer.observe(_four(query), _four(key), mask=attn_mask, causal=is_causal, scale=scale)


def _four(x: Tensor) -> Tensor:
    """As `[B, H, T, D]`: three axes are one head, more than four have several of batch."""
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(0, -4)


def _flex(
    layer: Teller,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> None:
    mask = None
    if block_mask is not None:
        B, H = block_mask.kv_num_blocks.shape[:2]
        Tq, Tk = query.shape[2], key.shape[2]
        mask = flex.create_mask(block_mask.mask_mod, B, H, Tq, Tk, device=str(query.device))
    layer.observe(query, key, mask=mask, scale=scale, score_mod=score_mod)


_OBSERVERS: dict[str, Callable[..., None]] = {
    "scaled_dot_product_attention": _sdpa,
    "flex_attention": _flex,
}
_ORIGINALS: dict[Any, Callable[..., None]] = {
    F.scaled_dot_product_attention: _sdpa,
    flex.flex_attention: _flex,
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

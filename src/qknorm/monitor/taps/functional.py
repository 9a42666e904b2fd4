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
from torch.nn.attention.bias import CausalBias, CausalVariant

from qknorm.monitor.forward import Switch, watch
from qknorm.monitor.layer import Layer, Teller
from qknorm.monitor.operators import TOKEN, enter, is_running, leave
from qknorm.monitor.taps.code import bases, names, reached
from qknorm.monitor.taps.projection import ADDED_KEY, observe_projected
from qknorm.monitor.view import MaskOf, per_pair

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
    if query.is_nested or key.is_nested:
        if torch.compiler.is_compiling():
            layer.refuse("nested tensors inside a compiled model cannot be measured")
            return
        for q, k in zip(query.unbind(), key.unbind(), strict=True):
            _sdpa(layer, q[None], k[None], k, is_causal=is_causal, scale=scale)
        return
    Tq, Tk = query.shape[-2], key.shape[-2]
    mask: Tensor | MaskOf | None = attn_mask
    if isinstance(attn_mask, CausalBias):
        is_causal, mask = True, None
        if attn_mask.variant == CausalVariant.LOWER_RIGHT and Tq != Tk:
            is_causal, mask = False, causal_mask_of(Tk - Tq)
    elif attn_mask is not None:
        if type(attn_mask) not in (Tensor, nn.Parameter, nn.Buffer):
            layer.refuse(f"a mask of type {type(attn_mask).__name__} is not understood")
            return
        if attn_mask.dim() > 2 and query.dim() != 4:
            mask = _four(attn_mask.expand(*query.shape[:-2], Tq, Tk))
    query, key = _four(query), _four(key)
    if is_causal and Tq != Tk:  # torch aligns at the first token
        is_causal, mask = False, causal_mask_of(0)
    batch = torch.broadcast_shapes(query.shape[:1], key.shape[:1])
    query, key = (x.expand(*batch, -1, -1, -1) for x in (query, key))
    layer.observe(query, key, mask=mask, causal=is_causal, scale=scale)


def causal_mask_of(offset: int) -> MaskOf:
    """Query i sees the keys up to i + offset."""
    return lambda queries, keys: (keys <= queries[:, None] + offset)[None, None]


def _four(x: Tensor) -> Tensor:
    """As `[B, H, T, D]`: two axes are a sequence, three are one head, more than four have several of
    batch."""
    if x.dim() < 4:
        return x.unsqueeze(-3) if x.dim() == 3 else x[None, None]
    return x.flatten(0, -4)


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
    if query.is_nested:
        layer.refuse("FlexAttention of nested tensors is not measured")
        return
    mask = None if block_mask is None else block_mask_of(block_mask)
    layer.observe(query, key.expand(len(query), -1, -1, -1), mask=mask, scale=scale, score_mod=score_mod)


def block_mask_of(block_mask: flex.BlockMask) -> MaskOf:
    """What a block mask of FlexAttention shows: its blocks, and in them what its function says."""
    inside = per_pair(block_mask.mask_mod, is_score=False)
    blocks = block_mask.to_dense().bool()
    height, width = block_mask.BLOCK_SIZE
    b, h = (torch.arange(n, device=blocks.device) for n in blocks.shape[:2])

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        listed = blocks[:, :, queries // height][..., keys // width]
        return inside(b, h, queries, keys) & listed

    return mask_of


def _multi_head(
    layer: Teller,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> None:
    if not need_weights:
        return  # it calls SDPA, which is seen
    if bias_k is not None or add_zero_attn:
        layer.refuse(ADDED_KEY)
        return
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        q_proj_weight, k_proj_weight, _ = in_proj_weight.chunk(3)
    assert q_proj_weight is not None
    assert k_proj_weight is not None
    observe_projected(
        layer,
        *(x if x.dim() == 2 else x.transpose(0, 1) for x in (query, key)),
        heads=num_heads,
        weights=(q_proj_weight, k_proj_weight),
        biases=(None, None) if in_proj_bias is None else in_proj_bias.chunk(3)[:2],
        padding=key_padding_mask,
        mask=attn_mask,
        causal=False,
        cross=query is not key,
        static_k=static_k,
    )


_OBSERVERS: dict[str, Callable[..., None]] = {
    "scaled_dot_product_attention": _sdpa,
    "flex_attention": _flex,
    "multi_head_attention_forward": _multi_head,
}
_ORIGINALS: dict[Any, Callable[..., None]] = {
    F.scaled_dot_product_attention: _sdpa,
    flex.flex_attention: _flex,
    F.multi_head_attention_forward: _multi_head,
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

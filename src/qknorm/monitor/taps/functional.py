"""Any module whose code calls `F.scaled_dot_product_attention`: seen by a torch function mode while the
module's forward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qknorm.monitor.layer import Layer

NAME = "sdpa"
CALL = "scaled_dot_product_attention"


def serves(module: nn.Module) -> bool:
    """Whether a method of the module's own class names the call."""
    if type(module).__module__.startswith("torch."):
        return False
    methods = (getattr(f, "__wrapped__", f) for f in vars(type(module)).values())
    return any(CALL in _names(f.__code__) for f in methods if hasattr(f, "__code__"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def install(layer: Layer) -> Callable[[], None]:
    """Run the module's forward under the mode; returns how to undo it."""
    module, original = layer.module, layer.module.forward
    before = module.__dict__.get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.switch.on:
            return original(*args, **kwargs)
        with _Observe(layer):
            return original(*args, **kwargs)

    module.forward = forward

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


class _Observe(TorchFunctionMode):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            _observe(self.layer, *args, **kwargs)
        return func(*args, **kwargs)


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

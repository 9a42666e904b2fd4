"""Hugging Face models: every attention function that `AttentionInterface` hands out is wrapped.

The name in the model's configuration stays what it is. Registering another name would change which code
runs: models compare the name with "eager" and "sdpa", and so does the code that builds masks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.monitor.forward import ATTRIBUTE
from qknorm.monitor.layer import Layer
from qknorm.monitor.taps.functional import shut

NAME = "transformers"
_METHOD = "get_interface"


def serves(module: nn.Module) -> bool:
    """Whether the module asks transformers for its attention function."""
    if "transformers" not in sys.modules:
        return False
    forward = type(module).forward
    code = getattr(forward, "__wrapped__", forward).__code__
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names


def install(layer: Layer) -> Callable[[], None]:
    """Wrap what is handed out while any layer is watched; returns how to undo it."""
    _Wrapped.enter()
    return _Wrapped.leave


class _Wrapped:
    """`AttentionInterface.get_interface`, wrapped once for all layers of all monitors."""

    users = 0
    original: Any = None

    @classmethod
    def enter(cls) -> None:
        from transformers.modeling_utils import AttentionInterface

        if cls.users > 0:
            cls.users += 1
            return
        original = cls.original = getattr(AttentionInterface, _METHOD)

        @functools.wraps(original)
        def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return _observed(original(self, name, default), name)

        setattr(AttentionInterface, _METHOD, get_interface)
        cls.users = 1

    @classmethod
    def leave(cls) -> None:
        from transformers.modeling_utils import AttentionInterface

        cls.users -= 1
        if cls.users == 0:
            setattr(AttentionInterface, _METHOD, cls.original)


def _observed(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layer: Layer | None = module.__dict__.get(ATTRIBUTE)
        if layer is None or not layer.switch.on:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        layer.tell(_observe, query, key, attention_mask, implementation, kwargs)
        return shut(function, module, query, key, value, attention_mask, *args, **kwargs)

    return attend


def _observe(
    layer: Layer, q: Tensor, k: Tensor, mask: Any, implementation: str, options: dict[str, Any]
) -> None:
    """Translate what transformers passes to an attention function."""
    Tq, Tk = q.shape[2], k.shape[2]
    causal, window = False, None
    is_causal = options.get("is_causal")
    is_causal = getattr(layer.module, "is_causal", True) if is_causal is None else is_causal
    if "flash" in implementation:
        causal, window = bool(is_causal), options.get("sliding_window")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            mask = mask[:, None, None].bool()
        elif mask is None and Tq == Tk:
            mask = _documents(options, q)
    elif "eager" in implementation:
        pass  # the mask says everything
    elif mask is None:
        causal = bool(is_causal) and Tq > 1
        if causal and Tq != Tk:  # torch aligns at the first token, `Mask` at the last
            causal, mask = False, torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril()
    elif not isinstance(mask, Tensor):
        mask = _dense(mask, q, Tk)
    bias = options.get("position_bias")
    if bias is not None:
        if mask is not None and mask.dtype == torch.bool:
            bias = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        elif mask is not None:
            bias = bias + mask
        mask = bias
    layer.observe(
        q,
        k,
        mask=mask,
        sink=options.get("s_aux"),
        causal=causal,
        window=window,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        cross=_is_cross(layer.module),
    )


def _is_cross(module: nn.Module) -> bool:
    """Whether keys are of another sequence: as encoder-decoder models mark it."""
    if getattr(module, "is_cross_attention", False):
        return True
    return bool(getattr(module, "is_decoder", False)) and getattr(module, "is_causal", None) is False


def _documents(options: dict[str, Any], q: Tensor) -> Tensor | None:
    """Bool `[B, 1, T, T]`, own document: what a flash function takes from `cu_seq_lens_q` or else from
    position ids that start anew; None if there is one document."""
    B, T = q.shape[0], q.shape[2]
    lengths, positions = options.get("cu_seq_lens_q"), options.get("position_ids")
    if lengths is not None:
        starts = torch.zeros(1, T + 1, dtype=torch.long, device=q.device)
        starts[0, lengths.long()] = 1
        ids = starts[:, :T].cumsum(1)
    elif isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == T:
        new = torch.zeros(positions.shape, dtype=torch.long, device=q.device)
        new[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        ids = new.cumsum(1)
    else:
        return None
    return (ids[:, :, None] == ids[:, None, :])[:, None].expand(B, 1, T, T)


def _dense(block_mask: Any, q: Tensor, Tk: int) -> Tensor:
    """A FlexAttention block mask as bool `[B, 1, Tq, Tk]`."""
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], Tk, device=str(q.device))

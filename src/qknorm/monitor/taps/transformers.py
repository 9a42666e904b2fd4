"""Hugging Face models: every attention function that `AttentionInterface` hands out is wrapped.

The name in the model's configuration stays what it is. Registering another name would change which code
runs: models compare the name with "eager" and "sdpa", and so does the code that builds masks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qknorm.monitor.forward import ATTRIBUTE
from qknorm.monitor.layer import Layer
from qknorm.monitor.taps.code import method, names
from qknorm.monitor.taps.flash import places, shown
from qknorm.monitor.taps.functional import block_mask_of, causal_mask_of, shut
from qknorm.monitor.view import as_mask_of, both

NAME = "transformers"
_METHOD = "get_interface"


def serves(module: nn.Module) -> bool:
    """Whether the module asks transformers for its attention function."""
    if "transformers" not in sys.modules:
        return False
    forward = method(type(module), "forward")
    return forward is not None and "ALL_ATTENTION_FUNCTIONS" in names(forward)


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
    kind = _kind(function, implementation)

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
        layer.tell(_observe, query, key, attention_mask, kind, kwargs)
        return shut(function, module, query, key, value, attention_mask, *args, **kwargs)

    return attend


# The functions of transformers by the file that they stand in.
_KINDS = {
    "flash_attention": "flash",
    "flash_paged": "flash",
    "sdpa_attention": "sdpa",
    "sdpa_paged": "sdpa",
    "msa_attention": "sdpa",
    "flex_attention": "flex",
    "eager_paged": "eager",
}


def _kind(function: Callable[..., Any], name: str | None) -> str:
    """How a function reads its arguments: "eager", "sdpa", "flash", "flex", or "own" if nobody knows.

    A name alone does not tell: kernels of the hub run behind the functions of transformers. A function
    of somebody else is taken to read the mask that is registered under its name.
    """
    place, _, file = getattr(function, "__module__", "").rpartition(".")
    if place == "transformers.integrations" and file in _KINDS:
        return _KINDS[file]
    if name is None or name == "eager":
        return "eager"
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    made_by = masks[name].__name__ if name in masks else ""
    return next((kind for kind in ("flash", "flex", "eager") if made_by.startswith(kind)), "own")


def _observe(layer: Layer, q: Tensor, k: Tensor, mask: Any, kind: str, options: dict[str, Any]) -> None:
    """Translate what transformers passes to an attention function, as that hands it to its kernel."""
    unknown = next((name for name in _UNKNOWN if options.get(name) is not None), None)
    if unknown is not None:
        layer.refuse(f"{unknown}: {_UNKNOWN[unknown]}")
        return
    if len(q) != len(k):  # learned queries
        q, k = (x.expand(max(len(q), len(k)), -1, -1, -1) for x in (q, k))
    Tq, Tk = q.shape[2], k.shape[2]
    told = options.get("is_causal")
    causal = bool(getattr(layer.module, "is_causal", True) if told is None else told) and Tq > 1
    bias, softcap, sink, window = (
        options.get(name) for name in ("position_bias", "softcap", "s_aux", "sliding_window")
    )
    if kind == "flash":
        bias = None  # it takes none
        found = places((len(q), Tq, Tk), mask, options)
        mask = None
        if found is not None:
            if len(found[0].document) < len(q):
                q, k = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k))
            mask = shown(*found, causal=causal, window=window)
            causal, window = causal and Tq == Tk, None
    elif kind in ("eager", "flex"):
        causal, window = False, None  # the mask says everything
        if isinstance(mask, Tensor):
            # Both add it, a bool one as well; FlexAttention adds that of the first head to all.
            mask = mask if mask.is_floating_point() else mask.to(q.dtype)
            mask = mask[:, :1] if kind == "flex" else mask
        elif mask is not None:
            mask = block_mask_of(mask)
    elif mask is not None:
        causal, window = False, None
    if kind == "sdpa":
        softcap = sink = window = None  # it takes none of them
        if causal and Tq != Tk:  # torch aligns at the first token
            causal, mask = False, causal_mask_of(0)
    if bias is not None:
        mask = both(as_mask_of(mask), as_mask_of(bias))
    layer.observe(
        q,
        k,
        mask=mask[..., :Tk] if isinstance(mask, Tensor) else mask,
        sink=sink,
        causal=causal,
        window=window,
        scale=options.get("scaling"),
        softcap=softcap,
        cross=_is_cross(layer.module),
    )


# What lets a kernel choose its keys by itself.
_UNKNOWN = {
    "block_table": "keys in a paged cache are not measured",
    "block_indices": "an attention that chooses its blocks of keys is not measured",
}


def _is_cross(module: nn.Module) -> bool:
    """Whether keys are of another sequence: as encoder-decoder models mark it."""
    if getattr(module, "is_cross_attention", False):
        return True
    return bool(getattr(module, "is_decoder", False)) and getattr(module, "is_causal", None) is False

"""`nn.MultiheadAttention`: q and k are projected once more, since its fast paths show neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qknorm.monitor.forward import watch
from qknorm.monitor.layer import Layer
from qknorm.monitor.taps.functional import shut
from qknorm.monitor.taps.projection import ADDED_KEY, observe_projected

NAME = "multihead"


def serves(module: nn.Module) -> bool:
    """Whether the module is one, with the forward of torch: what another does to q and k is its own."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    )


def install(layer: Layer) -> Callable[[], None]:
    """Look before the module's forward; returns how to undo it."""
    layer.around = _look_and_run
    return watch(layer)


def _look_and_run(
    layer: Layer, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    layer.tell(_observe, *args, **kwargs)
    return shut(original, module, *args, **kwargs)


def _observe(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> None:
    m = layer.module
    assert isinstance(m, nn.MultiheadAttention)
    if m.bias_k is not None or m.add_zero_attn:
        layer.refuse(ADDED_KEY)
        return
    if query.is_nested:
        for q, k in zip(query.unbind(), key.unbind(), strict=True):
            _observe(layer, q, q if query is key else k, k)
        return
    weights = (
        m.in_proj_weight.chunk(3)[:2] if m._qkv_same_embed_dim else (m.q_proj_weight, m.k_proj_weight)
    )
    observe_projected(
        layer,
        *(x if m.batch_first or x.dim() == 2 else x.transpose(0, 1) for x in (query, key)),
        heads=m.num_heads,
        weights=weights,
        biases=(None, None) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)[:2],
        padding=key_padding_mask,
        mask=attn_mask,
        causal=is_causal and not need_weights,
        cross=query is not key,
    )

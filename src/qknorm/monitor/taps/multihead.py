"""`nn.MultiheadAttention`: q and k are projected once more, since its fast paths show neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.monitor.forward import watch
from qknorm.monitor.layer import Layer
from qknorm.monitor.taps.functional import shut

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
        layer.refuse("add_bias_kv and add_zero_attn add a key that is not measured")
        return
    with torch.no_grad():
        q, k = (_batch_first(x, m.batch_first) for x in (query, key))
        weight_q, weight_k = _weights(m)
        bias = [None, None] if m.in_proj_bias is None else m.in_proj_bias.chunk(3)[:2]
        heads = [
            F.linear(x, w, b).unflatten(-1, (m.num_heads, m.head_dim)).transpose(1, 2)
            for x, w, b in zip((q, k), (weight_q, weight_k), bias, strict=True)
        ]
        mask = _mask(m, key_padding_mask, attn_mask)
    layer.observe(*heads, mask=mask, cross=query is not key)


def _batch_first(x: Tensor, is_batch_first: bool) -> Tensor:
    if x.dim() == 2:
        return x[None]
    return x if is_batch_first else x.transpose(0, 1)


def _weights(m: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    if m._qkv_same_embed_dim:
        q, k, _ = m.in_proj_weight.chunk(3)
        return q, k
    return m.q_proj_weight, m.k_proj_weight


def _mask(m: nn.MultiheadAttention, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """In the sense of `F.scaled_dot_product_attention`: this module's bool masks say what is hidden."""
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask.view(-1, m.num_heads, *mask.shape[1:])
        mask = ~mask if mask.dtype == torch.bool else mask
    if padding is not None:
        padding = padding[None] if padding.dim() == 1 else padding
        visible = (
            ~padding if padding.dtype == torch.bool else padding > torch.finfo(padding.dtype).min / 2
        )
        visible = visible[:, None, None]
        if mask is None:
            return visible
        if mask.dtype == torch.bool:
            return mask & visible
        return mask.masked_fill(~visible, -torch.inf)
    return mask

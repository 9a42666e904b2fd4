"""What torch's functions of attention are told, in the terms of `Layer.observe`: SDPA, the multi-head
function, FlexAttention. Each takes the arguments of the function that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.attention.flex_attention import BlockMask

from qknorm.monitor.layer import Teller
from qknorm.monitor.taps.projection import ADDED_KEY, observe_projected
from qknorm.monitor.view import MaskOf, per_pair


def sdpa(
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
            sdpa(layer, q[None], k[None], k, is_causal=is_causal, scale=scale)
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


def flex(
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


def block_mask_of(block_mask: BlockMask) -> MaskOf:
    """What a block mask of FlexAttention shows: its blocks, and in them what its function says."""
    inside = per_pair(block_mask.mask_mod, is_score=False)
    blocks = block_mask.to_dense().bool()
    height, width = block_mask.BLOCK_SIZE
    b, h = (torch.arange(n, device=blocks.device) for n in blocks.shape[:2])

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        listed = blocks[:, :, queries // height][..., keys // width]
        return inside(b, h, queries, keys) & listed

    return mask_of


def multi_head(
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

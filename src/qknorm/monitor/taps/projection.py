"""The multi-head attention of torch: q and k are projected once more, since its fast paths show neither.

Shapes: B batch, L queries, S keys, E width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qknorm.monitor.layer import Teller
from qknorm.monitor.view import as_mask_of, both

ADDED_KEY = "add_bias_kv and add_zero_attn add a key that is not measured"


def observe_projected(
    layer: Teller,
    query: Tensor,
    key: Tensor,
    *,
    heads: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    padding: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    cross: bool,
    static_k: Tensor | None = None,
) -> None:
    """Add one call.

    Args:
        query, key: `[B, L, E]` and `[B, S, E]`, or without the batch.
        weights, biases: of the projections of q and of k.
        padding: `[B, S]` or `[S]`, bool (True: hidden) or added to the logits.
        mask: `[L, S]` or `[B * H, L, S]`, in the same sense.
        causal: the kernel is told that the mask is causal, and may not look at it.
        cross: queries and keys are of different sequences.
        static_k: `[B * H, S, D]`, in place of the projected keys.
    """
    query, key = (x if x.dim() == 3 else x[None] for x in (query, key))
    with torch.no_grad():
        q, k = (
            F.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)
            for x, w, b in zip((query, key), weights, biases, strict=True)
        )
        if static_k is not None:
            k = static_k.unflatten(0, (-1, heads))
        if mask is not None:
            mask = _visible(mask if mask.dim() == 2 else mask.unflatten(0, (-1, heads)))
        if padding is not None:
            padding = _visible((padding if padding.dim() == 2 else padding[None])[:, None, None])
        if causal and padding is None and q.shape[2] == k.shape[2]:
            layer.observe(q, k, causal=True, cross=cross)
        elif mask is None or padding is None:
            layer.observe(q, k, mask=padding if mask is None else mask, cross=cross)
        else:
            layer.observe(q, k, mask=both(as_mask_of(mask), as_mask_of(padding)), cross=cross)


def _visible(mask: Tensor) -> Tensor:
    """In the sense of `F.scaled_dot_product_attention`: the bool masks here say what is hidden."""
    return ~mask if mask.dtype == torch.bool else mask

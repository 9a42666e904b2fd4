"""Rows of one weight as parameters of their own, for optimizers that treat a matrix as a whole.

Muon orthogonalises the update of a matrix. Of a fused projection that is the update of q, k and v
together, and of all heads. With row blocks it orthogonalises that of each, while the model keeps one
weight and one product.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import Parameter

from qknorm.nn.attention import Attention


def row_blocks(weight: Parameter, sizes: Sequence[int]) -> list[Parameter]:
    """Return the blocks of a weight's rows as parameters that share its memory and its gradient.

    An optimizer of the blocks changes the weight. After each backward pass the gradients of the blocks
    are views of the weight's gradient, so clipping either clips both. Call `zero_grad` of the optimizer;
    a gradient that the optimizer has dropped is dropped from the weight as well before the next one is
    added. Moving the model to another device or dtype is noticed in the next backward pass.

    Args:
        weight: `[rows, ...]`, a leaf that is not sharded.
        sizes: rows of each block, in order; they add up to all rows.

    Returns:
        The blocks, `[size, ...]` each.

    Raises:
        ValueError: the sizes do not add up, or the weight is sharded.
    """
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            "the rows of a sharded weight are on several ranks: make row blocks before fully_shard, or "
            "use an optimizer for sharded matrices"
        )
    if sum(sizes) != len(weight) or min(sizes, default=0) < 1:
        raise ValueError(
            f"blocks of {list(sizes)} rows do not make up the {len(weight)} rows of a weight"
        )
    blocks = [Parameter(rows) for rows in weight.detach().split(list(sizes))]

    def before(gradient: Tensor) -> None:
        if weight.grad is not None and all(block.grad is None for block in blocks):
            weight.grad = None

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradients = parameter.grad.split(list(sizes))
        for block, rows, gradient in zip(
            blocks, parameter.detach().split(list(sizes)), gradients, strict=True
        ):
            if block.data_ptr() != rows.data_ptr() or block.dtype != rows.dtype:
                block.grad = None  # a gradient has the dtype and the device of its parameter
                block.data = rows
            block.grad = gradient

    weight.register_hook(before)
    weight.register_post_accumulate_grad_hook(after)
    return blocks


def fused_rows(model: nn.Module, *, per_head: bool) -> dict[int, list[int]]:
    """Return the blocks of the fused projections that are known, by the id of the weight.

    Args:
        model: any module. Known are `qknorm.nn.Attention` and `torch.nn.MultiheadAttention`.
        per_head: whether each head is a block, or q, k and v are one each.
    """
    found: dict[int, list[int]] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            c = module.config
            heads, width, weight = (c.num_heads, c.kv_heads, c.kv_heads), c.width, module.qkv.weight
        elif isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
            heads, width = (module.num_heads,) * 3, module.head_dim
            weight = module.in_proj_weight
        else:
            continue
        found[id(weight)] = [width] * sum(heads) if per_head else [n * width for n in heads]
    return found

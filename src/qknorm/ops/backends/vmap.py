"""`torch.vmap` over the operators of a backend: examples become heads of one call.

Heads do not know of each other, so one call with N times as many heads is N calls. Only masks and rotary
tables belong to the rows of the batch and not to heads: where those differ by example, so do the calls.

Shapes: N examples, B batch, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The axis of the heads in each input that has one, in the order of `fused.Inputs`.
INPUT_HEADS = (1, 1, 1, 0, 0, -2, 0)
_SHARED = slice(7, 11)  # cos, sin, documents, key_padding
# The same for d_out, out and lse, and for out, lse, heads, counts, rows and visible of a forward pass.
SAVED_HEADS = (1, 1, -2)
FOUND_HEADS = (1, -2, -1, None, 2, None)


def rule(name: str, saved: int, result_heads: Sequence[int | None]) -> Callable[..., Any]:
    """The rule for an operator on `saved` tensors of `SAVED_HEADS` and then the fields of `Inputs`."""

    def operator(*arguments: Any) -> tuple[Tensor, ...]:
        return getattr(torch.ops.qknorm, name)(*arguments)  # there may be a vmap around this one

    heads = (*SAVED_HEADS[:saved], *INPUT_HEADS)

    def run(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        N = info.batch_size
        shared = in_dims[saved:][_SHARED]
        if any(dim is not None for dim in shared):
            calls = [
                operator(
                    *(
                        x if d is None else x.select(d, i)
                        for x, d in zip(arguments, in_dims, strict=True)
                    )
                )
                for i in range(N)
            ]
            return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(result_heads)
        folded = [
            _fold(x, dim, axis, N) for x, dim, axis in zip(arguments, in_dims, heads, strict=False)
        ]
        results = operator(*folded, *arguments[len(folded) :])
        found = [_unfold(x, axis, N) for x, axis in zip(results, result_heads, strict=True)]
        return tuple(x for x, _ in found), tuple(dim for _, dim in found)

    return run


def _fold(x: Tensor | None, dim: int | None, axis: int, N: int) -> Tensor | None:
    """Examples in front of the heads."""
    if x is None:
        return None
    x = x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)
    axis = axis % (x.dim() - 1)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _unfold(x: Tensor, axis: int | None, N: int) -> tuple[Tensor, int | None]:
    """Examples as an axis of their own, and which. A single axis is that of a result not asked for."""
    if axis is None or x.dim() == 1:
        return x, None
    axis = axis % x.dim()
    return x.unflatten(axis, (N, -1)), axis

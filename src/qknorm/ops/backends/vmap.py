"""The rule of `torch.vmap` for the operators of a backend: the examples become heads of one call.

Heads are independent, so one call with N times as many heads computes N calls. Masks and rotary tables
have no axis of heads. If they differ by example, the operator is called once for each example.

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
# The same axis in d_out, out and lse of a backward operator, and in the six results of a forward
# operator: out, lse, heads, counts, rows and visible.
SAVED_HEADS = (1, 1, -2)
FOUND_HEADS = (1, -2, -1, None, 2, None)


def rule(name: str, saved: int, result_heads: Sequence[int | None]) -> Callable[..., Any]:
    """Return the vmap rule of an operator.

    Args:
        name: name of the operator.
        saved: number of tensors, as in `SAVED_HEADS`, that the operator takes before the fields of
            `Inputs`.
        result_heads: the axis of the heads in each result, None for a result without one.
    """

    def operator(*arguments: Any) -> tuple[Tensor, ...]:
        return getattr(torch.ops.qknorm, name)(*arguments)  # dispatched again, as vmaps may be nested

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
    """Merge the axis of the examples into that of the heads, with the examples outermost."""
    if x is None:
        return None
    x = x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)
    axis = axis % (x.dim() - 1)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _unfold(x: Tensor, axis: int | None, N: int) -> tuple[Tensor, int | None]:
    """Split the axis of the examples off that of the heads. Returns the result and the new axis.

    A result without heads is the same for all examples, and a statistic with one axis is an empty one.
    Both are returned as they are, with the axis None.
    """
    if axis is None or x.dim() == 1:
        return x, None
    axis = axis % x.dim()
    return x.unflatten(axis, (N, -1)), axis

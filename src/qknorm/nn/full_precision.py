"""A base class for modules whose parameters and buffers must not be rounded to half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qknorm.spec import compute_dtype


class FullPrecision(nn.Module):
    """A module whose direct parameters and buffers stay fp32 when the model is cast to half precision.

    `double()` makes them fp64, since fp64 input is computed in fp64. They move to other devices like
    those of any module. Loading a state dict in half precision converts it to fp32, also with
    `assign=True`. Submodules are cast as usual.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullPrecision:
        """Apply `fn` to all tensors. Every cast and every move of a module comes through this method."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(lambda x: _not_narrowed(x, fn(x)), recurse=False)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in (*self._parameters, *self._buffers):
            x = state_dict.get(prefix + name)
            if isinstance(x, Tensor) and x.is_floating_point():
                state_dict[prefix + name] = x.to(compute_dtype(x.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _not_narrowed(before: Tensor, after: Tensor) -> Tensor:
    """Return `after`, or if the cast has rounded it, `before` in fp32 or fp64 on the new device."""
    if not after.is_floating_point() or after.dtype == compute_dtype(after.dtype):
        return after
    return before.to(device=after.device, dtype=compute_dtype(after.dtype))

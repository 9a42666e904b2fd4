"""Modules whose own tensors a cast of the model does not round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qknorm.spec import compute_dtype


class FullPrecision(nn.Module):
    """A module whose own parameters and buffers stay in fp32 when the model is cast to half precision.

    `double()` makes them fp64, the dtype in which fp64 input is computed. They follow every move to
    another device. A state dict in half precision is widened as it is loaded, also with `assign=True`.
    Submodules are cast as usual.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullPrecision:
        """What every cast and every move of a module goes through."""
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
    """`after`, or `before` where `after` is, if it was rounded on its way."""
    if not after.is_floating_point() or after.dtype == compute_dtype(after.dtype):
        return after
    return before.to(device=after.device, dtype=compute_dtype(after.dtype))

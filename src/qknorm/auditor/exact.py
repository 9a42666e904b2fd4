"""Products of fp32 tensors that are not rounded to TF32 or bf16 while a model is audited."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from qknorm.auditor.trace import COMPOSITE, WITH_WEIGHTS, opened, tensors_of
from qknorm.ops.products import rounds


def exact_products() -> AbstractContextManager[object]:
    """Compute products of fp32 tensors in fp64 where the user lets torch round them.

    No setting of torch is changed, since settings belong to the whole process. Compiled code and custom
    kernels still round as they do.
    """
    return _InDouble() if rounds("cpu") or rounds("cuda") else nullcontext()


class _InDouble(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSITE:
            with self:
                return opened(func)(*args, **kwargs)
        is_product = func is F.scaled_dot_product_attention or func.__name__ in WITH_WEIGHTS
        tensors = list(tensors_of((args, kwargs))) if is_product else []
        if not any(x.dtype == torch.float32 and rounds(x.device.type) for x in tensors):
            return func(*args, **kwargs)

        def wide(x: Tensor) -> Tensor:
            return x.double() if x.is_floating_point() else x

        args, kwargs = tree_map_only(Tensor, wide, (args, kwargs))
        return func(*args, **kwargs).float()

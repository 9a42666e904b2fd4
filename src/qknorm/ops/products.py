"""Matrix products of fp32 tensors that keep full precision under every precision setting of torch.

A user may let torch round fp32 products to TF32 or bf16 (`torch.set_float32_matmul_precision`,
`torch.backends.*.fp32_precision`). That is a choice for a model. It should not change the statistics of
the model or the definition of the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.assume_constant_result
def rounds(device: str) -> bool:
    """Whether torch rounds products of fp32 tensors to TF32 or bf16 on a device of this type.

    This reads torch's newer setting, `fp32_precision`, which also reflects changes made through the
    older functions. The older functions raise an error once the newer setting has been used.
    """
    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("tf32", "bf16")


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in the dtype of a, differentiable any number of times.

    If torch would round the fp32 products, this multiplies in fp64 instead. It does not change torch's
    setting for the moment, since a setting applies to the whole process, and the backward pass would run
    after that moment.
    """
    if a.dtype == torch.float32 and rounds(a.device.type):
        return (a.double() @ b.double()).to(a.dtype)
    return a @ b

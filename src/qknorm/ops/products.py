"""Products of fp32 tensors that stay exact whatever the user allows them to be rounded to.

Training runs let fp32 products round to TF32 or bf16 (`torch.set_float32_matmul_precision`,
`torch.backends.*.fp32_precision`). That is the user's choice for a model, not for its statistics nor
for the definition of the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.assume_constant_result
def rounds(device: str) -> bool:
    """Whether products of fp32 tensors are rounded on a device of this type.

    Asks torch's newer interface, which tells what was set through the older one as well. The older one
    raises an error once the newer has been used.
    """
    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("tf32", "bf16")


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in the dtype of a, differentiable as often as needed.

    Where fp32 products would be rounded it multiplies in fp64. No setting of torch is touched: settings
    belong to the whole process, and the backward pass would run under the user's again.
    """
    if a.dtype == torch.float32 and rounds(a.device.type):
        return (a.double() @ b.double()).to(a.dtype)
    return a @ b

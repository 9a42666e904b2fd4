"""The `triton` backend: norm, RoPE, attention and statistics in Triton kernels for NVIDIA GPUs.

`op` registers the operators, `problem` prepares the arguments of a call for the kernels, `launch`
launches the kernels, `tiles` holds their tile sizes, and `kernels` contains them. Triton is imported
only when a call needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from qknorm.ops.backends.call import Backend, Case, refuses_derivatives
from qknorm.ops.backends.triton.op import attention as attention
from qknorm.ops.backends.triton.op import prepare as prepare
from qknorm.ops.backends.triton.tiles import MAX_WIDTH

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The largest second or third axis of a launch grid. Norm and RoPE have the heads of q and of k on one
# axis.
MAX_GRID = 65_535


def interprets() -> bool:
    """Whether Triton's interpreter runs the kernels. It supports any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def refuses(case: Case) -> str | None:
    """Return what the backend does not support about this case, or None."""
    if case.device != "cuda" and not interprets():
        return f"tensors on {case.device}"
    if not _is_installed():
        return "this environment (Triton is not installed)"
    if case.device == "cuda" and torch.version.hip is not None:
        return "AMD GPUs"
    if case.device == "cuda" and not interprets() and _capability() < (8, 0):
        return "GPUs before sm_80"
    if case.dtype not in DTYPES:
        return f"{case.type_name} inputs"
    if max(case.head_dim, case.value_dim) > MAX_WIDTH:
        return f"heads wider than {MAX_WIDTH}"
    if max(case.batch, 2 * case.heads) > MAX_GRID:
        return f"a batch larger than {MAX_GRID} or more than {MAX_GRID // 2} heads"
    if case.sink_by_row:
        return "sinks whose logit differs by query"
    return "a scale of 0" if case.zero_scale else refuses_derivatives(case)


BACKEND = Backend(
    name="triton",
    purpose="Triton kernels for NVIDIA, sm_80 and newer",
    memory="linear in T",
    refuses=refuses,
    run=attention,
    is_automatic=lambda case: case.device == "cuda",
)

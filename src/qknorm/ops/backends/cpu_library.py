"""The shared library of the `cpu` backend: how it is loaded, called, and given its arguments.

The library has a plain C interface, so one build works with every release of torch. It receives pointers
and strides in the structure `Args`, and runs on torch's threads through `torch_parallel_for` of torch's
stable C interface.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_name("_qknorm_cpu.so")
# The fastest comes last. The position of a name is its bit in qknorm_instruction_sets(). QKNORM_CPU_ISA
# forces one of them, for tests and for the search for bugs.
INSTRUCTION_SETS = ("avx2", "avx512", "avx512_bf16", "amx")
FORCE = "QKNORM_CPU_ISA"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The number of rows in one partial sum of the gradients of the gains, as in csrc/args.h.
QUERY_PART, KEY_PART = 128, 256
ROPE = {None: 0, "half": 1, "interleaved": 2}
# Scratch memory up to this size is kept between calls, since the system takes longer to provide new
# pages than the computation takes to fill them.
KEPT_BYTES = 128 << 20

_SIZES = ("B", "Hq", "Hk", "Tq", "Tk", "D", "Dv", "R")
_OPTIONS = ("dtype", "isa", "rope", "causal", "window", "threads")
_STRIDES = c_int64 * 3


class Args(ctypes.Structure):
    """The structure `QknormArgs` of csrc/args.h, with the same fields in the same order."""

    _fields_ = (
        *((name, c_int64) for name in (*_SIZES, *_OPTIONS)),
        ("scale", c_double),
        ("eps", c_double),
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_stride", _STRIDES) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in ("q_gain", "k_gain", "cos", "sin")),
        ("rope_stride", c_int64),
        *((name, c_void_p) for name in ("query_ids", "key_ids", "sink", "out", "lse")),
        *((name, c_void_p) for name in ("head_stats", "row_counts")),
        *((name, c_void_p) for name in ("row_max", "row_log_sum", "row_entropy", "visible_keys")),
        ("d_out", c_void_p),
        ("d_out_stride", _STRIDES),
        *((name, c_void_p) for name in ("dq", "dk", "dv", "dq_gain", "dk_gain", "d_sink", "workspace")),
        ("workspace_bytes", c_int64),
    )

    def point(self, **tensors: Tensor | None) -> None:
        """Set the pointers of tensors, and the strides of their first three axes where a field exists.

        The sizes must be set before. C++ cannot check the tensor behind a pointer, so with a wrong dtype
        or size it would read or overwrite memory of other objects.

        Raises:
            RuntimeError: a tensor has another dtype, device, number of elements or layout than C++
                expects.
        """
        inputs = _INPUT_DTYPES[self.dtype]
        for name, x in tensors.items():
            if x is None:
                setattr(self, name, None)
                continue
            dtype, size = _POINTERS[name]
            wanted = inputs if dtype is None else dtype
            if x.dtype != wanted or not x.is_cpu or x.numel() < size(self):
                raise RuntimeError(
                    f"{name} must be at least {size(self)} elements of {wanted} on the CPU; "
                    f"got {x.numel()} of {x.dtype} on {x.device}"
                )
            if name in _STRIDED:
                getattr(self, f"{name}_stride")[:] = x.stride()[:3]
            if x.stride(-1) != 1 if name in _STRIDED else not x.is_contiguous():
                raise RuntimeError(f"{name} has strides {x.stride()}, which the library cannot read")
            setattr(self, name, x.data_ptr())


_INPUT_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
_STRIDED = frozenset(("q", "k", "v", "d_out"))
_FP32, _IDS, _COUNTS = torch.float32, torch.int32, torch.int64
# The dtype of each tensor (None means the dtype of q, k and v) and its smallest number of elements.
_POINTERS: dict[str, tuple[torch.dtype | None, Callable[[Args], int]]] = {
    "q": (None, lambda a: a.B * a.Hq * a.Tq * a.D),
    "k": (None, lambda a: a.B * a.Hk * a.Tk * a.D),
    "v": (None, lambda a: a.B * a.Hk * a.Tk * a.Dv),
    "out": (None, lambda a: a.B * a.Hq * a.Tq * a.Dv),
    "d_out": (None, lambda a: a.B * a.Hq * a.Tq * a.Dv),
    "dq": (None, lambda a: a.B * a.Hq * a.Tq * a.D),
    "dk": (None, lambda a: a.B * a.Hk * a.Tk * a.D),
    "dv": (None, lambda a: a.B * a.Hk * a.Tk * a.Dv),
    "q_gain": (_FP32, lambda a: a.Hq * a.D),
    "k_gain": (_FP32, lambda a: a.Hk * a.D),
    "cos": (_FP32, lambda a: (a.B if a.rope_stride else 1) * a.Tk * a.R // 2),
    "sin": (_FP32, lambda a: (a.B if a.rope_stride else 1) * a.Tk * a.R // 2),
    "query_ids": (_IDS, lambda a: a.B * a.Tq),
    "key_ids": (_IDS, lambda a: a.B * a.Tk),
    "sink": (_FP32, lambda a: a.Hq),
    "lse": (_FP32, lambda a: 2 * a.B * a.Hq * a.Tq),
    "head_stats": (_FP32, lambda a: 4 * a.Hq),
    "row_counts": (_COUNTS, lambda a: 2),
    "row_max": (_FP32, lambda a: a.B * a.Hq * a.Tq),
    "row_log_sum": (_FP32, lambda a: a.B * a.Hq * a.Tq),
    "row_entropy": (_FP32, lambda a: a.B * a.Hq * a.Tq),
    "visible_keys": (_COUNTS, lambda a: (a.B if a.key_ids else 1) * a.Tq),
    "dq_gain": (_FP32, lambda a: a.B * -(-a.Tq // QUERY_PART) * a.Hq * a.D),
    "dk_gain": (_FP32, lambda a: a.B * -(-a.Tk // KEY_PART) * a.Hk * a.D),
    "d_sink": (_FP32, lambda a: a.B * a.Hq),
}


class Library:
    """The loaded library.

    Raises:
        OSError: the file cannot be loaded, or was built from another version of the sources.
        AttributeError: torch or the file lacks a function.
    """

    def __init__(self) -> None:
        self._c = ctypes.CDLL(str(FILE))
        for name in ("args_size", "query_part", "key_part", "forward_workspace", "backward_workspace"):
            getattr(self._c, f"qknorm_{name}").restype = c_int64
        parts = self._c.qknorm_query_part(), self._c.qknorm_key_part()
        if self._c.qknorm_args_size() != ctypes.sizeof(Args) or parts != (QUERY_PART, KEY_PART):
            raise OSError(f"{FILE.name} was built from another version of the sources: build it again")
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self._c.qknorm_use_threads(ctypes.cast(torch_cpu.torch_parallel_for, c_void_p))
        bits = self._c.qknorm_instruction_sets()
        self._kept = threading.local()
        self.instruction_sets = [name for i, name in enumerate(INSTRUCTION_SETS) if bits >> i & 1]

    def run(self, step: str, args: Args) -> None:
        """Run the step `forward` or `backward`, on as many threads as torch uses.

        The fastest instruction set of this processor is used, or the one that QKNORM_CPU_ISA names.

        Raises:
            ValueError: this processor does not have the instruction set that QKNORM_CPU_ISA names.
        """
        chosen = os.environ.get(FORCE) or self.instruction_sets[-1]
        if chosen not in self.instruction_sets:
            raise ValueError(
                f"{FORCE} must be {' or '.join(self.instruction_sets)} on this machine; got {chosen}"
            )
        args.isa = INSTRUCTION_SETS.index(chosen)
        args.threads = torch.get_num_threads()
        args.workspace_bytes = getattr(self._c, f"qknorm_{step}_workspace")(ctypes.byref(args))
        workspace = self._workspace(args.workspace_bytes)
        args.workspace = workspace.data_ptr()
        getattr(self._c, f"qknorm_{step}")(ctypes.byref(args))

    def _workspace(self, size: int) -> Tensor:
        """Return at least `size` bytes of scratch memory, which belong to this Python thread."""
        kept: Tensor | None = getattr(self._kept, "buffer", None)
        if kept is not None and kept.numel() >= size:
            return kept
        fresh = torch.empty(size, dtype=torch.uint8)
        if size <= KEPT_BYTES:
            self._kept.buffer = fresh
        return fresh


def _load() -> Library | str:
    """Return the library, or the reason why it cannot be used."""
    if not FILE.exists():
        return "qknorm was installed without a C++ compiler (g++ or clang++)"
    try:
        library = Library()
    except (OSError, AttributeError) as error:
        return f"the compiled library cannot be used: {error}"
    if not library.instruction_sets:
        return "this processor has no AVX2"
    return library


# Loaded once, at import. The choice of a backend reads it inside compiled graphs, so it must be a
# constant.
LIBRARY = _load()

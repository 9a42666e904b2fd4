"""The table of backends and the choice among them.

`backend="auto"`, the error messages and `qknorm env` all read this table. A new backend is one file or
folder with a `Backend` in it, and one line in the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from qknorm.ops.backends import cpu, reference, stock, triton
from qknorm.ops.backends.call import Backend, Call, Case
from qknorm.ops.stats import Stats
from qknorm.spec import UnsupportedError

# For dense attention with at least this many keys, by rounded head width, `auto` takes `compose`: it
# fuses norm and RoPE only and leaves attention to cuDNN. With so many keys the faster kernel of cuDNN
# outweighs the extra pass over q. Estimated from published times of both kernels on Hopper; not measured
# on a GPU.
COMPOSE_FROM_KEYS = {64: 8192, 128: 4096, 256: 4096}


def _composes(case: Case) -> bool:
    width = max(64, 1 << (case.head_dim - 1).bit_length())
    return case.device == "cuda" and case.keys >= COMPOSE_FROM_KEYS.get(width, case.keys + 1)


def _refuses_to_compose(case: Case) -> str | None:
    if not case.is_dense:
        return "windows, documents and padding"
    if case.is_causal and case.queries != case.keys:
        return "causal masks with fewer queries than keys"
    if case.dtype == torch.float32:
        return "float32 inputs"
    if case.head_dim != case.value_dim or case.head_dim % 8:
        return "values of another width than the heads, or widths that are no multiple of 8"
    return triton.refuses(case)


def _compose(call: Call) -> tuple[Tensor, Stats | None]:
    q, k = triton.prepare(call)
    return stock.attention(replace(call, q=q, k=k, q_gain=None, k_gain=None, rope=None))


COMPOSE = Backend(
    name="compose",
    purpose="Triton for norm and RoPE, then PyTorch's own kernel (cuDNN, flash)",
    memory="linear in T",
    refuses=_refuses_to_compose,
    run=_compose,
    is_automatic=_composes,
)

# In order of preference: `auto` takes the first backend that may be chosen and supports the case.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (cpu.BACKEND, COMPOSE, triton.BACKEND, stock.BACKEND, reference.BACKEND)
}

# The names of the backends that the reference replaces, one set for each open `by_definition`.
_replaced: list[set[str]] = []


@contextmanager
def by_definition() -> Iterator[set[str]]:
    """Run every call on the reference backend while the context is open, even if the call names another.

    This is for code that must look inside the operator, such as a trace of its tensor operations. It
    then sees the definition and not the kernel that usually runs, so the caller has to compare the two
    as well. The change holds for the whole process: meanwhile other threads get the same results up to
    rounding, and use as much memory as the reference.

    Yields:
        A set that collects the names of the backends that were replaced.
    """
    _replaced.append(set())
    try:
        yield _replaced[-1]
    finally:
        _replaced.pop()


def choose(name: str, case: Case) -> Backend:
    """Return the backend for a case.

    Args:
        name: "auto" or the name of a backend.
        case: the properties of the call.

    Raises:
        ValueError: no backend has this name.
        UnsupportedError: the backend does not support the case.
    """
    chosen = _chosen(name, case)
    if not _replaced:
        return chosen
    _replaced[-1].add(chosen.name)
    return BACKENDS["reference"]


def _chosen(name: str, case: Case) -> Backend:
    if name == "auto":
        return next(b for b in BACKENDS.values() if b.is_automatic(case) and b.refuses(case) is None)
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].refuses(case)
    if reason is not None:
        able = [b.name for b in BACKENDS.values() if b.refuses(case) is None]
        raise UnsupportedError(f"backend {name!r} does not support {reason}: use {' or '.join(able)}")
    return BACKENDS[name]

"""Who can serve a call: one table, read by `auto`, by the error messages and by `qknorm env`.

A backend is one file or folder with a `Backend` in it, and a line in this table.
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

# From this many keys on, by rounded head width, `auto` leaves dense attention to cuDNN
# and fuses norm and RoPE alone: K is then read so often that its kernel's lead outweighs the pass
# over q that it costs. Estimated from published times of both kernels on Hopper; not measured on a GPU.
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
        return "values of another width, or widths that 8 does not divide"
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

# Fastest first: `auto` takes the first that it may take and that does not refuse.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (cpu.BACKEND, COMPOSE, triton.BACKEND, stock.BACKEND, reference.BACKEND)
}

# Names of the backends for which the reference stands in, one set for each open `by_definition`.
_replaced: list[set[str]] = []


@contextmanager
def by_definition() -> Iterator[set[str]]:
    """Serve every call by the reference, a named backend's too; yields the names of those replaced.

    For whoever has to look inside the operator. What they see is then the definition and not the kernel
    that runs: the two have to be compared besides. Process-wide: other threads get the same results
    meanwhile, up to rounding, with the memory of the reference.
    """
    _replaced.append(set())
    try:
        yield _replaced[-1]
    finally:
        _replaced.pop()


def choose(name: str, case: Case) -> Backend:
    """The backend for a case. Raises ValueError for an unknown name, UnsupportedError for a known one
    that cannot serve the case."""
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

"""Who can serve a call: one table, read by `auto`, by the error messages and by `qknorm env`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qknorm.ops.backends import cpu, reference, stock, triton
from qknorm.ops.backends.call import Call, Case
from qknorm.ops.stats import Stats
from qknorm.spec import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of the operator.

    Attributes:
        name: what `backend=` takes.
        purpose: one line for `qknorm env`.
        memory: how peak memory grows.
        refuses: the reason why it cannot serve a case, or None if it can.
        run: the implementation.
        is_automatic: whether `auto` may take it in a case that it can serve.
    """

    name: str
    purpose: str
    memory: str
    refuses: Callable[[Case], str | None]
    run: Callable[[Call], tuple[Tensor, Stats | None]]
    is_automatic: Callable[[Case], bool] = lambda case: True


# From this many keys on, by rounded head width, `auto` leaves dense attention without statistics to
# cuDNN and fuses norm and RoPE alone: K is then read so often that its kernel's lead outweighs the pass
# over q that it costs. Estimated from published times of both kernels on Hopper; not measured on a GPU.
COMPOSE_FROM_KEYS = {64: 8192, 128: 4096, 256: 4096}


def _composes(case: Case) -> bool:
    width = max(64, 1 << (case.head_dim - 1).bit_length())
    return case.device == "cuda" and case.keys >= COMPOSE_FROM_KEYS.get(width, case.keys + 1)


def _refuses_to_compose(case: Case) -> str | None:
    if case.has_stats:
        return "statistics"
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


# Fastest first: `auto` takes the first that it may take and that does not refuse.
BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        name="cpu",
        purpose="C++ for x86-64 (AVX2, AVX-512, bf16, AMX)",
        memory="linear in T",
        refuses=cpu.refuses,
        run=cpu.attention,
    ),
    "compose": Backend(
        name="compose",
        purpose="Triton for norm and RoPE, then PyTorch's own kernel (cuDNN, flash)",
        memory="linear in T",
        refuses=_refuses_to_compose,
        run=_compose,
        is_automatic=_composes,
    ),
    "triton": Backend(
        name="triton",
        purpose="Triton kernels for NVIDIA, sm_80 and newer",
        memory="linear in T",
        refuses=triton.refuses,
        run=triton.attention,
        is_automatic=lambda case: case.device == "cuda",
    ),
    "stock": Backend(
        name="stock",
        purpose="PyTorch's own kernels, any device",
        memory="linear in T",
        refuses=lambda case: None,
        run=stock.attention,
    ),
    "reference": Backend(
        name="reference",
        purpose="the definition, dense, any device",
        memory="T x T",
        refuses=lambda case: None,
        run=reference.attention,
    ),
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

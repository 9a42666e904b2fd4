"""Who can serve a call: one table, read by `auto`, by the error messages and by `qknorm env`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qknorm.ops.backends import cpu, reference, stock
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
    """

    name: str
    purpose: str
    memory: str
    refuses: Callable[[Case], str | None]
    run: Callable[[Call], tuple[Tensor, Stats | None]]


# Fastest first: `auto` takes the first that does not refuse.
BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        name="cpu",
        purpose="C++ for x86-64 (AVX2, AVX-512, bf16, AMX)",
        memory="linear in T",
        refuses=cpu.refuses,
        run=cpu.attention,
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


def choose(name: str, case: Case) -> Backend:
    """The backend for a case. Raises ValueError for an unknown name, UnsupportedError for a known one
    that cannot serve the case."""
    if name == "auto":
        return next(b for b in BACKENDS.values() if b.refuses(case) is None)
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].refuses(case)
    if reason is not None:
        able = [b.name for b in BACKENDS.values() if b.refuses(case) is None]
        raise UnsupportedError(f"backend {name!r} does not support {reason}: use {' or '.join(able)}")
    return BACKENDS[name]

"""Settings of torch that belong to the whole process: how tests make them, read them and undo them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _legacy(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def _set(path: str, value: Any) -> Callable[[], None]:
    def act() -> None:
        *owners, name = path.split(".")
        owner: Any = torch.backends
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return act


SWITCHES: dict[str, Callable[[], None]] = {
    "legacy high": lambda: _legacy("high"),
    "legacy medium": lambda: _legacy("medium"),
    "cuda.matmul.allow_tf32": _set("cuda.matmul.allow_tf32", True),
    "cuda.matmul tf32": _set("cuda.matmul.fp32_precision", "tf32"),
    "mkldnn.matmul bf16": _set("mkldnn.matmul.fp32_precision", "bf16"),
    "mkldnn.matmul tf32": _set("mkldnn.matmul.fp32_precision", "tf32"),
    "all tf32": _set("fp32_precision", "tf32"),
}
_GETTERS = [(b, op) for b in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn", "all")]


def precision() -> list[Any]:
    """Every setting, read in a way that does not raise whatever interface was used."""
    found: list[Any] = [torch._C._get_fp32_precision_getter("generic", "all")]
    found += [torch._C._get_fp32_precision_getter(b, op) for b, op in _GETTERS]
    for read in (torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.allow_tf32):
        try:
            found.append(read())
        except RuntimeError as error:  # the two interfaces were mixed, by the user
            found.append(str(error)[:40])
    return found


def _saved() -> dict[tuple[str, str], str]:
    return {key: torch._C._get_fp32_precision_getter(*key) for key in (("generic", "all"), *_GETTERS)}


@contextlib.contextmanager
def switched(name: str) -> Iterator[None]:
    before = _saved()
    SWITCHES[name]()
    try:
        yield
    finally:
        # The old interface writes into the new one's settings, so it goes first.
        torch.set_float32_matmul_precision("highest")
        for (backend, op), value in before.items():
            torch._C._set_fp32_precision_setter(backend, op, value)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)

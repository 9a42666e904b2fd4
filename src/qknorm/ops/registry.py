"""Operators of torch under the name `qknorm::`, each defined once per process.

A process may hold two copies of this package (importlib, tests that run tests); torch knows one operator
of a name. The copy that comes first serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "qknorm"


def define(
    name: str,
    schema: str,
    *,
    fake: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    tags: Any = (),
    **kernels: Callable[..., Any],
) -> None:
    """Define an operator.

    Args:
        name: without the namespace.
        schema: as `torch.library.define` takes it.
        fake: the shapes and dtypes of its results, for tracing.
        vmap: a rule as `torch.library.register_vmap` takes it.
        tags: as `torch.library.define` takes them.
        kernels: an implementation for each dispatch key, such as `CPU=` or
            `CompositeExplicitAutograd=`.
    """
    if is_defined(name):
        return
    torch.library.define(f"{NAMESPACE}::{name}", schema, tags=tags)
    torch.library.register_fake(f"{NAMESPACE}::{name}")(fake)
    if vmap is not None:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", vmap)
    for key, kernel in kernels.items():
        implement(name, key, kernel)


def is_defined(name: str) -> bool:
    """Whether this process has the operator."""
    return hasattr(getattr(torch.ops, NAMESPACE), name)


def implement(name: str, key: str, kernel: Callable[..., Any]) -> None:
    """Give an operator an implementation for one more dispatch key."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key):
        torch.library.impl(f"{NAMESPACE}::{name}", key)(kernel)

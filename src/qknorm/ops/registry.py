"""Registration of operators with torch in the namespace `qknorm::`, each once per process.

A process may import this package twice (with importlib, or in tests that run tests), but torch accepts
only one definition of an operator. The copy that is imported first defines the operators for both.
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
    """Define an operator, unless this process has defined it already.

    Args:
        name: the name without the namespace.
        schema: the schema in the form of `torch.library.define`.
        fake: a function that returns empty results of the right shapes and dtypes, for tracing.
        vmap: a rule in the form of `torch.library.register_vmap`.
        tags: tags in the form of `torch.library.define`.
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
    """Whether this process has defined the operator."""
    return hasattr(getattr(torch.ops, NAMESPACE), name)


def implement(name: str, key: str, kernel: Callable[..., Any]) -> None:
    """Register an implementation of an operator for one more dispatch key, unless it has one."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key):
        torch.library.impl(f"{NAMESPACE}::{name}", key)(kernel)

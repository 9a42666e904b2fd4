"""What the code of a module names, read and not run: its methods, and the functions that its forward
reaches.

Nothing of the module is asked for by attribute: a property may raise, and a scripted module has no code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# What is not followed: torch's own functions, and those that the registry of transformers hands out.
_CLOSED = ("torch.", "transformers.integrations.", "transformers.masking_utils.")
MOST = 64  # functions of one module


def bases(cls: type) -> list[type]:
    """The class and those of its bases that are not torch's."""
    return [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]


def function_of(value: Any) -> FunctionType | None:
    """The plain function behind a method, a partial or a decorated one; None if there is none."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    try:
        value = inspect.unwrap(value)
    except ValueError:  # wrapped in a circle
        return None
    return value if isinstance(value, FunctionType) else None


def method(cls: type, name: str) -> FunctionType | None:
    """A method as it stands in the class, without what a descriptor would make of it."""
    return next((function_of(vars(base)[name]) for base in cls.__mro__ if name in vars(base)), None)


def reached(module: nn.Module) -> list[FunctionType]:
    """The methods of the module's class, and what `followed` finds."""
    values = [value for base in bases(type(module)) for value in vars(base).values()]
    methods = [
        f
        for value in values
        # A method whose source was made up while running has no module.
        if (f := function_of(value)) and not (f.__module__ or "").startswith("torch.")
    ]
    return list(dict.fromkeys(methods + followed(module)))


def followed(module: nn.Module) -> list[FunctionType]:
    """The forward of the module and what it calls by name: methods, other functions, and what the module
    keeps in an attribute, such as a processor."""
    queue = [method(type(module), "forward")]
    found: dict[FunctionType, None] = {}
    while queue and len(found) < MOST:
        function = queue.pop()
        if function is None or function in found or f"{function.__module__}.".startswith(_CLOSED):
            continue
        found[function] = None
        for name in sorted(set(_names(function.__code__))):
            value = module.__dict__.get(name)
            if value is not None and not isinstance(value, type | FunctionType | functools.partial):
                value = method(type(value), "__call__")
            queue.append(
                function_of(value)
                or method(type(module), name)
                or function_of(function.__globals__.get(name))
            )
    return list(found)


def names(*functions: FunctionType) -> set[str]:
    """All names that the code of functions looks up."""
    return {name for function in functions for name in _names(function.__code__)}


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def _names(code: CodeType) -> Iterator[str]:
    for one in codes(code):
        yield from one.co_names

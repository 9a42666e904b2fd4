"""The forward of a watched module, replaced once for all modules of its class.

Not by a hook, which copies of the module would keep, nor on each instance, which would be one more
variant of everything that is compiled for their class.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from qknorm.monitor.operators import handle_of

# In the `__dict__` of a module while it is watched: its watcher.
ATTRIBUTE = "_qknorm_watcher"

# Classes whose forward is replaced: by how many modules, and what it was.
REPLACED: dict[type, tuple[int, FunctionType]] = {}


class Switch:
    """Shared by all watchers of one monitor: whether this step is observed, and how."""

    def __init__(self, sample: int | None) -> None:
        self.on = True
        self.sample = sample


class Watcher:
    """Of one module. Traced code reads `switch`, `handle` and `around`, and writes nothing; operators
    call its methods through `attempt(method, *args)`, which raises no error.

    Attributes:
        module: what is watched.
        handle: by which the operators of `operators.py` find this object.
        around: called as `around(watcher, original, module, *args, **kwargs)` in place of the module's
            forward, `original`, in observed steps; None where the tap looks elsewhere. One function for
            all modules of a kind.
    """

    def __init__(self, module: nn.Module, switch: Switch) -> None:
        self.module, self.switch = module, switch
        self.handle: Tensor = handle_of(self)
        self.around: Callable[..., Any] | None = None

    # A copy of a watched module, in memory or in a file, is not watched.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def watch(watcher: Watcher) -> Callable[[], None]:
    """Let the module's forward go through its watcher; returns how to undo it."""
    module = watcher.module
    if "forward" in module.__dict__:
        return _Forward(module).undo
    owner: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    users, original = REPLACED.get(owner, (0, vars(owner)["forward"]))
    if users == 0:
        owner.forward = _watched(original)
    REPLACED[owner] = users + 1, original
    return lambda: _leave(owner)


def _leave(owner: Any) -> None:
    users, original = REPLACED[owner]
    if users > 1:
        REPLACED[owner] = users - 1, original
        return
    del REPLACED[owner]
    # Where somebody has put another forward over ours it stays, and ours passes on.
    if getattr(owner.forward, "__wrapped__", None) is original:
        owner.forward = original


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watcher = self.__dict__.get(ATTRIBUTE)
        if watcher is None or watcher.around is None or not watcher.switch.on:
            return original(self, *args, **kwargs)
        return watcher.around(watcher, original, self, *args, **kwargs)

    return forward


class _Forward:
    """In place of a forward that a module has of its own. A copy of the module gets its original."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.original = module, module.__dict__["forward"]
        self.call = _watched(lambda _, *args, **kwargs: self.original(*args, **kwargs))
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.module, *args, **kwargs)

    def undo(self) -> None:
        if self.module.__dict__.get("forward") is self:
            self.module.forward = self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.original, "__call__")

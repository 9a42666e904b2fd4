"""What a forward says to the monitor: operators, opaque to a compiler, that act when they run.

Traced code must write no Python object: a compiler leaves a checkpointed region that does to Python, and
compiles anew for each object that it finds. So all that a tap does in a forward is to call one of these,
with the handle of what is watched, a tensor. Everything else happens while the model runs.

They seem to write to TOKEN, so that they keep their order and none is dropped as useless.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from qknorm.ops import registry

with torch.inference_mode(False):
    TOKEN = torch.zeros(1, dtype=torch.int64, device="cpu")


class _Running(threading.local):
    """The watched modules whose forwards run, innermost last; None where calls are nobody's."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


# What is watched, by number, and what runs. In torch's namespace: a second copy of this package finds
# the operators of the first, which have to find what the second watches.
_WATCHED: WeakValueDictionary[int, Any]
_WATCHED, _NUMBERS, _RUNNING = vars(torch.ops.qknorm).setdefault(
    "monitor_state", (WeakValueDictionary(), itertools.count(), _Running())
)


def handle_of(watched: object) -> Tensor:
    """A tensor `[1]` by which operators find an object again. On the CPU, where reading it is free."""
    number = next(_NUMBERS)
    _WATCHED[number] = watched
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def is_running() -> bool:
    """Whether calls belong to a watched module now. Not for traced code."""
    return bool(_RUNNING.stack) and _RUNNING.stack[-1] is not None


# Where a compiler leaves a frame to Python, as it does under FSDP with default arguments, it still looks
# into the functions that the frame calls, and would compile them. `torch.compiler.disable` does so too,
# but loads the compiler at once.
@_disable_dynamo
def enter(layer: Tensor | None) -> None:
    """From here on calls belong to a layer; None for nobody. Not for traced code."""
    _RUNNING.stack.append(None if layer is None else _WATCHED.get(int(layer)))


@_disable_dynamo
def leave() -> None:
    """The end of what the last `enter` began."""
    if _RUNNING.stack:
        _RUNNING.stack.pop()


def forget_running() -> None:
    """After a step: a compiled forward that raised an error has left its module behind."""
    _RUNNING.stack.clear()


def _is_recomputed() -> bool:
    """Whether autograd is running: a forward now is one that activation checkpointing repeats, and was
    counted the first time."""
    return torch._C._current_graph_task_id() != -1


@_disable_dynamo
def tell(handle: Tensor | None, method: str, *args: Any) -> None:
    """Call a method of what is watched, or else of the innermost module that runs."""
    if _is_recomputed():
        return
    if handle is not None:
        watched = _WATCHED.get(int(handle))
    else:
        watched = _RUNNING.stack[-1] if _RUNNING.stack else None
    if watched is not None:
        watched.attempt(getattr(watched, method), *args)


def _refuse_vmap(info: Any, in_dims: Any, token: Tensor, handle: Tensor | None = None, *_: Any) -> Any:
    tell(handle, "note", "calls under torch.vmap are not measured")
    return None, None


def _define(name: str, arguments: str, kernel: Callable[..., None]) -> None:
    registry.define(
        f"monitor_{name}",
        f"(Tensor(a!) token{arguments}) -> ()",
        fake=lambda *_: None,
        vmap=_refuse_vmap,
        # In a CUDA graph they would run once, while it is recorded.
        tags=(torch.Tag.cudagraph_unsafe,),
        CompositeExplicitAutograd=_disable_dynamo(kernel),
    )


_define("enter", ", Tensor? layer", lambda _, layer: enter(layer))
_define("leave", "", lambda _: leave())
# Each is a method of what the handle stands for.
for _method, _arguments in {
    "measure": "Tensor? layer, Tensor q, Tensor k, Tensor? mask, Tensor? documents, Tensor? sink, "
    "bool causal, int? window, float? scale, float? softcap, bool cross",
    "take": "Tensor layer, Tensor q, Tensor k, float? scale, Tensor max_logit, Tensor entropy_sum, "
    "Tensor ratio_sum, Tensor sink_sum, Tensor row_count, Tensor ratio_count",
    "ask": "Tensor norm",
    "note": "Tensor? layer, str why",
}.items():
    _define(
        _method,
        f", {_arguments}",
        lambda _, handle, *args, method=_method: tell(handle, method, *args),
    )

"""`qknorm.nn.Attention`: the values of the fused pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from qknorm.monitor.layer import Layer
from qknorm.nn import Attention

NAME = "qknorm"


def serves(module: nn.Module) -> bool:
    return isinstance(module, Attention)


def install(layer: Layer) -> Callable[[], None]:
    """Become the observer of the module; returns how to undo it."""
    module = layer.module
    assert isinstance(module, Attention)
    module.observer = layer

    def undo() -> None:
        del module.observer

    return undo

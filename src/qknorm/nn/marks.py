"""Marks on parameters that optimizers must treat apart.

Gains and sinks must not decay to zero (a decayed gain flattens attention, squared for q and k) and
must not be orthogonalised, although a gain `[heads, D]` is two-dimensional. So they are known by a
mark, never by `ndim` or by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

from qknorm.nn.full_precision import FullPrecision

GAIN = "gain"
SINK = "sink"


def mark(parameter: Parameter, kind: str, *, offset: float = 0.0) -> Parameter:
    """Mark a parameter as a gain or a sink.

    Sets `qknorm_kind`, `qknorm_offset` (1.0 for a gain stored as 1 + w), and two attributes that
    other trainers read: `no_weight_decay` and `use_muon` (Megatron-LM).
    """
    tags: dict[str, Any] = {
        "qknorm_kind": kind,
        "qknorm_offset": offset,
        "no_weight_decay": True,
        "use_muon": False,
    }
    for name, value in tags.items():
        setattr(parameter, name, value)
    return parameter


class MarkedModule(FullPrecision):
    """A module that declares which of its own parameters are gains or sinks.

    The declaration lives on the module because copies of a parameter (deepcopy, sharding) lose
    attributes; `marked_parameters` sets them again.
    """

    marked: dict[str, tuple[str, float]]

    def __init__(self) -> None:
        super().__init__()
        self.marked = {}

    def add_marked(
        self, name: str, parameter: Parameter | None, kind: str, *, offset: float = 0.0
    ) -> None:
        """Register a marked parameter, or None for one that this configuration does not have."""
        if parameter is not None:
            mark(parameter, kind, offset=offset)
            self.marked[name] = (kind, offset)
        self.register_parameter(name, parameter)


def marked_parameters(model: nn.Module) -> Iterator[tuple[str, Parameter, str, float]]:
    """Name, parameter, kind and offset of every gain and sink of a model, marks renewed."""
    for prefix, module in model.named_modules():
        for name, (kind, offset) in getattr(module, "marked", {}).items():
            parameter = getattr(module, name)
            if parameter is not None:
                mark(parameter, kind, offset=offset)
                yield f"{prefix}.{name}" if prefix else name, parameter, kind, offset

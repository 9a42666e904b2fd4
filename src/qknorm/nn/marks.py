"""Marks on gains and sinks, which optimizers must treat differently from other parameters.

Weight decay must not pull them to zero: a smaller gain flattens attention, and the gains of q and k
multiply each other. A matrix optimizer must not orthogonalise them, although a gain `[heads, D]` has two
axes. So gains and sinks carry a mark, and are not recognised by their name or number of axes.
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

    This sets the attributes `qknorm_kind` and `qknorm_offset`, and two that other trainers read:
    `no_weight_decay = True` and `use_muon = False` (Megatron-LM).

    Args:
        parameter: the parameter, of any shape.
        kind: "gain" or "sink".
        offset: 1.0 for a gain that is stored as w and means 1 + w, else 0.0.

    Returns:
        The same parameter.
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
    """A module that declares which of its direct parameters are gains or sinks.

    The module keeps the declaration, because copying or sharding a parameter drops the attributes that
    `mark` sets. `marked_parameters` sets them again.

    Attributes:
        marked: kind and offset of each marked parameter, by name.
    """

    marked: dict[str, tuple[str, float]]

    def __init__(self) -> None:
        super().__init__()
        self.marked = {}

    def add_marked(
        self, name: str, parameter: Parameter | None, kind: str, *, offset: float = 0.0
    ) -> None:
        """Register a parameter and mark it.

        Args:
            name: name of the parameter in the module.
            parameter: the parameter, or None if this configuration does not have it.
            kind: "gain" or "sink".
            offset: see `mark`.
        """
        if parameter is not None:
            mark(parameter, kind, offset=offset)
            self.marked[name] = (kind, offset)
        self.register_parameter(name, parameter)


def marked_parameters(model: nn.Module) -> Iterator[tuple[str, Parameter, str, float]]:
    """Yield every gain and sink of a model, and set their marks again.

    Args:
        model: any module.

    Yields:
        The full name, the parameter, its kind ("gain" or "sink") and its offset, see `mark`.
    """
    for prefix, module in model.named_modules():
        for name, (kind, offset) in getattr(module, "marked", {}).items():
            parameter = getattr(module, name)
            if parameter is not None:
                mark(parameter, kind, offset=offset)
                yield f"{prefix}.{name}" if prefix else name, parameter, kind, offset

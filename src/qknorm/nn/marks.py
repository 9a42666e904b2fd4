"""Marks on parameters that optimizers must treat apart, and the groups made from them.

Gains and sinks must not decay to zero (a decayed gain flattens attention, squared for q and k) and
must not be orthogonalised, although a gain `[heads, D]` is two-dimensional. So they are known by a
mark, never by `ndim` or by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

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


class MarkedModule(nn.Module):
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


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    gain_decay: float = 0.0,
    no_matrix: Iterable[str] = ("embed", "head"),
) -> list[dict[str, Any]]:
    """Parameter groups for AdamW, or for a matrix optimizer such as Muon beside it.

    Groups, each with a `name`, empty ones left out:
      * `matrix`: two-dimensional weights outside embeddings and output head; decayed. The only
        group that a matrix optimizer may take.
      * `decay`: other weights with two axes or more; decayed.
      * `gain`: gains stored as 1 + w, only with `gain_decay > 0`, whose decay pulls them to 1.
      * `no_decay`: gains, sinks, biases and other norms.

    Args:
        model: any module.
        weight_decay: for `matrix` and `decay`.
        gain_decay: for gains stored as 1 + w. Undecayed gains can run away at high learning rates.
        no_matrix: parts of parameter names that keep a weight out of `matrix`.

    Raises:
        ValueError: `gain_decay` for gains stored as w, which it would pull to zero.
    """
    kinds = {id(p): (kind, offset) for _, p, kind, offset in marked_parameters(model)}
    groups: dict[str, list[Parameter]] = {"matrix": [], "decay": [], "gain": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind, offset = kinds.get(id(parameter), ("", 0.0))
        if kind == GAIN and gain_decay > 0:
            if offset != 1.0:
                raise ValueError(
                    f"gain_decay would pull {name} to 0, since it is stored as w: build the model with "
                    "NormDialect(offset=1.0), whose gains 1 + w decay to 1"
                )
            groups["gain"].append(parameter)
        elif kind or parameter.ndim < 2:
            groups["no_decay"].append(parameter)
        elif parameter.ndim == 2 and not any(part in name for part in no_matrix):
            groups["matrix"].append(parameter)
        else:
            groups["decay"].append(parameter)
    decays = {"matrix": weight_decay, "decay": weight_decay, "gain": gain_decay, "no_decay": 0.0}
    return [
        {"name": name, "params": params, "weight_decay": decays[name]}
        for name, params in groups.items()
        if params
    ]

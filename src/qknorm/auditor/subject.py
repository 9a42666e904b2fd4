"""A model as an audit sees it: what it is called with, and every way through it.

What the arguments mean is told by their values and by the names that callers use for them; what the
modules inside mean is told by nothing but probing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.auditor.trace import tensors_of

POSITIONS = ("positions", "position_ids", "pos")
PADDING = ("key_padding", "attention_mask", "padding_mask")
DOCUMENTS = ("documents", "document_ids", "segment_ids", "seq_idx")

Call = Callable[..., Any]


@dataclass(eq=False)
class Subject:
    """A model in evaluation mode.

    Attributes:
        inputs: keyword arguments.
        tokens: the name of the token ids, int `[B, T]`; None for a model of something else.
        paths: ways from the inputs to the output by name; the first is how the model runs by itself.
        has_decode: whether one of them decodes with a cache.
    """

    model: nn.Module
    inputs: dict[str, Any]
    tokens: str | None
    paths: dict[str, Call] = field(default_factory=dict)
    has_decode: bool = False

    def name_of(self, kinds: tuple[str, ...]) -> str | None:
        """The argument of the inputs that is called so."""
        return next((k for k in kinds if isinstance(self.inputs.get(k), Tensor)), None)

    def positions(self) -> str | None:
        """The name under which the model takes positions."""
        return next((name for name in POSITIONS if name in _arguments(self.model)), None)

    def real(self) -> Tensor | None:
        """Bool `[B, T]`, True for a token that is no padding; None if the inputs do not say."""
        padding, documents = self.name_of(PADDING), self.name_of(DOCUMENTS)
        if self.tokens is None or (padding is None and documents is None):
            return None
        real = torch.ones(self.inputs[self.tokens].shape, dtype=torch.bool)
        if padding is not None and self.inputs[padding].shape == real.shape:
            real = real & self.inputs[padding].bool().cpu()
        if documents is not None and self.inputs[documents].shape == real.shape:
            real = real & (self.inputs[documents] >= 0).cpu()
        return real

    def run(self, path: str | None = None, changed: dict[str, Any] | None = None) -> Tensor:
        """The output of one path, with some inputs changed."""
        call = self.paths[path or next(iter(self.paths))]
        return output(call(**self.inputs | (changed or {})))


def output(value: Any) -> Tensor:
    """The first floating tensor of what a model returns, with three axes if there is one."""
    found = [t for t in tensors_of(value) if t.is_floating_point()]
    if not found:
        raise ValueError("the model returns no floating tensor: nothing can be compared")
    return next((t for t in found if t.dim() >= 3), found[0])


def called(model: nn.Module, call: Callable[[], Any]) -> Any:
    """What a call of the model returns. Raises ValueError, with what it raised, if it does not work."""
    try:
        return call()
    except Exception as error:
        name = type(model).__name__
        raise ValueError(f"{name} raised {type(error).__name__} when it was called: {error}") from error


@contextmanager
def audited(model: nn.Module, inputs: Any) -> Iterator[Subject]:
    """The model in evaluation mode without gradients of its own; both are put back.

    Raises ValueError if there are no inputs and none can be made.
    """
    training = [(module, module.training) for module in model.modules()]
    state = torch.get_rng_state()
    model.eval()
    try:
        yield _subject(model, inputs)
    finally:
        for module, was in training:
            module.training = was
        torch.set_rng_state(state)


def _subject(model: nn.Module, inputs: Any) -> Subject:
    named = _named(model, inputs)
    tokens = next(
        (
            name
            for name, value in named.items()
            if isinstance(value, Tensor)
            and not value.is_floating_point()
            and value.dim() == 2
            and name not in (*POSITIONS, *PADDING, *DOCUMENTS)
        ),
        None,
    )
    subject = Subject(model, named, tokens)
    if callable(getattr(model, "paths", None)):
        _add_declared_paths(subject)
    elif _is_transformers(model):
        from qknorm.auditor.transformers_paths import add_paths

        add_paths(subject)
    else:
        subject.paths["forward"] = model
    return subject


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    if inputs is None:
        if not _is_transformers(model):
            raise ValueError(
                f"{type(model).__name__} is no Hugging Face model: pass inputs, what it is called with"
            )
        from qknorm.auditor.transformers_paths import example_inputs

        return example_inputs(model)
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    names = _arguments(model)
    if len(values) > len(names):
        raise ValueError(f"{len(values)} inputs for {type(model).__name__}, which takes {len(names)}")
    return dict(zip(names, values, strict=False))


def _arguments(model: nn.Module) -> list[str]:
    """Names, of a compiled model those of what was compiled."""
    model = getattr(model, "_orig_mod", model)
    return list(inspect.signature(model.forward).parameters)


def _is_transformers(model: nn.Module) -> bool:
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def _add_declared_paths(subject: Subject) -> None:
    """`model.paths()`, with the one first that the model itself takes."""
    declared: dict[str, Call] = dict(subject.model.paths())  # type: ignore[operator]
    with torch.no_grad():
        own = output(called(subject.model, lambda: subject.model(**subject.inputs)))
        same = [n for n, call in declared.items() if n != "decode" and _gives(call, subject, own)]
    first = same[0] if same else "forward"
    subject.paths = {first: subject.model} | {n: c for n, c in declared.items() if n != first}
    subject.has_decode = "decode" in declared


def _gives(call: Call, subject: Subject, wanted: Tensor) -> bool:
    try:
        found = output(call(**subject.inputs))
    except Exception:  # compared with the others, it will say so
        return False
    return found.shape == wanted.shape and torch.equal(found.nan_to_num(), wanted.nan_to_num())

"""A model as an audit sees it: what it is called with, and every way through it.

What the arguments mean is told by their values and by the names that callers use for them; what the
modules inside mean is told by nothing but probing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.auditor import transformers_paths
from qknorm.auditor.guard import first_line
from qknorm.auditor.trace import tensors_of

POSITIONS = ("positions", "position_ids", "pos")
PADDING = ("key_padding", "attention_mask", "padding_mask")
DOCUMENTS = ("documents", "document_ids", "segment_ids", "seq_idx")

VAR_POSITIONAL, VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

Call = Callable[..., Any]


@dataclass(eq=False)
class Subject:
    """A model in evaluation mode.

    Attributes:
        inputs: keyword arguments of the paths.
        tokens: the name of the token ids, int `[B, T]`; None for a model of something else.
        paths: ways from the inputs to the output by name; the first is how the model runs by itself, and
            "decode" is one with a cache.
        windows: of attention, as the model's configuration names them.
    """

    model: nn.Module
    inputs: dict[str, Any]
    tokens: str | None
    paths: dict[str, Call]
    windows: list[int]

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
        real = torch.ones(self.inputs[self.tokens].shape, dtype=torch.bool, device="cpu")
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
    except (Exception, SystemExit) as error:
        what = f"{type(model).__name__} raised {type(error).__name__} when it was called"
        raise ValueError(f"{what}: {first_line(error)}") from error


@contextmanager
def audited(model: nn.Module, inputs: Any) -> Iterator[Subject]:
    """The model in evaluation mode, each parameter able to carry a gradient; all is put back.

    Raises ValueError if there are no inputs and none can be made.
    """
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module  # the wrapper would reduce gradients over ranks
    training = [(module, module.training) for module in model.modules()]
    state = torch.get_rng_state()
    with _without_inference_tensors(model):
        floating = [p for p in model.parameters() if p.is_floating_point()]
        frozen = [p for p in floating if not p.requires_grad]
        model.eval()
        try:
            for p in frozen:
                p.requires_grad_(True)
            yield _subject(model, inputs)
        finally:
            for p in frozen:
                p.requires_grad_(False)
            for module, was in training:
                module.training = was
            torch.set_rng_state(state)


@contextmanager
def _without_inference_tensors(model: nn.Module) -> Iterator[None]:
    """Copies in the place of parameters and buffers that were made in inference mode, which refuse
    gradients."""
    held: list[tuple[Any, str, Tensor]] = [
        (store, name, tensor)
        for module in model.modules()
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None and tensor.is_inference()
    ]
    copies: dict[int, Tensor] = {}
    for store, name, tensor in held:
        if id(tensor) not in copies:
            copy = tensor.detach().clone()
            copies[id(tensor)] = nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy
        store[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for store, name, tensor in held:
            store[name] = tensor


def _subject(model: nn.Module, inputs: Any) -> Subject:
    own = _transformer(model)
    named, call = _named(model, own, inputs)
    if own is not None:
        named = transformers_paths.options_of(own) | named
    named = {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in named.items()}
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
    windows: list[int] = []
    if callable(getattr(model, "paths", None)):
        paths = _declared(model, call, named)
    elif own is not None:
        paths = transformers_paths.paths_of(own, call, decodes=tokens is not None)
        windows = transformers_paths.windows_of(own)
    else:
        paths = {"forward": call}
    return Subject(model, named, tokens, paths, windows)


def _named(model: nn.Module, own: nn.Module | None, inputs: Any) -> tuple[dict[str, Any], Call]:
    """The inputs by name, and the model as something that takes them so."""
    if inputs is None:
        if own is None:
            raise ValueError(
                f"{type(model).__name__} is no Hugging Face model: pass inputs, what it is called with"
            )
        return transformers_paths.example_inputs(own), model
    if isinstance(inputs, Mapping):
        return dict(inputs), model
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    names = _arguments(model)
    if len(values) > len(names) and _parameters(model) and not _takes(model, VAR_POSITIONAL):
        raise ValueError(f"{len(values)} inputs for {type(model).__name__}, which takes {len(names)}")
    names += [f"input {n}" for n in range(len(names), len(values))]
    given = names[: len(values)]

    def call(**inputs: Any) -> Any:
        return model(*[inputs.pop(name) for name in given], **inputs)

    return dict(zip(given, values, strict=True)), call


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # scripted
        return []


def _takes(model: nn.Module, *kinds: Any) -> bool:
    return any(p.kind in kinds for p in _parameters(model))


def _wrapped(model: nn.Module) -> nn.Module | None:
    """What a wrapper holds, which has one child and a forward that takes whatever that does."""
    children = list(model.children())
    return children[0] if len(children) == 1 and _takes(model, VAR_POSITIONAL, VAR_KEYWORD) else None


def _transformer(model: nn.Module | None) -> nn.Module | None:
    """The Hugging Face model that this is, or wraps."""
    while model is not None and not transformers_paths.is_one(model):
        model = getattr(model, "_orig_mod", None) or _wrapped(model)
    return model


def _arguments(model: nn.Module | None) -> list[str]:
    """Their names, of a wrapper those of what it wraps."""
    while model is not None:
        model = getattr(model, "_orig_mod", model)
        kinds = VAR_POSITIONAL, VAR_KEYWORD
        if names := [p.name for p in _parameters(model) if p.kind not in kinds]:
            return names
        model = _wrapped(model)
    return []


def _declared(model: nn.Module, call: Call, inputs: dict[str, Any]) -> dict[str, Call]:
    """`model.paths()`, with the one first that the model itself takes."""
    declared: dict[str, Call] = dict(model.paths())  # type: ignore[operator]
    with torch.no_grad():
        own = output(called(model, lambda: call(**inputs)))
        same = [n for n, path in declared.items() if n != "decode" and _gives(path, inputs, own)]
    first = same[0] if same else "forward"
    return {first: call} | {n: path for n, path in declared.items() if n != first}


def _gives(call: Call, inputs: dict[str, Any], wanted: Tensor) -> bool:
    try:
        found = output(call(**inputs))
    except Exception:  # compared with the others, it will say so
        return False
    return found.shape == wanted.shape and torch.equal(found.nan_to_num(), wanted.nan_to_num())

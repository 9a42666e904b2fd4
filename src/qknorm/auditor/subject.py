"""The model that is audited, with its inputs and its paths, the ways in which it can be run.

The meaning of an input is derived from its value and from the usual name of such an argument. No names
of modules inside the model are used.
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
        model: the model.
        inputs: the keyword arguments with which each path is called.
        tokens: the name of the token ids, int `[B, T]`, among the inputs; None if there are none.
        paths: the functions that run the model, by name. The first runs the model as it is configured,
            and "decode" runs it with a cache.
        windows: widths of attention windows, in tokens, from the configuration of the model.
    """

    model: nn.Module
    inputs: dict[str, Any]
    tokens: str | None
    paths: dict[str, Call]
    windows: list[int]

    def name_of(self, kinds: tuple[str, ...]) -> str | None:
        """Return the first of these names under which the inputs have a tensor, None without one."""
        return next((k for k in kinds if isinstance(self.inputs.get(k), Tensor)), None)

    def positions(self) -> str | None:
        """Return the name of the argument for positions, None if the model takes none."""
        return next((name for name in POSITIONS if name in _arguments(self.model)), None)

    def real(self) -> Tensor | None:
        """Return bool `[B, T]`, False for padding; None if the inputs do not mark padding."""
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
        """Run the model.

        Args:
            path: the name of the path; the first one if None.
            changed: inputs that replace those of the audit, by name.

        Returns:
            The output, see `output`.
        """
        call = self.paths[path or next(iter(self.paths))]
        return output(call(**self.inputs | (changed or {})))


def output(value: Any) -> Tensor:
    """Choose the tensor of a model's result that the audit compares.

    Args:
        value: what the model returned.

    Returns:
        The first floating-point tensor that has three axes or more, or else the first one.

    Raises:
        ValueError: there is no floating-point tensor.
    """
    found = [t for t in tensors_of(value) if t.is_floating_point()]
    if not found:
        raise ValueError("the model returns no floating-point tensor, so its outputs cannot be compared")
    return next((t for t in found if t.dim() >= 3), found[0])


def called(model: nn.Module, call: Callable[[], Any]) -> Any:
    """Call the model.

    Args:
        model: the model, for the message.
        call: a function without arguments that calls the model.

    Returns:
        The result of the call.

    Raises:
        ValueError: the model raised an error, which the message contains.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        what = f"{type(model).__name__} raised {type(error).__name__} when it was called"
        raise ValueError(f"{what}: {first_line(error)}") from error


@contextmanager
def audited(model: nn.Module, inputs: Any) -> Iterator[Subject]:
    """Put a model into evaluation mode with gradients for all parameters, and restore it afterwards.

    Args:
        model: the model.
        inputs: the arguments of the model, as for `audit`.

    Yields:
        The subject of the audit.

    Raises:
        ValueError: the inputs are None and cannot be made for this model, or they are too many.
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
    """Replace parameters and buffers that were made in inference mode, which cannot require gradients,
    by copies, and restore them afterwards."""
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
    transformer = _transformer(model)
    named, call = _named(model, transformer, inputs)
    if transformer is not None:
        named = transformers_paths.options_of(transformer) | named
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
    elif transformer is not None:
        paths = transformers_paths.paths_of(transformer, call, decodes=tokens is not None)
        windows = transformers_paths.windows_of(transformer)
    else:
        paths = {"forward": call}
    return Subject(model, named, tokens, paths, windows)


def _named(model: nn.Module, transformer: nn.Module | None, inputs: Any) -> tuple[dict[str, Any], Call]:
    """Return the inputs by name, and a function that calls the model with them as keyword arguments."""
    if inputs is None:
        if transformer is None:
            raise ValueError(
                f"{type(model).__name__} is not a Hugging Face model: pass its arguments as inputs"
            )
        return transformers_paths.example_inputs(transformer), model
    if isinstance(inputs, Mapping):
        return dict(inputs), model
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    names = _arguments(model)
    if len(values) > len(names) and _parameters(model) and not _takes(model, VAR_POSITIONAL):
        raise ValueError(
            f"{len(values)} inputs were passed for {type(model).__name__}, which takes {len(names)}"
        )
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
    """Return the module inside a wrapper, and None for any other module.

    A wrapper has one child, and its forward takes `*args` or `**kwargs`.
    """
    children = list(model.children())
    return children[0] if len(children) == 1 and _takes(model, VAR_POSITIONAL, VAR_KEYWORD) else None


def _transformer(model: nn.Module | None) -> nn.Module | None:
    """Return the Hugging Face model that a module is or wraps, None without one."""
    while model is not None and not transformers_paths.is_one(model):
        model = getattr(model, "_orig_mod", None) or _wrapped(model)
    return model


def _arguments(model: nn.Module | None) -> list[str]:
    """Return the names of the arguments of a model, or of the model inside a wrapper."""
    while model is not None:
        model = getattr(model, "_orig_mod", model)
        kinds = VAR_POSITIONAL, VAR_KEYWORD
        if names := [p.name for p in _parameters(model) if p.kind not in kinds]:
            return names
        model = _wrapped(model)
    return []


def _declared(model: nn.Module, call: Call, inputs: dict[str, Any]) -> dict[str, Call]:
    """Return `model.paths()` with the path first that gives the same output as calling the model."""
    declared: dict[str, Call] = dict(model.paths())  # type: ignore[operator]
    with torch.no_grad():
        wanted = output(called(model, lambda: call(**inputs)))
        same = [n for n, path in declared.items() if n != "decode" and _gives(path, inputs, wanted)]
    first = same[0] if same else "forward"
    return {first: call} | {n: path for n, path in declared.items() if n != first}


def _gives(call: Call, inputs: dict[str, Any], wanted: Tensor) -> bool:
    try:
        found = output(call(**inputs))
    except Exception:  # the comparison of all paths reports it
        return False
    return found.shape == wanted.shape and torch.equal(found.nan_to_num(), wanted.nan_to_num())

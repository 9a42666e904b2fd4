"""Load the model that a target names on the command line.

A target is the folder of a Hugging Face checkpoint with a `config.json`, a `.gguf` file that
transformers can read, or `package.module:factory`. The factory returns a module, or a module and its
inputs.
"""

from __future__ import annotations

import importlib
import io
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from qknorm.auditor.findings import Report, finding
from qknorm.auditor.guard import TargetError, reading
from qknorm.auditor.weights import files_of, norm_of, tensors_of


class Target(NamedTuple):
    """A model that was loaded.

    Attributes:
        model: the model.
        inputs: the arguments of the model; None if the audit makes them.
        ignored: names of the tensors in the files that the model does not use.
        missing: names of the parameters that are in no file and therefore have random values.
    """

    model: nn.Module
    inputs: Any = None
    ignored: Iterable[str] = ()
    missing: Iterable[str] = ()


def load(target: str, *, weights: bool = True) -> Target:
    """Load a target.

    Args:
        target: the path of a folder or file, or `package.module:factory`.
        weights: whether to load the weights of a folder. Without them the model has random weights.

    Returns:
        The model and its inputs.

    Raises:
        TargetError: the target does not exist, cannot be read, or needs an extra that is not installed.
    """
    path = Path(target)
    if path.is_dir() and (path / "config.json").is_file():
        return _checkpoint(path, weights)
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path)
    if path.is_dir():
        raise TargetError(f"{target} has no config.json, so it is not the folder of a checkpoint")
    if path.exists():
        kinds = ".safetensors or .gguf, or package.module:factory"
        raise TargetError(f"{target} cannot be audited: expected the folder of a checkpoint, {kinds}")
    if ":" in target:
        return _factory(target)
    raise TargetError(
        f"no such file or folder: {target}; a model of the Hugging Face hub has to be downloaded first"
    )


def _checkpoint(folder: Path, weights: bool) -> Target:
    try:
        import transformers
    except ImportError as error:
        raise TargetError(
            "loading a checkpoint needs an extra: pip install 'qknorm[transformers]'"
        ) from error
    with reading(folder), _silence():
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        names = getattr(config, "architectures", None) or []
        kind: Any = (names and getattr(transformers, names[0], None)) or transformers.AutoModel
        if not weights:
            return Target(kind.from_config(config) if hasattr(kind, "from_config") else kind(config))
        model, info = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
        return Target(model, None, info["unexpected_keys"], info["missing_keys"])


def _gguf(path: Path) -> Target:
    try:
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise TargetError("running a GGUF file needs an extra: pip install 'qknorm[gguf]'") from error
    if len(files_of(path)) > 1:
        raise TargetError(
            f"{path} is one part of a model and cannot be run; --weights-only reads all parts"
        )
    with reading(path), _silence():
        held = {norm_of(name): name for name, _, _ in tensors_of(path)}
        kind: Any = AutoModelForCausalLM
        model, info = kind.from_pretrained(path.parent, gguf_file=path.name, output_loading_info=True)
        # The loader silently drops tensors that the architecture has no place for.
        used = {norm_of(name) for name, _ in model.named_parameters()}
        dropped = [name for norm, name in held.items() if norm is not None and norm not in used]
        return Target(model, None, [*info["unexpected_keys"], *dropped], info["missing_keys"])


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the progress bars, warnings and log lines of loaders. Errors are raised as usual."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _factory(target: str) -> Target:
    name, _, attribute = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that modules of the current folder are found, as by `python -m`
    with reading(target):
        factory = getattr(importlib.import_module(name), attribute)
        made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{target} returned a {type(model).__name__}, but must return a module, or a module and "
            f"inputs"
        )
    return Target(model, inputs)


def looks_trained(model: nn.Module) -> bool:
    """Decide from its weights whether a model was trained.

    Args:
        model: the model.

    Returns:
        Whether some parameter with one axis, such as the gain of another norm, is not constant. The
        gains of q and k do not count. True if there is no such parameter.
    """
    vectors = [p for name, p in model.named_parameters() if p.dim() == 1 and norm_of(name) is None]
    return not vectors or any(bool((p != p[:1]).any()) for p in vectors)


def with_loading(report: Report, target: Target) -> Report:
    """Add findings about tensors that the model did not use and parameters that no file held.

    Args:
        report: the report of the audit of the target.
        target: the target.

    Returns:
        The report with the findings added.

    Raises:
        TargetError: a weight matrix of an attention is in no file, so random weights were audited.
    """
    layers = [path.split(" #")[0] for path in report.formulas]
    parameters = dict(target.model.named_parameters())

    def layer_of(name: str) -> str | None:
        norm = norm_of(name)
        within = [path for path in layers if name.startswith(f"{path}.")]
        within += [path for path in layers if norm is not None and norm[0] in path.split(".")]
        return next(iter(within), None if norm is None else name.rsplit(".", 2)[0])

    findings = list(report.findings)
    ignored: dict[str, list[str]] = {}
    for name in sorted(target.ignored):
        if (layer := layer_of(name)) is not None:
            ignored.setdefault(layer, []).append(name)
    for layer, names in ignored.items():
        text = f"the model does not use {', '.join(names)} of the file"
        findings.append(finding("QK009", layer, text, tensors=", ".join(names)))
    for name in sorted({*target.missing} & parameters.keys()):
        layer = layer_of(name)
        if layer is not None and parameters[name].dim() > 1:
            raise TargetError(f"no file holds {name}, so the audit would be of random weights")
        if layer is not None and not any(f.code == "QK020" and f.layer == layer for f in findings):
            findings.append(finding("QK020", layer, f"no file holds {name}", parameter=name))
    return replace(report, findings=findings)

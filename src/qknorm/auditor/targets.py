"""What can be audited by name: a Hugging Face model or checkpoint, a factory in a Python module.

A target is a folder with a `config.json`, a `.gguf` file that transformers can read, or
`package.module:factory`, where the factory returns a module, or a module and what it is called with.
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
    """What is audited.

    Attributes:
        inputs: None for inputs that the audit makes itself.
        ignored: tensors of its files that the model did not take.
        missing: parameters that no file held, so that they are random.
    """

    model: nn.Module
    inputs: Any = None
    ignored: Iterable[str] = ()
    missing: Iterable[str] = ()


def load(target: str, *, weights: bool = True) -> Target:
    """The module and its inputs.

    Args:
        target: see above.
        weights: of a folder; without them the structure is audited with random ones.

    Raises:
        ValueError: there is no such target, or it is not what it should be.
    """
    path = Path(target)
    if path.is_dir() and (path / "config.json").is_file():
        return _checkpoint(path, weights)
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path)
    if path.is_dir():
        raise TargetError(f"{target} has no config.json: is this the folder of a checkpoint?")
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
        raise TargetError("a checkpoint needs an extra: pip install 'qknorm[transformers]'") from error
    with reading(folder), _silence():
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        names = getattr(config, "architectures", None) or []
        kind: Any = (names and getattr(transformers, names[0], None)) or transformers.AutoModel
        if not weights:
            return Target(kind.from_config(config) if hasattr(kind, "from_config") else kind(config))
        model, told = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
        return Target(model, None, told["unexpected_keys"], told["missing_keys"])


def _gguf(path: Path) -> Target:
    try:
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise TargetError("running a GGUF file needs an extra: pip install 'qknorm[gguf]'") from error
    if len(files_of(path)) > 1:
        raise TargetError(f"{path} is a part of a model, which cannot be run; --weights-only reads it")
    with reading(path), _silence():
        held = {norm_of(name): name for name, _, _ in tensors_of(path)}
        kind: Any = AutoModelForCausalLM
        model, told = kind.from_pretrained(path.parent, gguf_file=path.name, output_loading_info=True)
        # What has no place in the architecture is dropped before the loader reports.
        own = {norm_of(name) for name, _ in model.named_parameters()}
        dropped = [name for norm, name in held.items() if norm is not None and norm not in own]
        return Target(model, None, [*told["unexpected_keys"], *dropped], told["missing_keys"])


@contextmanager
def _silence() -> Iterator[None]:
    """Keep bars, warnings and reports of the loaders off the terminal; what they raise is raised."""
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
        sys.path.insert(0, "")  # as `python -m` does: modules of the present folder
    with reading(target):
        factory = getattr(importlib.import_module(name), attribute)
        made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} returned a {type(model).__name__}, not a module, or one and inputs")
    return Target(model, inputs)


def looks_trained(model: nn.Module) -> bool:
    """Whether weights come from training: some vector beside the gains of q and k, such as the gain of
    another norm, is not constant. True where there is no such vector."""
    vectors = [p for name, p in model.named_parameters() if p.dim() == 1 and norm_of(name) is None]
    return not vectors or any(bool((p != p[:1]).any()) for p in vectors)


def with_loading(report: Report, target: Target) -> Report:
    """The report, with what the files and the model do not share.

    Raises ValueError if weights of attention were in no file: then random ones were audited.
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
            raise TargetError(f"no file holds {name}: what would be audited is random")
        if layer is not None and not any(f.code == "QK020" and f.layer == layer for f in findings):
            findings.append(finding("QK020", layer, f"no file holds {name}", parameter=name))
    return replace(report, findings=findings)

"""What can be audited by name: a Hugging Face model or checkpoint, a factory in a Python module.

A target is a folder with a `config.json`, a `.gguf` file that transformers can read, or
`package.module:factory`, where the factory returns a module, or a module and what it is called with.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn


def load(target: str, *, weights: bool = True) -> tuple[nn.Module, Any]:
    """The module and its inputs; None for inputs that the audit makes itself.

    Args:
        target: see above.
        weights: of a folder; without them the structure is audited with random ones.

    Raises:
        ValueError: there is no such target, or it is not what it should be.
    """
    path = Path(target)
    if path.is_dir() and (path / "config.json").is_file():
        return _checkpoint(path, weights), None
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path), None
    if ":" in target and not path.exists():
        return _factory(target)
    raise ValueError(
        f"{target} is neither a folder with a config.json nor package.module:factory; a model of the "
        "Hugging Face hub has to be downloaded first"
    )


def _checkpoint(folder: Path, weights: bool) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a checkpoint needs an extra: pip install 'qknorm[transformers]'") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    kind = kind or transformers.AutoModel
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    made: Any
    if weights and has_weights:
        made = kind.from_pretrained(folder)
    elif hasattr(kind, "from_config"):
        made = kind.from_config(config)
    else:
        made = kind(config)
    model: nn.Module = made
    return model


def _gguf(path: Path) -> nn.Module:
    try:
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("running a GGUF file needs an extra: pip install 'qknorm[gguf]'") from error
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(f"transformers cannot run {path.name}: {error}") from error
    return model


def _factory(target: str) -> tuple[nn.Module, Any]:
    name, _, attribute = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the present folder
    try:
        factory = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot find {target}: {error}") from error
    made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} returned a {type(model).__name__}, not a module, or one and inputs")
    return model, inputs

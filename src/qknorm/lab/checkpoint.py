"""Checkpoints: tensors and plain values in one file, whole or absent."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qknorm.lab.files import replace_file

FORMAT = "qknorm.lab checkpoint 1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read. The message says what to do."""


class NotFiniteError(CheckpointError):
    """A tensor that is NaN or infinite, from which no run could go on."""


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of finite tensors. If it fails, the old file survives untouched.

    Raises:
        NotFiniteError: a tensor is not finite.
        CheckpointError: the disk is full or not writable.
    """
    check_finite(state)
    try:
        replace_file(path, lambda file: torch.save(state | {"format": FORMAT}, file))
    # torch reports a failed write of its archive as RuntimeError.
    except (OSError, RuntimeError) as error:
        if path.exists():
            rest = "; the previous checkpoint is untouched: free some space and resume from it"
        else:
            rest = ", and there is no earlier checkpoint: free some space and start again"
        raise CheckpointError(f"could not save {path}: {_reason(error)}{rest}") from error


def check_finite(state: dict[str, Any]) -> None:
    """Raises NotFiniteError, which names the first tensor of a state that is not finite."""
    for name, tensor in _tensors(state):
        if not tensor.isfinite().all():
            raise NotFiniteError(f"{name} is not finite, so that no checkpoint is written")


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors inside, each with its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, checksums first; never runs code from it.

    Raises:
        CheckpointError: missing, truncated, damaged, or not one of ours.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except (
        zipfile.BadZipFile,
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({_reason(error)}): delete it and start again"
        ) from error
    if damaged:
        raise CheckpointError(f"{path} is damaged (checksum of {damaged}): delete it and start again")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of qknorm train: name the folder of a run")
    return state


def _reason(error: BaseException) -> str:
    """One line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # A write that fails inside torch's archive writer hides the OSError one level down.
    if error.__context__ is not None and isinstance(error.__context__, OSError):
        return _reason(error.__context__)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

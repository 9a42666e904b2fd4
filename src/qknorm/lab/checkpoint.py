"""Read and write checkpoints. A failed write leaves the previous file as it was."""

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
    """A checkpoint cannot be written or read. The message says what to do."""


class NotFiniteError(CheckpointError):
    """A tensor of the state is NaN or infinite, so that the run could not be continued from it."""


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint. If that fails, the previous file stays as it was.

    Args:
        state: tensors and plain values, in dictionaries and lists.
        path: the file.

    Raises:
        NotFiniteError: a tensor is not finite.
        CheckpointError: the disk is full or cannot be written.
    """
    check_finite(state)
    try:
        replace_file(path, lambda file: torch.save(state | {"format": FORMAT}, file))
    # torch raises a RuntimeError if it cannot write its archive.
    except (OSError, RuntimeError) as error:
        if path.exists():
            rest = "; the previous checkpoint is untouched: free some space and resume from it"
        else:
            rest = ", and there is no earlier checkpoint: free some space and start again"
        raise CheckpointError(f"could not save {path}: {_reason(error)}{rest}") from error


def check_finite(state: dict[str, Any]) -> None:
    """Raise a NotFiniteError if a tensor of a state is not finite. The message names the first."""
    for name, tensor in _tensors(state):
        if not tensor.isfinite().all():
            raise NotFiniteError(f"{name} is not finite, so that no checkpoint is written")


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in nested dictionaries, lists and tuples, each with a dotted path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint after verifying its checksums. No code in the file is run.

    Args:
        path: the file.

    Returns:
        The state that was saved, with tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or no checkpoint of `qknorm train`.
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
    """Return the message of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # If torch's archive writer fails, the OSError is the context of the error that it raises.
    if error.__context__ is not None and isinstance(error.__context__, OSError):
        return _reason(error.__context__)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""Checkpoints that are whole or absent: written beside the old one, then renamed over it."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read. The message says what to do."""


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of tensors and plain values. If it fails, the old file survives untouched.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    # torch reports a failed write of its archive as RuntimeError.
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        kept = "; the previous checkpoint is untouched" if path.exists() else ""
        raise CheckpointError(
            f"could not save {path}: {_reason(error)}{kept}. Free some space and resume."
        ) from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, checksums first; never runs code from it.

    Raises:
        CheckpointError: missing, truncated or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state
    except (zipfile.BadZipFile, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({_reason(error)}): delete it and start again"
        ) from error
    raise CheckpointError(f"{path} is damaged (checksum of {damaged}): delete it and start again")


def _reason(error: BaseException) -> str:
    """One line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # A write that fails inside torch's archive writer hides the OSError one level down.
    if error.__context__ is not None and isinstance(error.__context__, OSError):
        return _reason(error.__context__)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

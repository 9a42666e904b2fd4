"""Files that are whole or absent, and the names of those that a run and a comparison leave."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

CHECKPOINT_FILE = "checkpoint.pt"
CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
TENSORBOARD_FOLDER = "tensorboard"
RUN_FILES = (CHECKPOINT_FILE, CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE)
COMPARISON_FILES = (REPORT_FILE, SUMMARY_FILE)


def plain(value: Any) -> Any:
    """A value as strict JSON takes it: floats of 7 digits, None for those that are not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the target and rename: whatever fails, the old file survives and no part is left."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def replace_json(path: Path, value: Any) -> None:
    """The same, for a value as strict JSON."""
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def refuse_if_taken(folder: Path, names: tuple[str, ...], what: str) -> None:
    """Raise ValueError if a folder holds one of the names."""
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise ValueError(
            f"{folder} already holds {taken[0]}: give --overwrite to replace {what}, or another folder"
        )


def remove_run(folder: Path) -> None:
    """Delete the files of a run, and its folder if nothing else is in it."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / TENSORBOARD_FOLDER, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def remove_comparison(folder: Path) -> None:
    """Delete the files of a comparison and of the runs directly inside it."""
    for name in COMPARISON_FILES:
        (folder / name).unlink(missing_ok=True)
    for log in list(folder.glob(f"*/{METRICS_FILE}")):
        remove_run(log.parent)

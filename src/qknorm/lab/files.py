"""Files that are whole or absent, what a run and a comparison leave, and the lock of a run."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

CHECKPOINT_FILE = "checkpoint.pt"
CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = "run.lock"
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


def refuse_if_taken(folder: Path, names: tuple[str, ...], *, resumable: bool = False) -> None:
    """Raise ValueError if a folder holds one of the names. `resumable`: say that --resume goes on."""
    taken = [name for name in names if (folder / name).exists()]
    if not taken:
        return
    refuse_if_running(folder)
    resume = "give --resume to continue the run, " if resumable else ""
    raise ValueError(
        f"{folder} already holds {taken[0]}: {resume}another folder, or --overwrite, which deletes what "
        "is there"
    )


def lock(folder: Path) -> IO[str]:
    """Hold the folder of a run against other processes, until `unlock` or until this process is gone.

    Raises ValueError if another process holds it.
    """
    path = folder / LOCK_FILE
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip()
            file.close()
            raise ValueError(
                f"a run is going on in {folder} (process {who or 'unknown'}): wait for its end, "
                "stop it, or use another folder"
            ) from None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # the one who held it has removed it meanwhile
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def unlock(folder: Path, file: IO[str]) -> None:
    """End what `lock` began."""
    (folder / LOCK_FILE).unlink(missing_ok=True)
    file.close()


def refuse_if_running(folder: Path) -> None:
    """Raise ValueError if a run is going on in a folder."""
    if (folder / LOCK_FILE).exists():
        unlock(folder, lock(folder))


def remove_run(folder: Path) -> None:
    """Delete the files of a run, and its folder if nothing else is in it."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / TENSORBOARD_FOLDER, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def remove_comparison(folder: Path) -> None:
    """Delete the files of a comparison and of the runs directly inside it.

    Raises ValueError, and deletes nothing, if one of them is going on.
    """
    runs = [log.parent for log in folder.glob(f"*/{METRICS_FILE}")]
    for run in runs:
        refuse_if_running(run)
    for name in COMPARISON_FILES:
        (folder / name).unlink(missing_ok=True)
    for run in runs:
        remove_run(run)

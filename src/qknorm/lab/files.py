"""The files of a run and of a comparison, writing them atomically, and the lock of a run."""

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
    """Return a value for strict JSON: floats get 7 digits, and those that are not finite become None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically. If writing fails, the old file stays and no partial file is left.

    Args:
        path: the file.
        write: writes the new content to the open file that it receives.
    """
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
    """Replace a file atomically by a value as strict JSON, see `plain` and `replace_file`."""
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def refuse_if_taken(folder: Path, names: tuple[str, ...], *, resumable: bool = False) -> None:
    """Refuse to write into a folder that already holds results.

    Args:
        folder: the folder.
        names: names of files that it must not hold.
        resumable: whether the message offers --resume.

    Raises:
        ValueError: the folder holds one of the files.
    """
    taken = [name for name in names if (folder / name).exists()]
    if not taken:
        return
    refuse_if_running(folder)
    resume = "give --resume to continue the run, " if resumable else ""
    raise ValueError(
        f"{folder} already holds {taken[0]}: {resume}choose another folder, or give --overwrite to "
        f"delete what is there"
    )


def lock(folder: Path) -> IO[str]:
    """Lock the folder of a run until `unlock` is called or this process ends.

    Args:
        folder: the folder of the run.

    Returns:
        The lock file, for `unlock`.

    Raises:
        ValueError: another process holds the lock.
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
                f"a run is going on in {folder} (process {who or 'unknown'}): wait until it ends, "
                "stop it, or use another folder"
            ) from None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # the previous holder has removed the file since it was opened
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def unlock(folder: Path, file: IO[str]) -> None:
    """Release the lock that `lock` returned."""
    (folder / LOCK_FILE).unlink(missing_ok=True)
    file.close()


def refuse_if_running(folder: Path) -> None:
    """Raise a ValueError if a run is going on in a folder."""
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

    Raises:
        ValueError: one of the runs is going on. Nothing is deleted then.
    """
    runs = [log.parent for log in folder.glob(f"*/{METRICS_FILE}")]
    for run in runs:
        refuse_if_running(run)
    for name in COMPARISON_FILES:
        (folder / name).unlink(missing_ok=True)
    for run in runs:
        remove_run(run)

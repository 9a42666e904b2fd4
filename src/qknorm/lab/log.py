"""The log of a run: one JSON object a line, flushed as it is written, cut back on resume.

Lines have a `kind`: "step" for every step, "alert" for each alert, "final" once at the end. Values that
are not finite are written as null.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from qknorm.lab import files
from qknorm.lab.files import METRICS_FILE, TENSORBOARD_FOLDER, plain


def require_tensorboard() -> Any:
    """TensorBoard's writer. Raises ValueError if the extra is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard needs an extra: pip install 'qknorm[tensorboard]'") from error
    return SummaryWriter


class MetricsLog:
    """Appends records to `metrics.jsonl`, and scalars to TensorBoard where it is installed.

    Args:
        folder: of the run.
        resume_after: keep the lines of steps up to this one; None starts anew.
        tensorboard: also write event files.
    """

    def __init__(
        self, folder: Path, *, resume_after: int | None = None, tensorboard: bool = False
    ) -> None:
        self.path = folder / METRICS_FILE
        kept: list[dict[str, Any]] = []
        if resume_after is not None and self.path.exists():
            kept = [
                line
                for line in read(self.path)
                if line["kind"] != "final" and line["step"] <= resume_after
            ]
        self.kept = kept
        files.replace_file(
            self.path, lambda file: file.write("".join(json.dumps(r) + "\n" for r in kept).encode())
        )
        self._file = self.path.open("a")
        self._board = None
        if tensorboard:
            self._board = require_tensorboard()(str(folder / TENSORBOARD_FOLDER))

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it is on its way to disk when this returns."""
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None and record["kind"] == "step":
            for name, value in record.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write everything out."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log; a last line cut short by a crash is left out.

    Raises ValueError if there is no log or a line inside it is not JSON.
    """
    if not path.is_file():
        raise ValueError(f"no log at {path}: is this the folder of a run?")
    records = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON") from error
    return records

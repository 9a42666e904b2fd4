"""Read a log while another process, perhaps on another machine, writes it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from qknorm.monitor.to import jsonl


class Follower:
    """Returns the lines of a JSON-lines file as they are completed.

    The file is opened anew for each call, since a network file system may not show new lines in a file
    that is kept open. A file that became shorter or was replaced is read from the start.

    Args:
        path: the file.

    Attributes:
        restarted: whether the last call of `poll` read the file from the start again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarted = False
        self._offset = self._lines = 0
        self._inode: int | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Return the new complete lines, see `jsonl.parse`; none while the file cannot be opened."""
        self.restarted = False
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._offset and (
                    status.st_size < self._offset or self._inode not in (None, status.st_ino)
                ):
                    self._offset, self._lines, self.restarted = 0, 0, True
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        first = self._lines + 1
        self._offset += len(whole)
        self._lines += whole.count(b"\n")
        return list(jsonl.parse(io.BytesIO(whole), self.path, first))

"""Reading a log while somebody else, perhaps on another machine, writes it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from qknorm.monitor.to import jsonl


class Follower:
    """Hands out the lines of a JSON-lines file as they become whole.

    The file is opened anew each time, since a network file system shows a file that is kept open as it
    was. A file that became shorter or was replaced is read from the start: `restarted` is then true.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarted = False
        self._offset = self._lines = 0
        self._inode: int | None = None

    def poll(self) -> list[dict[str, Any]]:
        """The new lines, see `jsonl.parse`; none if the file is away at the moment."""
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

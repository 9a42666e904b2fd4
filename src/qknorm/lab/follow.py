"""Reading a log while somebody else, perhaps on another machine, writes it."""

from __future__ import annotations

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
        self._offset = 0
        self._inode: int | None = None

    def poll(self) -> list[dict[str, Any]]:
        """The new lines; none if the file is away at the moment. A line that is not JSON is left out."""
        self.restarted = False
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._offset and (
                    status.st_size < self._offset or self._inode not in (None, status.st_ino)
                ):
                    self._offset, self.restarted = 0, True
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for text in whole.splitlines():
            try:
                line = jsonl.loads(text)
            except ValueError:
                continue
            lines.append(jsonl.check(line, self.path))
        return lines

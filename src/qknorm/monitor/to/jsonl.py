"""JSON lines: a file per rank, one object a line, whole after a crash but for its last line.

A line has a `kind`: "record" (see `Record`), "alert" (see `Alert`), or "end". What JSON cannot say is
written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qknorm.monitor.alerts import Alert
from qknorm.monitor.record import SCHEMA, LayerRecord, Record


class JsonLines:
    """Appends records and alerts to a file. Pass it in `to=` of the monitor and of the alerts.

    Args:
        path: of the file; with several ranks give each its own, as `rank_path` does.
        resume_after: drop what an earlier run wrote for later steps; None starts anew, and keeps a file
            that is there under another name.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_after: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.exists() and resume_after is not None:
            kept = [line for line in read_lines(self.path) if line.get("step", 0) <= resume_after]
            kept = [line for line in kept if line["kind"] != "end"]
        elif self.path.exists() and self.path.stat().st_size:
            self.path.rename(_free_name(self.path))
        temporary = self.path.with_name(f".{self.path.name}.new")
        with temporary.open("w") as file:
            file.writelines(map(_dump, kept))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = self.path.open("a")

    def __call__(self, item: Record | Alert) -> None:
        """Append; it is with the operating system when this returns."""
        kind = "record" if isinstance(item, Record) else "alert"
        self._put({"kind": kind, "schema": SCHEMA} | item.to_json())

    def _put(self, line: dict[str, Any]) -> None:
        self._file.write(_dump(line))
        self._file.flush()

    def close(self, *, ended: bool = False) -> None:
        """Write everything to disk; `ended`: tell those who follow the file that the run is over."""
        if self._file.closed:
            return
        if ended:
            self._put({"kind": "end", "schema": SCHEMA})
        os.fsync(self._file.fileno())
        self._file.close()


LOG = logging.getLogger("qknorm")

RANK_FILES = "attention.rank*.jsonl"


def rank_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / RANK_FILES.replace("*", f"{rank:05}")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines. What a crash cut short or damaged is left out, with a warning unless it is last.

    Raises ValueError for a schema newer than this code.
    """
    with path.open(errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                yield check(loads(text), path)
            except json.JSONDecodeError:
                if text.endswith("\n"):
                    LOG.warning("%s, line %d is damaged and left out", path, number)


def check(line: dict[str, Any], path: Path) -> dict[str, Any]:
    """The line, if this code knows its schema; else raises ValueError."""
    if line.get("schema", SCHEMA) > SCHEMA:
        raise ValueError(f"{path} has schema {line['schema']}, newer than {SCHEMA}: update qknorm")
    return line


def _free_name(path: Path) -> Path:
    return next(
        name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.{n}")).exists()
    )


def loads(text: str | bytes) -> dict[str, Any]:
    """One line. Raises ValueError if it is not JSON."""
    line = json.loads(text, object_hook=_numbers)
    if not isinstance(line, dict):
        raise json.JSONDecodeError("no object", str(text), 0)
    return line


def to_record(line: dict[str, Any]) -> Record:
    """A line of kind "record" as what was written."""
    layers = {name: LayerRecord(**_layer(values)) for name, values in line["layers"].items()}
    return Record(step=line["step"], phase=line["phase"], layers=layers, silent=line["silent"])


def _layer(values: dict[str, Any]) -> dict[str, Any]:
    gain_max = values["gain_max"]
    return values | {"gain_max": None if gain_max is None else tuple(gain_max)}


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(_named(line), allow_nan=False) + "\n"


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {key: _number(value) for key, value in line.items()}


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    return [_number(item) for item in value] if isinstance(value, list) else value

"""JSON lines: a file per rank, one object a line, whole after a crash but for its last line.

A line has a `kind`: "record" (see `Record`) or "alert" (see `Alert`). What JSON cannot say is written as
the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
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
        resume_after: drop what an earlier run wrote for later steps; None starts anew.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_after: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_after is not None and self.path.exists():
            kept = [line for line in read_lines(self.path) if line["step"] <= resume_after]
        temporary = self.path.with_name(f".{self.path.name}.new")
        temporary.write_text("".join(_dump(line) for line in kept))
        temporary.replace(self.path)
        self._file = self.path.open("a")

    def __call__(self, item: Record | Alert) -> None:
        """Append; it is with the operating system when this returns."""
        kind = "record" if isinstance(item, Record) else "alert"
        self._file.write(_dump({"kind": kind, "schema": SCHEMA} | item.to_json()))
        self._file.flush()

    def close(self) -> None:
        """Write everything to disk."""
        os.fsync(self._file.fileno())
        self._file.close()


RANK_FILES = "attention.rank*.jsonl"


def rank_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / RANK_FILES.replace("*", f"{rank:05}")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; a last line that a crash cut short is left out.

    Raises ValueError for a broken line inside the file, and for a schema newer than this code.
    """
    with path.open() as file:
        for number, text in enumerate(file, start=1):
            try:
                line = loads(text)
            except ValueError as error:
                if not text.endswith("\n"):
                    return
                raise ValueError(f"{path}, line {number} is not JSON") from error
            if line.get("schema", SCHEMA) > SCHEMA:
                raise ValueError(
                    f"{path} has schema {line['schema']}, newer than {SCHEMA}: update qknorm"
                )
            yield line


def loads(text: str | bytes) -> dict[str, Any]:
    """One line. Raises ValueError if it is not JSON."""
    line: dict[str, Any] = json.loads(text, object_hook=_numbers)
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

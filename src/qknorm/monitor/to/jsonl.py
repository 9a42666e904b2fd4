"""JSON lines: one object a line, whole after a crash but for its last line.

A line has a `kind`:

* "start": what is watched, how often, and by which versions; once more where a run is resumed;
* "record", "alert": see `Record` and `Alert`;
* "step": what a trainer says of one optimizer step, such as its loss;
* "final": how a run came out; what follows it belongs to it;
* "end": the run is over, unless another "start" follows.

What JSON cannot say is written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from qknorm.monitor.alerts import Alert
from qknorm.monitor.record import SCHEMA, LayerRecord, Record

Item = Record | Alert | dict[str, Any]  # a dictionary has the kind of its line


class JsonLines:
    """Appends to a file. Pass it in `to=` of the monitor and of the alerts.

    Args:
        path: of the file; with several ranks give each its own, as `rank_path` does.
        resume_after: drop what an earlier run wrote for later steps, and how it ended; None starts anew,
            and keeps a file that is there under another name.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_after: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.exists() and resume_after is not None:
            begun = itertools.takewhile(lambda line: line["kind"] != "final", read_lines(self.path))
            kept = [
                line for line in begun if line["kind"] != "end" and line.get("step", 0) <= resume_after
            ]
        elif self.path.exists() and self.path.stat().st_size:
            self.path.rename(_free_name(self.path))
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with temporary.open("w") as file:
                file.writelines(map(_dump, kept))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file = self.path.open("a")
        self._has_ended = False

    def __call__(self, item: Item) -> None:
        """Append; it is with the operating system when this returns."""
        if not isinstance(item, dict):
            item = {"kind": "record" if isinstance(item, Record) else "alert"} | item.to_json()
        self._file.write(_dump({"kind": item["kind"], "schema": SCHEMA} | item))
        self._file.flush()

    def run_started(self, facts: dict[str, Any]) -> None:
        """Say what the records that follow are of."""
        self._has_ended = False
        self({"kind": "start"} | facts)

    def run_ended(self, facts: dict[str, Any]) -> None:
        """Tell those who follow the file that the run is over."""
        if not self._has_ended:
            self._has_ended = True
            self({"kind": "end"} | facts)

    def close(self, *, ended: bool = False) -> None:
        """Write everything to disk; `ended`: tell those who follow the file that the run is over."""
        if self._file.closed:
            return
        if ended:
            self.run_ended({})
        os.fsync(self._file.fileno())
        self._file.close()


LOG = logging.getLogger("qknorm")

RANK_FILES = "attention.rank*.jsonl"
CLOSING = ("final", "end")
# What is read of the lines of a trainer, and of each head of a record.
NUMBERS = ("loss", "grad_norm", "lr", "final_loss", "initial_loss", "max_logit", "entropy_nats")
PER_HEAD = ("max_logit", "entropy_nats", "entropy_ratio")


def rank_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / RANK_FILES.replace("*", f"{rank:05}")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All lines of a file that are whole, see `parse`."""
    with path.open("rb") as file:
        yield from parse(file, path)


def parse(texts: Iterable[bytes], path: Path, first: int = 1) -> Iterator[dict[str, Any]]:
    """The lines of the file `path` from number `first` on. One that is cut short or damaged is left out,
    with a warning that says where and why unless it is a last one without its line break.

    Raises ValueError for a schema newer than this code.
    """
    for number, text in enumerate(texts, start=first):
        try:
            line = loads(text)
            is_newer = line.get("schema", SCHEMA) > SCHEMA
            if not is_newer:
                _check(line)
        except ValueError as error:
            if text.endswith(b"\n"):
                LOG.warning("%s, line %d is damaged and left out: %s", path, number, error)
            continue
        if is_newer:
            raise ValueError(f"{path} has schema {line['schema']}, newer than {SCHEMA}: update qknorm")
        yield line


def loads(text: str | bytes) -> dict[str, Any]:
    """One line. Raises ValueError if it is not a JSON object with a kind and a schema."""
    try:
        line = json.loads(text, object_hook=_numbers)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError('it is not an object with a "kind"')
    if not isinstance(line.get("schema", SCHEMA), int):
        raise ValueError("its schema is not a whole number")
    return line


def _check(line: dict[str, Any]) -> None:
    """Raises ValueError if the line lacks a part of what its kind says."""
    kind = line["kind"]
    try:
        made = {"record": to_record, "alert": to_alert}.get(kind, dict)(line)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f'it is not a whole "{kind}"') from None
    if not isinstance(line.get("step", 0), int):
        raise ValueError("its step is not a whole number")
    for name in NUMBERS:
        if not isinstance(line.get(name), int | float | None):
            raise ValueError(f"its {name} is not a number")
    for name, layer in made.layers.items() if isinstance(made, Record) else ():
        values = [getattr(layer, key) for key in PER_HEAD]
        if not all(isinstance(v, list) and len(v) == len(values[0]) for v in values) or not all(
            isinstance(v, int | float) for heads in values for v in heads
        ):
            raise ValueError(f"the heads of {name} do not have a number each")


def _free_name(path: Path) -> Path:
    return next(
        name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.{n}")).exists()
    )


def to_record(line: dict[str, Any]) -> Record:
    """A line of kind "record" as what was written."""
    layers = {name: LayerRecord(**_layer(values)) for name, values in line["layers"].items()}
    return Record(step=line["step"], phase=line["phase"], layers=layers, silent=line["silent"])


def to_alert(line: dict[str, Any]) -> Alert:
    """A line of kind "alert" as what was written."""
    values = {part.name: line[part.name] for part in fields(Alert)}
    return Alert(**values | {"heads": tuple(line["heads"])})


def _layer(values: dict[str, Any]) -> dict[str, Any]:
    gain_max = values["gain_max"]
    return values | {"gain_max": None if gain_max is None else tuple(gain_max)}


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(named(line), allow_nan=False) + "\n"


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def named(value: Any) -> Any:
    """The value with words for the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: named(item) for key, item in value.items()}
    return [named(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {key: _number(value) for key, value in line.items()}


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    return [_number(item) for item in value] if isinstance(value, list) else value

"""Finished logs that other tools have written, as lines of our own kinds.

Three kinds are read: `trainer_state.json` of Hugging Face's Trainer, CSV with a header, and event files
of TensorBoard. They tell losses, and of the attention what is among the scalars that
`qknorm.monitor.to.trackers` writes.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

STATE_FILE = "trainer_state.json"
EVENT_FILES = "*tfevents*"
# Names of a column in lower case, without "train/" or "train_" in front; the first that is there counts.
STEPS = ("step", "global_step", "trainer/global_step", "_step", "iteration", "iter")
LOSSES = ("loss", "loss_step", "loss/train")
GRADIENT_NORMS = ("grad_norm", "gradient_norm", "grad_norm/total")
TOPS = ("attention/max_logit", "max_logit", "max_attention_logit")
ROW = "row of the file"  # the step of a row, in a file of which no column tells the step
LAYER = "the whole model"  # the name of the only layer of these records


def find_finished_log(folder: Path) -> Path | None:
    """Return the log of another tool in a folder; None if there is none.

    The Trainer leaves a state in each checkpoint, of which that of the last step has all steps.
    """
    for name in (STATE_FILE, f"checkpoint-*/{STATE_FILE}", "metrics.csv", EVENT_FILES):
        # Of two numbers in names the longer one is larger.
        found = max(folder.glob(name), key=lambda path: (len(str(path)), str(path)), default=None)
        if found is not None:
            return found
    return None


def is_finished_log(path: Path) -> bool:
    """Whether a file is a log of another tool, by its name."""
    return path.suffix in (".json", ".csv") or path.match(EVENT_FILES)


def read_finished_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, ascending by step. All event files of a folder are one log.

    Raises ValueError if it cannot be read as one of the three kinds.
    """
    read = {".json": _of_trainer, ".csv": _of_csv}.get(path.suffix, _of_tensorboard)
    try:
        lines = [line for row in read(path) for line in _lines(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not lines:
        raise ValueError(
            f"{path} has no loss and no attention/max_logit: call the columns step, loss and max_logit"
        )
    return sorted(lines, key=lambda line: line["step"])


def _of_trainer(path: Path) -> Iterator[dict[str, float]]:
    try:
        history = [dict(row) for row in json.loads(path.read_bytes())["log_history"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f'{path} is not a {STATE_FILE}: it has no list "log_history"') from error
    for row in history:
        # "train_loss" is the mean of the whole run, in a row at its end.
        yield {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "train_loss"
        }


def _of_csv(path: Path) -> Iterator[dict[str, float]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        has_steps = any(_plain(name) in STEPS for name in reader.fieldnames or ())
        for number, row in enumerate(reader):
            values = {} if has_steps else {ROW: float(number)}
            for name, text in row.items():
                if isinstance(text, str) and (value := _number(text)) is not None:
                    values[name] = value
            yield values


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _of_tensorboard(path: Path) -> Iterator[dict[str, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError("event files need an extra: pip install 'qknorm[tensorboard]'") from error
    events = EventAccumulator(str(path.parent), {"scalars": 0})  # 0: all of them
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {"step": float(event.step)})[tag] = float(event.value)
    yield from rows.values()


def _lines(row: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A row as the line of a trainer and the record of the attention, as far as it has them."""
    values = {_plain(name): value for name, value in row.items()}
    step = _first(values, (*STEPS, ROW))
    if step is None or not math.isfinite(step):
        return
    loss, norm, top = (_first(values, names) for names in (LOSSES, GRADIENT_NORMS, TOPS))
    if loss is not None:
        found = {"kind": "step", "step": int(step), "loss": loss}
        yield found if norm is None else found | {"grad_norm": norm}
    if top is not None:
        entropy = values.get("attention/entropy_nats_mean", math.nan)
        yield _record(int(step), top, entropy, values.get("attention/bound"))


def _record(step: int, top: float, entropy: float, bound: float | None) -> dict[str, Any]:
    """The largest logit of the model as that of one layer with one head.

    What such a log does not tell is NaN. Its rows are 0, and by that the rules know it.
    """
    unknown = [math.nan]
    layer = {
        "max_logit": [top],
        "entropy_nats": [entropy],
        "entropy_ratio": unknown,
        "sink_mass": None,
        "first_mass": None,
        "q_rms": unknown,
        "q_rms_cv": unknown,
        "k_rms": unknown,
        "k_rms_cv": unknown,
        "gain_max": None,
        "bound": bound,
        "coverage": "exact",
        "rms_of": "product",
        "rows": 0,
        "is_normed": bound is not None,
        "note": "read from scalars of the whole model",
    }
    return {"kind": "record", "step": step, "phase": "train", "layers": {LAYER: layer}, "silent": {}}


def _plain(name: str) -> str:
    name = name.strip().lower()
    # Only one of them: "train/train_loss" of the Trainer is the mean of the whole run.
    return name.removeprefix("train/" if name.startswith("train/") else "train_")


def _first(values: dict[str, float], names: Iterable[str]) -> float | None:
    return next((values[name] for name in names if name in values), None)

"""Experiment trackers: the capped scalars of `scalars.py`, and alerts where a tracker has them.

Each takes an object of the tracker that the user has made and also writes into: none of them moves the
steps that the user counts, and nothing of the user's is lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qknorm.monitor.alerts import Alert
from qknorm.monitor.record import Record
from qknorm.monitor.scalars import heatmap, names, scalars

STEP = "attention/step"


@dataclass
class TensorBoard:
    """Scalars, a heatmap of entropy; as text alerts, and the names of the worst heads when they change.

    Attributes:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or the folder for a new one.
    """

    writer: Any
    _names: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.writer, str | os.PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("this needs an extra: pip install 'qknorm[tensorboard]'") from error
            self.writer = SummaryWriter(str(self.writer))
        _check(self.writer, "add_scalar", "a SummaryWriter, or the folder for one")

    def __call__(self, item: Record | Alert) -> None:
        """Write one record or alert."""
        if isinstance(item, Alert):
            text = f"{item.severity}: {item.message}. {item.advice}"
            self.writer.add_text(f"attention/{item.code}", text, item.step)
            return
        for name, value in scalars(item).items():
            self.writer.add_scalar(name, value, item.step)
        for name, text in names(item).items():
            if self._names.get(name) != text:
                self._names[name] = text
                self.writer.add_text(name, text, item.step)
        if item.layers and item.phase == "train":
            self.writer.add_image("attention/entropy_ratio", _image(item), item.step, dataformats="HW")

    def flush(self) -> None:
        """Write to disk."""
        self.writer.flush()


@dataclass
class Wandb:
    """A run of W&B.

    W&B drops what is logged for a step below its newest one, so a record opens no row of the run: it
    joins the one that the user writes next, one record a row, on an axis of its own, `attention/step`.
    Where the user logs more rarely than the monitor observes, the rest waits for `flush`, which
    `Monitor.detach` calls.

    Attributes:
        run: what `wandb.init` returned.
        image: `wandb.Image` or the like, for a heatmap of entropy; None for none.
    """

    run: Any
    image: Callable[[Any], Any] | None = None
    _waiting: deque[dict[str, Any]] = field(default_factory=deque, init=False, repr=False)
    # The row that our newest values joined, and their step.
    _joined: tuple[int, int] = field(default=(-1, -1), init=False, repr=False)

    def __post_init__(self) -> None:
        _check(type(self.run), "define_metric", "what wandb.init returned")
        self.run.define_metric(STEP)
        self.run.define_metric("attention/*", step_metric=STEP)
        self.run.define_metric("attention_eval/*", step_metric=STEP)

    def __call__(self, item: Record | Alert) -> None:
        """Log one record, or raise one alert."""
        if isinstance(item, Alert):
            text = f"{item.message}. {item.advice}"
            self.run.alert(title=_title(item), text=text, level=_LEVELS[item.severity])
            return
        found = scalars(item)
        values: dict[str, Any] = {**found, **names(item)} if found else {}
        if self.image is not None and item.layers and item.phase == "train":
            values["attention/entropy_ratio"] = self.image(_image(item).numpy())
        if not values or self.run.disabled:
            return
        if self._waiting and self._waiting[-1][STEP] == item.step:
            self._waiting[-1].update(values)  # training and evaluation share no name
        else:
            self._waiting.append(values | {STEP: item.step})
        self.run.log({}, commit=False)  # of a run that is finished `step` would wait half a minute
        row = self.run.step
        if row != self._joined[0] or self._joined == (row, self._waiting[0][STEP]):
            self._join(row)

    def _join(self, row: int, **where: int) -> None:
        self.run.log(self._waiting[0], commit=False, **where)
        self._joined = row, self._waiting.popleft()[STEP]

    def flush(self) -> None:
        """Log what waits for a row of the user's, in rows of its own behind them."""
        if self._waiting:
            self.run.log({}, commit=False)
        while self._waiting:
            row = self.run.step
            if row == self._joined[0]:
                self._join(row + 1, step=row + 1)
            else:
                self._join(row)


@dataclass
class Trackio:
    """A run of Trackio, at the optimizer's steps. The steps that it counts for the user are not moved.

    Attributes:
        run: what `trackio.init` returned.
    """

    run: Any

    def __post_init__(self) -> None:
        _check(type(self.run), "alert", "what trackio.init returned")

    def __call__(self, item: Record | Alert) -> None:
        """Log one record, or raise one alert."""
        if isinstance(item, Alert):
            from trackio import AlertLevel

            level = AlertLevel(_LEVELS[item.severity].lower())
            text = f"{item.message}. {item.advice}"
            self.run.alert(title=_title(item), text=text, level=level, step=item.step)
            return
        values = scalars(item)
        if values:
            counted = getattr(self.run, "_next_step", None)
            self.run.log(dict(values), step=item.step)
            if counted is not None:
                self.run._next_step = counted


@dataclass
class Mlflow:
    """The `mlflow` module: the run that is active at the first record; alerts become tags.

    An infinity is stored as the largest number, which is what MLflow does with it.
    """

    client: Any
    _run_id: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.client, "log_metrics", "the module mlflow")

    def __call__(self, item: Record | Alert) -> None:
        """Log one record or alert, also when the user's run has ended by then."""
        if self._run_id is None:
            run = self.client.active_run() or self.client.start_run()
            self._run_id = run.info.run_id
        if isinstance(item, Record):
            self.client.log_metrics(scalars(item), step=item.step, run_id=self._run_id)
        else:
            name = f"attention.{item.code}.{item.step}.{item.layer}".rstrip(".")
            self.client.MlflowClient().set_tag(self._run_id, name, item.message)


@dataclass
class Gauges:
    """OpenTelemetry or Prometheus gauges: `make(name)` returns an object with `set(value)`."""

    make: Callable[[str], Any]
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.make, "__call__", "a function that makes a gauge of a name")

    def __call__(self, item: Record | Alert) -> None:
        """Set the gauges to the newest values."""
        if isinstance(item, Record):
            for name, value in scalars(item).items():
                name = "qknorm_" + name.replace("/", "_")
                if name not in self._made:
                    self._made[name] = self.make(name)
                self._made[name].set(value)


_LEVELS = {"info": "INFO", "warning": "WARN", "alarm": "ERROR"}


def _title(alert: Alert) -> str:
    return f"{alert.code} {alert.severity}"


def _image(record: Record) -> Any:
    """Entropy ratio as grey values 0 to 1, a row per layer."""
    import torch

    return torch.tensor(heatmap(record, "entropy_ratio")).nan_to_num(nan=0.0).clamp(0.0, 1.0)


def _check(holder: Any, method: str, wanted: str) -> None:
    if not hasattr(holder, method):
        name = (holder if isinstance(holder, type) else type(holder)).__name__
        raise TypeError(f"pass {wanted}; got {name}")

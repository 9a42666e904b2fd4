"""Experiment trackers: the capped scalars of `scalars.py`, and alerts where a tracker has them.

Each takes an object of the tracker that the user has made, so nothing is imported or configured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qknorm.monitor.alerts import Alert
from qknorm.monitor.record import Record
from qknorm.monitor.scalars import heatmap, scalars


@dataclass(frozen=True)
class TensorBoard:
    """A `torch.utils.tensorboard.SummaryWriter`: scalars, a heatmap of entropy, alerts as text."""

    writer: Any

    def __call__(self, item: Record | Alert) -> None:
        """Write one record or alert."""
        if isinstance(item, Alert):
            text = f"{item.severity}: {item.message}. {item.advice}"
            self.writer.add_text(f"attention/{item.code}", text, item.step)
            return
        for name, value in scalars(item).items():
            self.writer.add_scalar(name, value, item.step)
        if item.layers and item.phase == "train":
            self.writer.add_image("attention/entropy_ratio", _image(item), item.step, dataformats="HW")


def _image(record: Record) -> Any:
    """Entropy ratio as grey values 0 to 1, a row per layer."""
    import torch

    return torch.tensor(heatmap(record, "entropy_ratio")).nan_to_num(nan=0.0).clamp(0.0, 1.0)


@dataclass(frozen=True)
class Wandb:
    """A `wandb` run, or `trackio` run: `log` for scalars, `alert` for alerts.

    The steps of a run are its own: these numbers have an axis of theirs, `attention/step`.

    Attributes:
        run: what `init` returned.
        image: `wandb.Image` or the like, for a heatmap of entropy; None for none.
    """

    run: Any
    image: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if hasattr(self.run, "define_metric"):
            self.run.define_metric("attention/step")
            self.run.define_metric("attention/*", step_metric="attention/step")
            self.run.define_metric("attention_eval/*", step_metric="attention/step")

    def __call__(self, item: Record | Alert) -> None:
        """Log one record, or raise one alert."""
        if isinstance(item, Record):
            values: dict[str, Any] = scalars(item) | {"attention/step": item.step}
            if self.image is not None and item.layers and item.phase == "train":
                values["attention/entropy_ratio"] = self.image(_image(item).numpy())
            self.run.log(values)
            return
        level = {"info": "INFO", "warning": "WARN", "alarm": "ERROR"}[item.severity]
        self.run.alert(
            title=f"{item.code} {item.severity}", text=f"{item.message}. {item.advice}", level=level
        )


@dataclass(frozen=True)
class Mlflow:
    """The `mlflow` module; alerts become tags."""

    client: Any

    def __call__(self, item: Record | Alert) -> None:
        """Log one record or alert."""
        if isinstance(item, Record):
            # Its stores refuse NaN.
            finite = {name: v for name, v in scalars(item).items() if math.isfinite(v)}
            self.client.log_metrics(finite, step=item.step)
        else:
            where = ".".join(str(part) for part in (item.layer, item.head) if part is not None)
            self.client.set_tag(f"attention.{item.code}.{item.step}.{where}".rstrip("."), item.message)


@dataclass(frozen=True)
class Gauges:
    """OpenTelemetry or Prometheus gauges: `make(name)` returns an object with `set(value)`."""

    make: Callable[[str], Any]
    _made: dict[str, Any] = field(default_factory=dict)

    def __call__(self, item: Record | Alert) -> None:
        """Set the gauges to the newest values."""
        if isinstance(item, Record):
            for name, value in scalars(item).items():
                name = "qknorm_" + name.replace("/", "_")
                if name not in self._made:
                    self._made[name] = self.make(name)
                self._made[name].set(value)

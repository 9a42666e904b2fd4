"""torchtitan: a mix-in for its metrics processor.

    from torchtitan.components.metrics import MetricsProcessor
    from qknorm.integrations.torchtitan import AttentionMetrics

    class Metrics(AttentionMetrics, MetricsProcessor):
        every = 10

torchtitan hands the processor its model parts once they are built, wrapped and compiled, asks it
`should_log(step)` after each optimizer step on every rank, and calls `log` where the answer is yes.
These three are all that is used, so nothing of torchtitan is imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from qknorm.integrations.session import Session
from qknorm.monitor.rules import Thresholds


class AttentionMetrics:
    """Adds the capped scalars of the monitor to the metrics that are logged, and alerts.

    Attributes to set on a subclass:
        every, sample: see `Monitor.attach`.
        folder: of the JSON lines; None for no file.
        tensor_parallel: the group among which heads are split, as `Monitor.attach` takes it.
        thresholds: when a rule speaks.
    """

    every: int = 10
    sample: int | None = None
    folder: str | os.PathLike[str] | None = None
    tensor_parallel: dist.ProcessGroup | None = None
    thresholds: Thresholds | None = None

    session: Session | None = None
    _parts: Sequence[nn.Module] | None = None

    @property
    def model_parts(self) -> Sequence[nn.Module] | None:
        """What is trained; setting it attaches the monitor."""
        return self._parts

    @model_parts.setter
    def model_parts(self, parts: Sequence[nn.Module] | None) -> None:
        self._parts = parts
        if self.session is not None:
            self.session.close()
            self.session = None
        if parts:
            self.session = Session(
                parts,
                self.folder,
                every=self.every,
                sample=self.sample,
                tensor_parallel=self.tensor_parallel,
                thresholds=self.thresholds,
            )

    def should_log(self, step: int) -> bool:
        """Ends the step that was done."""
        if self.session is not None:
            # A checkpoint that was loaded after the parts were set moves the count on.
            if self.session.monitor.step_count != step - 1:
                self.session.monitor.load_state_dict({"step_count": step - 1})
            self.session.step()
        return super().should_log(step)  # type: ignore[misc]

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Log with the newest numbers of the monitor."""
        latest = {} if self.session is None else self.session.latest
        super().log(*args, extra_metrics=(extra_metrics or {}) | latest, **kwargs)  # type: ignore[misc]

    def close(self) -> None:
        """Detach as well. torchtitan comes here also where another rank has failed."""
        if self.session is not None:
            self.session.close(failed=sys.exc_info()[0] is not None, flush=False)
            self.session = None
        super().close()  # type: ignore[misc]

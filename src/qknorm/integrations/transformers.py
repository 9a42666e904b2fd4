"""The Trainer of Hugging Face: a callback that watches attention and warns.

from qknorm.integrations.transformers import MonitorCallback

MonitorCallback.add_to(trainer, every=10)   # its numbers join the Trainer's own log
trainer.train()
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("this needs an extra: pip install 'qknorm[transformers]'") from error

from qknorm.integrations.session import Destination, Session
from qknorm.monitor.alerts import Thresholds


class MonitorCallback(TrainerCallback):
    """Max logit, entropy and alerts of the model that a Trainer trains.

    Use `add_to`. Passed as `callbacks=[...]` it does the same, but comes after the Trainer's reports to
    trackers, which then do not get its numbers.

    Args:
        every: optimizer steps between observed ones.
        rows: queries looked at; None for all. See `Monitor.attach`.
        folder: of the JSON lines; the Trainer's `output_dir` if None.
        thresholds: when a rule speaks.
        stop_on_alarm: end the training at the first alarm.
        to: called on rank 0 with each record and alert.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        rows: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        thresholds: Thresholds | None = None,
        stop_on_alarm: bool = False,
        to: Iterable[Destination] = (),
    ) -> None:
        self.options: dict[str, Any] = {
            "every": every,
            "rows": rows,
            "thresholds": thresholds,
            "to": list(to),
        }
        self.folder = folder
        self.stop_on_alarm = stop_on_alarm
        self.session: Session | None = None

    @classmethod
    def add_to(cls, trainer: Trainer, **options: Any) -> MonitorCallback:
        """A callback before all others of the trainer, so that its numbers reach their trackers."""
        callback = cls(**options)
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach; a resumed run goes on in its file. A training before that failed has not detached."""
        if self.session is not None:
            self.session.close(failed=True)
        folder = args.output_dir if self.folder is None else self.folder
        self.session = Session(kwargs["model"], folder, step=state.global_step, **self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each optimizer step."""
        if self.session is not None:
            self.session.step()
            if self.stop_on_alarm and self.session.has_alarm():
                control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the newest numbers to what the Trainer logs of training."""
        logs: dict[str, Any] = kwargs["logs"]
        if self.session is not None and "loss" in logs:
            logs.update(self.session.latest)
            if state.log_history:
                state.log_history[-1].update(self.session.latest)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach."""
        if self.session is not None:
            self.session.close()
            self.session = None

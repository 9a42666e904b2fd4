"""Lightning: a callback that watches attention and warns.

    trainer = lightning.Trainer(callbacks=[MonitorCallback(every=10)])

The numbers are logged through the module, so that loggers, `callback_metrics`, early stopping and
checkpoints can use them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("this needs an extra: pip install 'qknorm[lightning]'") from error

from qknorm.integrations.session import Destination, Session
from qknorm.monitor.alerts import Thresholds


class MonitorCallback(Callback):
    """Max logit, entropy and alerts of the module that a Trainer fits.

    Args:
        every: optimizer steps between observed ones.
        rows: queries looked at; None for all. See `Monitor.attach`.
        folder: of the JSON lines; the logger's or else the trainer's root folder if None.
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
        self.steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, after strategies have wrapped the module and a checkpoint was loaded."""
        self._close(failed=True)  # what an earlier training may have left
        folder = self.folder or trainer.log_dir or trainer.default_root_dir
        self.steps = trainer.global_step
        self.session = Session(pl_module, folder, step=self.steps, **self.options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each batch; only those that end an optimizer step count."""
        if self.session is None or trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        pl_module.log_dict(self.session.step())
        if self.stop_on_alarm and self.session.has_alarm():
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach."""
        self._close(failed=False)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Detach also when the training fails."""
        self._close(failed=True)

    def _close(self, *, failed: bool) -> None:
        if self.session is not None:
            self.session.close(failed=failed)
            self.session = None

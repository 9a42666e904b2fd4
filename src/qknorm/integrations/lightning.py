"""Lightning: a callback that watches attention and warns.

    trainer = lightning.Trainer(callbacks=[MonitorCallback(every=10)])

The numbers are logged through the module, so that loggers, `callback_metrics`, early stopping and
checkpoints can use them.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("this needs an extra: pip install 'qknorm[lightning]'") from error

from qknorm.integrations.session import Watcher


class MonitorCallback(Watcher, Callback):
    """Max logit, entropy and alerts of the module that a Trainer fits; for its options see `Watcher`.

    The JSON lines go to the logger's folder, or else to the trainer's root.
    """

    # Lightning's own count rises with every optimizer that steps; the steps of the records do not.
    step_count = 0
    optimizer_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; Lightning keeps it in its checkpoints."""
        return {"step_count": self.step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint ended."""
        self.step_count = int(state_dict["step_count"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, after strategies have wrapped the module and a checkpoint was loaded."""
        self.optimizer_steps = trainer.global_step
        if trainer.global_step == 0:
            self.step_count = 0
        elif self.step_count == 0:  # the run before was not watched
            self.step_count = trainer.global_step // max(1, len(trainer.optimizers))
        self.begin(pl_module, trainer.log_dir or trainer.default_root_dir, self.step_count)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each batch; only those in which an optimizer stepped count."""
        if self.session is None or trainer.global_step == self.optimizer_steps:
            return
        self.optimizer_steps = trainer.global_step
        pl_module.log_dict(self.session.step())
        self.step_count = self.session.monitor.step_count
        trainer.should_stop |= self.must_stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach."""
        self.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Detach also when the training fails."""
        self.end(failed=True)

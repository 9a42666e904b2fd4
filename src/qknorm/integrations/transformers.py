"""The Trainer of Hugging Face: a callback that watches attention and warns.

from qknorm.integrations.transformers import MonitorCallback

MonitorCallback.add_to(trainer, every=10)   # its numbers join the Trainer's own log
trainer.train()
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("this needs an extra: pip install 'qknorm[transformers]'") from error

from qknorm.integrations.session import Watcher


class MonitorCallback(Watcher, TrainerCallback):
    """Max logit, entropy and alerts of the model that a Trainer trains; for its options see `Watcher`.

    Use `add_to`. Passed as `callbacks=[...]` it does the same, but comes after the Trainer's reports to
    trackers, which then do not get its numbers. The JSON lines go to the Trainer's `output_dir`.
    """

    @classmethod
    def add_to(cls, trainer: Trainer, **options: Any) -> MonitorCallback:
        """A callback before all others of the trainer, so that its numbers reach their trackers."""
        callback = cls(**options)
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach; a resumed run goes on in its file."""
        last_step = state.max_steps if state.max_steps > 0 else None
        self.begin(kwargs["model"], args.output_dir, state.global_step, last_step=last_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each optimizer step."""
        if self.session is not None:
            self.session.step()
            control.should_training_stop |= self.must_stop()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the newest numbers to what the Trainer logs of training."""
        logs: dict[str, Any] = kwargs["logs"]
        if self.session is not None and "loss" in logs:
            logs.update(self.session.latest)
            if state.log_history:
                state.log_history[-1].update(self.session.latest)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach."""
        self.end()

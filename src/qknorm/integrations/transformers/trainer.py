"""The Trainer of Hugging Face: a callback that watches attention and warns.

    from qknorm.integrations.transformers import MonitorCallback

    Trainer(..., callbacks=[MonitorCallback(every=10)])

Its numbers join the Trainer's own log, and so reach its trackers.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError("this needs an extra: pip install 'qknorm[transformers]'") from error

from qknorm.integrations.session import Watcher


class MonitorCallback(Watcher, TrainerCallback):
    """Max logit, entropy and alerts of the model that a Trainer trains; for its options see `Watcher`.

    Wherever it stands among the callbacks, it is called before the reports to trackers, which then get
    its numbers. The JSON lines go to the Trainer's `output_dir`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach; a resumed run goes on in its file."""
        _call_first(self)
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


def _call_first(callback: TrainerCallback) -> None:
    """Put a callback before the others of its Trainer. To be called in one of its events.

    The Trainer puts its reports to trackers first, and no event is told who calls it: that is read from
    the frames of the call. The list is replaced and not changed, since it is being walked through.
    """
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks = [callback, *(one for one in handler.callbacks if one is not callback)]
            return

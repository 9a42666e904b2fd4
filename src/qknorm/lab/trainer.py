"""A small trainer with warm-up, clipping and exact resuming, under the monitor that users attach.

A run folder holds `config.json`, `environment.json`, `metrics.jsonl` and `checkpoint.pt`.
"""

from __future__ import annotations

import math
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qknorm.checks import check_eps
from qknorm.lab import checkpoint, data, files
from qknorm.lab.folder import OnItem, RunFolder, is_first_rank, summary_writer
from qknorm.lab.model import LanguageModel, ModelConfig, saved_model
from qknorm.lab.verdict import Verdict, judge
from qknorm.monitor import Monitor, Record
from qknorm.monitor.to.jsonl import Item
from qknorm.nn import param_groups


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run.

    Attributes:
        model: sizes of the model and its variant of attention.
        data: the source of tokens.
        arm: name of the variant, for logs and tables.
        steps: number of optimizer steps.
        batch: sequences in a step.
        context: tokens in a sequence.
        lr: peak learning rate.
        schedule: the learning rate after a linear warm-up: "cosine" (from the peak down to a tenth of
            it), "constant" (the peak), or "ramp" (the warm-up ends at a hundredth of the peak, and the
            rate then grows geometrically to the peak).
        warmup: number of steps of the warm-up.
        optimizer: "adamw"; or "muon" for the matrices of the blocks, of which q, k and v are one each,
            with AdamW for the rest. Muon's updates have the RMS of AdamW's, so the same rates make
            sense.
        weight_decay: weight decay that does not depend on the peak learning rate, as in Wortsman et al.:
            each step multiplies the weights by `1 - weight_decay * (lr / peak lr)`.
        gain_decay: the same for gains that are stored as 1 + w, which it pulls to 1.
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        clip: largest gradient norm; None for no clipping.
        z_loss: weight of the squared log of the softmax denominator in the loss.
        dtype: "float32", or "bfloat16" for autocast.
        compile: whether to use torch.compile.
        seed: seed of weights and batches, below 2^32.
        stats_every: the monitor observes every step that is a multiple of this number; 0 for none. The
            final evaluation is always observed.
        eval_batches: number of held-out batches in the final evaluation.
        checkpoint_every: number of steps between checkpoints; 0 for one at the end only. A process that
            is killed loses the steps since the last checkpoint.
        tensorboard: whether to write event files too.

    Raises:
        ValueError: a value is out of range.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: data.DataConfig = field(default_factory=data.DataConfig)
    arm: str = "qk"
    steps: int = 400
    batch: int = 16
    context: int = 128
    lr: float = 3e-3
    schedule: Literal["cosine", "constant", "ramp"] = "cosine"
    warmup: int = 50
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = 1e-4
    gain_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float | None = 1.0
    z_loss: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    seed: int = 0
    stats_every: int = 10
    eval_batches: int = 8
    checkpoint_every: int = 100
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in (
            "warmup",
            "weight_decay",
            "gain_decay",
            "z_loss",
            "stats_every",
            "checkpoint_every",
            "seed",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be positive; got {self.lr}")
        if self.schedule not in ("cosine", "constant", "ramp"):
            raise ValueError(f"schedule must be cosine, constant or ramp; got {self.schedule!r}")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be adamw or muon; got {self.optimizer!r}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16; got {self.dtype!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32; got {self.seed}")
        if self.model.norm is not None and self.dtype == "bfloat16":
            check_eps(self.model.norm.eps, torch.bfloat16)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, or None for no clipping; got {self.clip}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        first = self.lr / 100 if self.schedule == "ramp" else self.lr
        if step <= self.warmup:
            return first * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.schedule == "ramp":
            return first * 100**share
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


# Settings that may change when a run is resumed, since they do not change the training.
FREE = {"stats_every", "checkpoint_every", "tensorboard", "eval_batches"}


def saved_config(folder: Path) -> TrainConfig:
    """Return the configuration of the run in a folder, from its checkpoint.

    Raises:
        ValueError: the checkpoint is missing or damaged.
    """
    saved = checkpoint.load(folder / files.CHECKPOINT_FILE)["config"]
    model, source = saved_model(saved["model"]), data.DataConfig(**saved["data"])
    return TrainConfig(**saved | {"model": model, "data": source})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        final: the line with the results; None if the run was stopped before its last step.
        steps: number of steps that were done.
        stopped: whether a signal or a closed pipe requested a stop, even if the run had ended by then.
    """

    final: dict[str, Any] | None
    steps: int
    stopped: bool = False


class Trainer:
    """The state of a run in memory.

    Args:
        config: the configuration.

    Attributes:
        config: the configuration.
        data: the tokens.
        model: the language model.
        optimizers: AdamW, or Muon and AdamW.
        losses: training loss of each step so far, in nats per token.
        failure: a sentence that says why the run cannot be continued; None if it can.
        monitor: the monitor of the model; None if `stats_every` is 0.
        step: number of steps that were done.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = c = config
        self.data = data.load(c.data, vocab_size=c.model.vocab_size, context=c.context)
        torch.manual_seed(c.seed)
        self.model = LanguageModel(c.model)
        self.optimizers = _optimizers(self.model, c)
        self.forward = torch.compile(self.model, dynamic=False) if c.compile else self.model
        self.losses: list[float] = []
        self.failure: str | None = None
        self.monitor = Monitor.attach(self.model, every=c.stats_every) if c.stats_every else None
        if self.monitor is not None:
            # The monitor is detached when the trainer is deleted, even if it is never closed.
            weakref.finalize(self, self.monitor.detach).atexit = False
        self._begin(after=0)

    def _begin(self, *, after: int) -> None:
        """Set the number of steps that were done, in the trainer and in its monitor."""
        self.step = after
        if self.monitor is not None:
            self.monitor.load_state_dict({"step_count": after + 1})

    def close(self) -> None:
        """Detach the monitor from the model."""
        if self.monitor is not None:
            self.monitor.detach()

    def train_step(self) -> list[Item]:
        """Train for one step.

        If the loss or the gradient is not finite, the weights are not changed, and `failure` is set.

        Returns:
            The records of the monitor, if it observed the step, and then the line of the step.
        """
        c = self.config
        began = time.perf_counter()
        self.step += 1
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = c.rate(self.step)
        inputs, targets = self.data.batch(c.seed, self.step, c.batch, c.context)
        with self._autocast():
            logits = self.forward(inputs)
        loss, z = self._loss(logits, targets)
        (loss + c.z_loss * z if c.z_loss else loss).backward()
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), math.inf if c.clip is None else c.clip
            )
        )
        self.losses.append(float(loss.detach()))
        # Before the optimizer changes the gains, so that the bound fits the logits of this forward.
        records = [] if self.monitor is None else [self._with_cap(r) for r in self.monitor.step()]
        if math.isfinite(self.losses[-1]) and math.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            what = "gradient norm" if math.isfinite(self.losses[-1]) else "loss"
            self.failure = f"the {what} is not finite at step {self.step}"
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
        line = {
            "kind": "step",
            "step": self.step,
            "loss": self.losses[-1],
            "grad_norm": norm,
            "lr": c.rate(self.step),
            "step_ms": 1e3 * seconds,
            "tokens_per_s": inputs.numel() / seconds,
        }
        return [*records, line]

    @torch.no_grad()
    def evaluate(self) -> tuple[float, Record]:
        """Evaluate the model on held-out text. The monitor of the training is detached.

        Returns:
            The held-out loss in nats per token, and the record of the attention.
        """
        c = self.config
        self.close()
        total, tokens = 0.0, 0
        self.model.eval()
        with Monitor.attach(self.model, every=1) as monitor:
            monitor.load_state_dict({"step_count": self.step})
            for inputs, targets in self.data.holdout_batches(c.eval_batches, c.batch, c.context):
                with self._autocast():
                    logits = self.model(inputs)
                total += float(self._loss(logits, targets)[0]) * targets.numel()
                tokens += targets.numel()
            nothing = Record(step=self.step, phase="eval", layers={})
            record = next(iter(monitor.flush()), nothing)
        self.model.train()
        return total / tokens, self._with_cap(record)

    def _with_cap(self, record: Record) -> Record:
        """Return a record whose bounds include the cap on the logits."""
        cap = self.config.model.cap
        if cap is None:
            return record
        layers = {
            name: replace(layer, bound=min(cap.limit, math.inf if layer.bound is None else layer.bound))
            for name, layer in record.layers.items()
        }
        return replace(record, layers=layers)

    def _loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy in nats per token, and the z-loss.

        The z-loss is the mean square of the log of the softmax denominator; 0 if its weight is 0.
        """
        logits = logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        return loss, logits.logsumexp(-1).square().mean() if self.config.z_loss else loss.new_zeros(())

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def final(self) -> tuple[dict[str, Any], Record]:
        """Evaluate the model and judge the run.

        Returns:
            The last line of the log, and the record of the attention on held-out text.
        """
        c = self.config
        loss, record = self.evaluate()
        if self.failure is None:
            verdict = judge(self.losses, loss, record)
        else:
            verdict = Verdict("diverged", self.failure)
        line = {
            "kind": "final",
            "arm": c.arm,
            "lr": c.lr,
            "seed": c.seed,
            "steps": self.step,
            "initial_loss": self.losses[0],
            "verdict": verdict.word,
            "diverged": verdict.word == "diverged",
            "reason": verdict.reason,
            "final_loss": loss,
            "max_logit": record.max_logit,
            "entropy_nats": record.entropy_nats,
        }
        return files.plain(line), record

    def state(self) -> dict[str, Any]:
        """Return the state from which the run can be continued, for a checkpoint."""
        return {
            "config": asdict(self.config),
            "step": self.step,
            "losses": self.losses,
            "failure": self.failure,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: the result of `state()`.

        Raises:
            ValueError: the state belongs to a run with another configuration.
        """
        mine, theirs = asdict(self.config), state["config"]
        changed = [key for key in mine if key not in FREE and mine[key] != theirs.get(key)]
        if changed:
            raise ValueError(
                "the checkpoint belongs to another run, which differs in "
                f"{', '.join(changed)}: resume with its configuration, or start in a new folder"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.losses, self.failure = list(state["losses"]), state["failure"]
        self._begin(after=state["step"])


def _optimizers(model: LanguageModel, c: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run.

    PyTorch multiplies the decay by the learning rate, so it is divided by the peak here.
    """
    groups = param_groups(
        model,
        weight_decay=c.weight_decay / c.lr,
        gain_decay=c.gain_decay / c.lr,
        split="qkv" if c.optimizer == "muon" else None,
    )
    muon: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        is_for_muon = c.optimizer == "muon" and group["name"] == "matrix"
        (muon if is_for_muon else rest).append(group)
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=c.lr, betas=(c.beta1, c.beta2), eps=1e-8, fused=True)
    ]
    if muon:
        made.append(torch.optim.Muon(muon, lr=c.lr, adjust_lr_fn="match_rms_adamw"))
    return made


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a request to stop. A second signal acts as usual.

    Yields:
        A function that returns whether a stop was requested.
    """
    is_requested = False

    def request(number: int, frame: Any) -> None:
        nonlocal is_requested
        is_requested = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under `nohup` SIGHUP stays ignored, so that the run continues without its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, request)
    except ValueError:  # only the main thread may handle signals
        before = {}
    try:
        yield lambda: is_requested
    finally:
        restore()


def train(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_item: OnItem = lambda item: None,
) -> Outcome:
    """Train a model, and write its log and checkpoints to a folder.

    A first SIGINT, SIGTERM or SIGHUP stops the run after the current step and writes a checkpoint, and
    so does an `on_item` that raises a BrokenPipeError. A resumed run gives the same bits as one that was
    not stopped. All input is checked before anything is written.

    Args:
        config: the configuration.
        folder: the folder of the run.
        resume: whether to continue from the checkpoint in the folder.
        overwrite: whether to delete a run that the folder holds.
        on_item: called with each record, alert and line after it was written to the log.

    Returns:
        How the run ended.

    Raises:
        ValueError: the input is not valid, the folder already holds a run, or a run is going on in it.
    """
    state = checkpoint.load(folder / files.CHECKPOINT_FILE) if resume else None
    if not resume and not overwrite and is_first_rank():
        files.refuse_if_taken(folder, files.RUN_FILES, resumable=True)
    if config.tensorboard:
        summary_writer()
    with closing(Trainer(config)) as trainer:
        if state is not None:
            trainer.restore(state)
        return _train(trainer, folder, is_resumed=state is not None, on_item=on_item)


def _train(trainer: Trainer, folder: Path, *, is_resumed: bool, on_item: OnItem) -> Outcome:
    config = trainer.config
    run = RunFolder(
        folder,
        asdict(config),
        resume_after=trainer.step if is_resumed else None,
        tensorboard=config.tensorboard,
        on_item=on_item,
    )

    def save() -> None:
        try:
            run.save(trainer.state())
        except checkpoint.NotFiniteError as error:
            trainer.failure = trainer.failure or f"after step {trainer.step} {error}"

    try:
        with _stop_requests() as stop_requested:
            while trainer.step < config.steps and not stop_requested() and trainer.failure is None:
                for item in trainer.train_step():
                    run.put(item)
                if run.is_unheard:
                    break
                if config.checkpoint_every and trainer.step % config.checkpoint_every == 0:
                    save()
            save()
            is_stopped = stop_requested() or run.is_unheard
            if is_stopped and trainer.step < config.steps and trainer.failure is None:
                return Outcome(final=None, steps=trainer.step, stopped=True)
            final, record = trainer.final()
            run.put(final)
            run.put(record)
            run.close(ended=True)
            return Outcome(final=final, steps=trainer.step, stopped=is_stopped)
    finally:
        run.close()

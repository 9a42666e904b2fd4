"""A small trainer: AdamW, warm-up, clipping, exact resume, and the two numbers of every head.

A run folder holds `config.json`, `environment.json`, `metrics.jsonl` and `checkpoint.pt`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qknorm.checks import check_eps
from qknorm.lab import checkpoint, data, environment, files
from qknorm.lab.log import MetricsLog, require_tensorboard
from qknorm.lab.model import LanguageModel, ModelConfig
from qknorm.lab.timeline import lab_record
from qknorm.lab.verdict import divergence
from qknorm.monitor.alerts import Alerts
from qknorm.nn import param_groups
from qknorm.ops import Stats


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Attributes:
        model, data: what is trained on what.
        arm: name of the variant, for tables.
        steps, batch, context: optimizer steps, sequences a step, tokens a sequence.
        lr: peak learning rate.
        schedule: after a linear warm-up "cosine" (from the peak to a tenth of it), "constant" (the
            peak), or "ramp" (warmed up to a hundredth of the peak, then growing geometrically to it).
        warmup: steps.
        weight_decay: independent of the rate, as in Wortsman et al.: each step multiplies weights by
            1 - weight_decay * (lr / peak lr).
        gain_decay: the same for gains stored as 1 + w; they are pulled to 1.
        beta1, beta2: of AdamW.
        clip: largest gradient norm; None for no clipping.
        z_loss: weight of the squared log of the softmax denominator.
        dtype: "float32", or "bfloat16" for autocast.
        compile: use torch.compile.
        seed: of weights and batches.
        stats_every: steps between records of the attention statistics; 0 for none but the final one.
        eval_batches: held-out batches at the end.
        checkpoint_every: steps; 0 for only at the end.
        tensorboard: also write event files.
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
    checkpoint_every: int = 0
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
        """Learning rate of step 1 ... steps."""
        first = self.lr / 100 if self.schedule == "ramp" else self.lr
        if step <= self.warmup:
            return first * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.schedule == "ramp":
            return first * 100**share
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        record: the final record, or None if the run was stopped before its last step.
        steps: steps done.
        stopped: a signal asked to stop, perhaps too late to cut this run short.
    """

    record: dict[str, Any] | None
    steps: int
    stopped: bool = False


OnRecord = Callable[[dict[str, Any]], None]


class Trainer:
    """One run in memory: model, optimizer, data, and the losses so far."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = c = config
        self.data = data.load(c.data, vocab_size=c.model.vocab_size, context=c.context)
        torch.manual_seed(c.seed)
        self.model = LanguageModel(c.model)
        groups = param_groups(
            self.model, weight_decay=c.weight_decay / c.lr, gain_decay=c.gain_decay / c.lr
        )
        # PyTorch multiplies the decay by the rate; dividing by the peak makes it independent of it.
        self.optimizer = torch.optim.AdamW(
            groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=1e-8, fused=True
        )
        self.forward = torch.compile(self.model, dynamic=False) if c.compile else self.model
        self.autocast_dtype = torch.bfloat16 if c.dtype == "bfloat16" else None
        self.step = 0
        self.losses: list[float] = []

    @property
    def lost(self) -> bool:
        """The last loss is not finite: nothing is left to train."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    def train_step(self) -> dict[str, Any]:
        """One optimizer step; returns its record."""
        c = self.config
        began = time.perf_counter()
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = c.rate(self.step)
        inputs, targets = self.data.batch(c.seed, self.step, c.batch, c.context)
        watch = c.stats_every > 0 and (self.step % c.stats_every == 0 or self.step == 1)
        with self._autocast():
            logits, stats = self.forward(inputs, stats=watch)
        loss, z = self._loss(logits, targets)
        (loss + c.z_loss * z if c.z_loss else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), math.inf if c.clip is None else c.clip
        )
        # Before the step, so that the bound is that of the weights that were measured.
        watched = self._attention_record(stats) if watch else {}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        seconds = time.perf_counter() - began
        record: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "loss": self.losses[-1],
            "grad_norm": float(norm),
            "lr": c.rate(self.step),
            "step_ms": 1e3 * seconds,
            "tokens_per_s": inputs.numel() / seconds,
        }
        return record | watched

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out loss and statistics, merged over batches."""
        c = self.config
        total, tokens = 0.0, 0
        merged: list[Stats] = []
        for inputs, targets in self.data.holdout_batches(c.eval_batches, c.batch, c.context):
            with self._autocast():
                logits, stats = self.model(inputs, stats=True)
            total += float(self._loss(logits, targets)[0]) * targets.numel()
            tokens += targets.numel()
            merged = [a.merge(b) for a, b in zip(merged, stats, strict=True)] if merged else stats
        return {"final_loss": total / tokens} | self._attention_record(merged)

    def _loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy in nats per token, and the mean squared log of the denominator."""
        logits = logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        return loss, logits.logsumexp(-1).square().mean() if self.config.z_loss else loss.new_zeros(())

    def _attention_record(self, stats: list[Stats]) -> dict[str, Any]:
        """Statistics `[layer][head]` and the two numbers that the progress view shows."""
        entropy = torch.stack([s.entropy_nats for s in stats])
        maximum = torch.stack([s.max_logit for s in stats])
        bounds = self.model.logit_bounds(self.config.context, self.autocast_dtype or torch.float32)
        return {
            "max_logit": float(maximum.max()),
            "entropy_nats": float(entropy.mean(1).min()),
            "layers": {
                "max_logit": maximum,
                "bound": bounds,
                "entropy_nats": entropy,
                "entropy_ratio": torch.stack([s.entropy_ratio for s in stats]),
                "sink_mass": torch.stack([s.sink_mass for s in stats]),
            },
        }

    def _autocast(self) -> Any:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=self.autocast_dtype)

    def final_record(self) -> dict[str, Any]:
        """The line that ends a run's log, and a record of `summary.json`."""
        c = self.config
        found = self.evaluate()
        reason = divergence(self.losses, found["final_loss"])
        return {
            "kind": "final",
            "arm": c.arm,
            "lr": c.lr,
            "seed": c.seed,
            "steps": self.step,
            "initial_loss": self.losses[0],
            "diverged": reason is not None,
            "reason": reason,
        } | found

    def state(self) -> dict[str, Any]:
        """Everything that a run needs to go on."""
        return {
            "config": asdict(self.config),
            "step": self.step,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Raises ValueError if it belongs to another configuration."""
        mine, theirs = asdict(self.config), state["config"]
        # How often to look or save may change between sessions; the run itself may not.
        free = {"stats_every", "checkpoint_every", "tensorboard", "eval_batches"}
        changed = [key for key in mine if key not in free and mine[key] != theirs.get(key)]
        if changed:
            raise ValueError(
                "the checkpoint belongs to another run, which differs in "
                f"{', '.join(changed)}: resume with its configuration, or start in a new folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], list(state["losses"])


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a request; the second one acts as it always did."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: signals go elsewhere
        before = {}
    try:
        yield lambda: asked
    finally:
        restore()


def train(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_record: OnRecord = lambda record: None,
) -> Outcome:
    """Train, log and save into a run folder.

    A first SIGINT or SIGTERM ends the run after the current step with a checkpoint; `resume`
    continues it bit for bit. Nothing is written before the whole input is checked.

    Args:
        config: the run.
        folder: where it goes.
        resume: continue from its checkpoint.
        overwrite: start anew in a folder that holds a run.
        on_record: called with every record, and every alert, as it is logged.

    Raises:
        ValueError: bad input, or a folder that holds a run already.
    """
    path = folder / files.CHECKPOINT_FILE
    state = checkpoint.load(path) if resume else None
    if not resume and not overwrite:
        files.refuse_if_taken(folder, files.RUN_FILES, "the run")
    if config.tensorboard:
        require_tensorboard()
    trainer = Trainer(config)
    if state is not None:
        trainer.restore(state)
    if state is None:
        files.remove_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_json(folder / files.CONFIG_FILE, asdict(config))
    files.replace_json(folder / files.ENVIRONMENT_FILE, environment.describe())
    log = MetricsLog(
        folder, resume_after=None if state is None else trainer.step, tensorboard=config.tensorboard
    )

    alerts = Alerts()
    alerts.replay(lab_record(record) for record in log.kept if "layers" in record)

    def put(record: dict[str, Any]) -> None:
        log.write(record)
        on_record(record)
        if record["kind"] == "step" and "layers" in record:
            for alert in alerts(lab_record(record)):
                line = {"kind": "alert"} | alert.to_json()
                log.write(line)
                on_record(line)

    try:
        with _stop_requests() as stop_asked:
            while trainer.step < config.steps and not stop_asked() and not trainer.lost:
                put(trainer.train_step())
                if config.checkpoint_every and trainer.step % config.checkpoint_every == 0:
                    checkpoint.save(trainer.state(), path)
            checkpoint.save(trainer.state(), path)
            if stop_asked() and trainer.step < config.steps and not trainer.lost:
                return Outcome(record=None, steps=trainer.step, stopped=True)
            record = trainer.final_record()
            put(record)
            return Outcome(record=record, steps=trainer.step, stopped=stop_asked())
    finally:
        log.close()

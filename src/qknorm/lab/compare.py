"""Twins: the same model, data and seed, trained with different variants of attention."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from qknorm.lab import data, files
from qknorm.lab.arms import get_arm
from qknorm.lab.trainer import TrainConfig, train
from qknorm.lab.verdict import SUMMARY_KEYS, lr_sensitivity
from qknorm.monitor.to.jsonl import Item


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A grid of runs.

    Attributes:
        base: the run that is varied; its arm, rate and seed are replaced.
        arms: names of variants.
        lrs: peak learning rates.
        seeds: of weights and batches; paired between arms.
    """

    base: TrainConfig = field(default_factory=TrainConfig)
    arms: tuple[str, ...] = ("none", "qk")
    lrs: tuple[float, ...] = (3e-2,)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not (self.arms and self.lrs and self.seeds):
            raise ValueError("a comparison needs at least one arm, one learning rate and one seed")
        for name in ("arms", "lrs", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} repeats a value: {', '.join(map(str, values))}")
        for arm in self.arms:
            get_arm(arm)

    def runs(self) -> list[tuple[str, TrainConfig]]:
        """Folder name and configuration of every run; arms of one rate and seed side by side."""
        return [
            (f"{arm}-lr{lr!r}-seed{seed}", self.run(arm, lr, seed))
            for lr in self.lrs
            for seed in self.seeds
            for arm in self.arms
        ]

    def run(self, arm: str, lr: float, seed: int) -> TrainConfig:
        """One run of the grid."""
        chosen = get_arm(arm)
        return replace(
            self.base,
            arm=arm,
            lr=lr,
            seed=seed,
            gain_decay=chosen.gain_decay,
            model=chosen.apply(self.base.model),
        )


OnRunItem = Callable[[int, TrainConfig, Item], None]


def compare(
    config: CompareConfig,
    folder: Path,
    *,
    overwrite: bool = False,
    on_item: OnRunItem = lambda index, run, item: None,
) -> list[dict[str, Any]] | None:
    """Train the grid; each run in a folder of its own, and `summary.json` beside them.

    Args:
        on_item: called with the index of the run, its configuration, and each item that it logs.

    Returns:
        One record per run (`arm`, `lr`, `seed`, `final_loss`, `max_logit`, `entropy_nats`,
        `verdict`, ...), the numbers of the last line of its log; None if it was stopped.

    Raises:
        ValueError: bad input, or a folder that holds runs already.
    """
    runs = config.runs()
    if not overwrite:
        files.refuse_if_taken(folder, files.COMPARISON_FILES)
        for name, _ in runs:
            files.refuse_if_taken(folder / name, files.RUN_FILES)
    else:
        # Unreadable data must not cost the old runs.
        base = config.base
        data.load(base.data, vocab_size=base.model.vocab_size, context=base.context)
        files.remove_comparison(folder)
    summary = []
    for index, (name, run) in enumerate(runs):
        outcome = train(run, folder / name, overwrite=overwrite, on_item=partial(on_item, index, run))
        if outcome.final is None or (outcome.stopped and index + 1 < len(runs)):
            return None
        summary.append({key: outcome.final[key] for key in SUMMARY_KEYS})
    files.replace_json(folder / files.SUMMARY_FILE, summary)
    return summary


def sensitivities(summary: list[dict[str, Any]]) -> dict[str, float]:
    """LR sensitivity of each arm, mean over the seeds that have the paper's seven rates."""
    found = {}
    for arm in dict.fromkeys(record["arm"] for record in summary):
        values = []
        for seed in dict.fromkeys(record["seed"] for record in summary):
            runs = [r for r in summary if (r["arm"], r["seed"]) == (arm, seed)]
            losses = {r["lr"]: math.nan if r["final_loss"] is None else r["final_loss"] for r in runs}
            known = [r["initial_loss"] for r in runs if r["initial_loss"] is not None]
            initial = max(known, default=math.nan)
            value = lr_sensitivity(losses, initial)
            if value is not None:
                values.append(value)
        if values:
            found[arm] = statistics.fmean(values)
    return found

"""Train the same model on the same data and seeds with different variants of attention."""

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
        base: the configuration of all runs, apart from their arm, learning rate and seed.
        arms: names of variants, see `ARMS`.
        lrs: peak learning rates.
        seeds: seeds of weights and batches. Every arm is trained with every seed.

    Raises:
        ValueError: a list is empty or repeats a value, or an arm is unknown.
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
        """List the runs of the grid.

        Returns:
            The folder name and the configuration of each run. The arms of one learning rate and seed
            follow one another.
        """
        return [
            (f"{arm}-lr{lr!r}-seed{seed}", self.run(arm, lr, seed))
            for lr in self.lrs
            for seed in self.seeds
            for arm in self.arms
        ]

    def run(self, arm: str, lr: float, seed: int) -> TrainConfig:
        """Return the configuration of one run of the grid."""
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
    """Train all runs of a grid, and write `summary.json`.

    Args:
        config: the grid.
        folder: the folder of the comparison. Each run gets a folder inside it.
        overwrite: whether to delete the runs that the folder holds.
        on_item: called with the index of the run, its configuration, and each item that it logs.

    Returns:
        The last line of the log of each run, reduced to `SUMMARY_KEYS`; None if the comparison was
        stopped by a signal.

    Raises:
        ValueError: the input is not valid, or the folder already holds runs and `overwrite` is false.
    """
    runs = config.runs()
    if not overwrite:
        files.refuse_if_taken(folder, files.COMPARISON_FILES)
        for name, _ in runs:
            files.refuse_if_taken(folder / name, files.RUN_FILES)
    else:
        # Read the data before the old runs are deleted, since it may be unreadable.
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
    """Compute the LR sensitivity of each arm, see `lr_sensitivity`.

    Args:
        summary: the result of `compare`.

    Returns:
        The mean over seeds in nats, by arm. Seeds without all seven learning rates of the paper do not
        count, and an arm without such a seed is left out.
    """
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

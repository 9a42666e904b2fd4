"""Makes the corpus of `early_warning.py`: short runs of the lab, with and without QK-norm.

    python benchmarks/early_warning_corpus.py RUNS [--seeds N] [--more] [--pack]

Every pair of twins differs only in the norm. Runs that are complete in the folder RUNS are kept, so
the command can be stopped and started again; `--pack` writes what is there to the committed corpus.
`--more` makes the second corpus instead: a model of another size, and Muon in the place of AdamW. The
rules were fixed before it was made, so no part of it was used to choose them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qknorm.lab.arms import get_arm
from qknorm.lab.model import ModelConfig
from qknorm.lab.runs import Run, load_runs
from qknorm.lab.timeline import log_file
from qknorm.lab.trainer import TrainConfig, train
from qknorm.monitor import LayerRecord

CORPUS = Path(__file__).with_name("corpus") / "early_warning.jsonl.xz"
MORE = CORPUS.with_name("early_warning_more.jsonl.xz")
ARMS = ("none", "qk")
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SCHEDULES = ("cosine", "constant", "ramp")
STATISTICS = ("max_logit", "entropy_nats", "entropy_ratio")


def runs(seeds: int) -> Iterator[tuple[str, TrainConfig]]:
    """Name and configuration, seed by seed."""
    for seed in range(seeds):
        for schedule in SCHEDULES:
            for lr in RATES:
                for arm in ARMS:
                    model = get_arm(arm).apply(ModelConfig())
                    run = TrainConfig(model=model, arm=arm, schedule=schedule, lr=lr, seed=seed)
                    yield f"{schedule}-{lr:g}-{seed}-{arm}", run


def more_runs(seeds: int) -> Iterator[tuple[str, TrainConfig]]:
    """Name and configuration of the second corpus: deeper and narrower with AdamW, and with Muon."""
    deep = ModelConfig(layers=8, dim=64, heads=2)
    variants = {
        "deep": TrainConfig(model=deep),
        "muon": TrainConfig(optimizer="muon"),
        "deep-muon": TrainConfig(model=deep, optimizer="muon"),
    }
    for seed in range(seeds):
        for lr in (3e-3, 1e-2, 3e-2, 1e-1):
            for name, base in variants.items():
                for arm in ARMS:
                    model = get_arm(arm).apply(base.model)
                    run = replace(base, model=model, arm=arm, lr=lr, seed=seed)
                    yield f"{name}-{lr:g}-{seed}-{arm}", run


def complete(folder: Path) -> Run | None:
    """The run in a folder, if it is there and came to its end."""
    if log_file(folder) is None:
        return None
    (run,) = load_runs([folder])
    return run if run.final is not None else None


def digest(config: TrainConfig, run: Run) -> dict[str, Any]:
    """What the benchmark reads of a run: losses and gradient norms of all steps, statistics of some."""
    assert run.final is not None
    return {
        "arm": config.arm,
        "optimizer": config.optimizer,
        "layers": config.model.layers,
        "lr": config.lr,
        "schedule": config.schedule,
        "seed": config.seed,
        "steps": config.steps,
        "loss": [_short(line["loss"]) for line in run.steps],
        "grad_norm": [_short(line["grad_norm"]) for line in run.steps],
        "watched": [
            {"step": record.step}
            | {
                name: [[_short(v) for v in getattr(x, name)] for x in record.layers.values()]
                for name in STATISTICS
            }
            | {"bound": _bounds(list(record.layers.values()))}
            for record in run.records
        ],
        "final_loss": _short(run.final["final_loss"]),
        "diverged": run.final["diverged"],
    }


def _bounds(layers: list[LayerRecord]) -> Any:
    """The bound of each layer, in a list of its own; None without one."""
    bounds = [layer.bound for layer in layers]
    return [[_short(b)] for b in bounds] if None not in bounds else None


def _short(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pack", action="store_true", help="only write the corpus from what is there")
    parser.add_argument("--more", action="store_true", help="make the second corpus")
    args = parser.parse_args()
    corpus, found = (MORE if args.more else CORPUS), []
    for name, config in (more_runs if args.more else runs)(args.seeds):
        folder = args.runs / name
        if not args.pack and complete(folder) is None:
            train(config, folder, overwrite=True)
            print(name, flush=True)
        run = complete(folder)
        if run is not None:
            found.append(digest(config, run))
    corpus.parent.mkdir(exist_ok=True)
    with lzma.open(corpus, "wt") as file:
        file.writelines(json.dumps(run) + "\n" for run in found)
    print(f"{len(found)} runs in {corpus}, {corpus.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

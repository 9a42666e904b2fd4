"""Makes the corpus of `early_warning.py`: short runs of the lab, with and without QK-norm.

    python benchmarks/early_warning_corpus.py RUNS [--seeds N] [--pack]

Every pair of twins differs only in the norm. Runs that are complete in the folder RUNS are kept, so
the command can be stopped and started again; `--pack` writes what is there to the committed corpus.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qknorm.lab import log
from qknorm.lab.arms import get_arm
from qknorm.lab.files import METRICS_FILE
from qknorm.lab.model import ModelConfig
from qknorm.lab.trainer import TrainConfig, train

CORPUS = Path(__file__).with_name("corpus") / "early_warning.jsonl.xz"
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


def is_complete(folder: Path) -> bool:
    """Whether the run has its last line."""
    path = folder / METRICS_FILE
    return path.exists() and any(line["kind"] == "final" for line in log.read(path))


def digest(config: TrainConfig, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the benchmark reads of a run: losses and gradient norms of all steps, statistics of some."""
    steps = [line for line in lines if line["kind"] == "step"]
    final = next(line for line in lines if line["kind"] == "final")
    return {
        "arm": config.arm,
        "lr": config.lr,
        "schedule": config.schedule,
        "seed": config.seed,
        "steps": config.steps,
        "loss": [_short(line["loss"]) for line in steps],
        "grad_norm": [_short(line["grad_norm"]) for line in steps],
        "watched": [
            {"step": line["step"]}
            | {
                name: [[_short(v) for v in heads] for heads in line["layers"][name]]
                for name in STATISTICS
            }
            | {"bound": _bounds(line["layers"]["bound"])}
            for line in steps
            if "layers" in line
        ],
        "final_loss": _short(final["final_loss"]),
        "diverged": final["diverged"],
    }


def _bounds(bounds: Any) -> Any:
    return None if bounds is None else [None if h is None else [_short(v) for v in h] for h in bounds]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pack", action="store_true", help="only write the corpus from what is there")
    args = parser.parse_args()
    found = []
    for name, config in runs(args.seeds):
        folder = args.runs / name
        if not args.pack and not is_complete(folder):
            train(config, folder, overwrite=True)
            print(name, flush=True)
        if is_complete(folder):
            found.append(digest(config, log.read(folder / METRICS_FILE)))
    CORPUS.parent.mkdir(exist_ok=True)
    with lzma.open(CORPUS, "wt") as file:
        file.writelines(json.dumps(run) + "\n" for run in found)
    print(f"{len(found)} runs in {CORPUS}, {CORPUS.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

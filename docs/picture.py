"""Draw docs/demo.svg, the picture of the README, from the logs of `make demo`.

make demo && .venv/bin/python docs/picture.py        (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from qknorm.lab.figures import COLOURS
from qknorm.lab.runs import find_runs, load_runs

LABELS = {"none": "without QK-norm", "qk": "with QK-norm"}


def main() -> None:
    plt.rcParams |= {"font.size": 10, "svg.hashsalt": "qknorm", "axes.spines.top": False}
    plt.rcParams["axes.spines.right"] = False
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.9), constrained_layout=True)
    runs = load_runs(find_runs([Path("runs/demo")]))
    for run, colour in zip(runs, COLOURS, strict=False):
        label = LABELS[run.config["arm"]]
        steps = [record.step for record in run.records]
        axes[0].plot(steps, [r.max_logit for r in run.records], color=colour, label=label)
        bounds = [[layer.bound for layer in r.layers.values()] for r in run.records]
        if None not in bounds[0]:
            axes[0].plot(steps, list(map(max, bounds)), color=colour, linestyle=":", label="its bound")
        axes[1].plot(steps, [r.entropy_nats for r in run.records], color=colour)
        loss = {line["step"]: line["loss"] for line in run.steps}
        axes[2].plot(steps, [loss[step] for step in steps], color=colour)
    axes[0].set_yscale("log")
    for axis, title in zip(
        axes,
        (
            "largest attention logit",
            "entropy of the sharpest layer, nats",
            "training loss, nats per byte",
        ),
        strict=True,
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(color="#eeeeee")
    axes[0].legend(frameon=False, fontsize=8.5)
    figure.patch.set_facecolor("white")
    figure.savefig("docs/demo.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

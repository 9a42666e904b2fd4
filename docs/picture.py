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
        steps = [r["step"] for r in run.watched]
        axes[0].plot(steps, [r["max_logit"] for r in run.watched], color=colour, label=label)
        if run.watched[0]["layers"]["bound"] is not None:
            bound = [max(map(max, r["layers"]["bound"])) for r in run.watched]
            axes[0].plot(steps, bound, color=colour, linestyle=":", label="its bound")
        axes[1].plot(steps, [r["entropy_nats"] for r in run.watched], color=colour)
        axes[2].plot(steps, [r["loss"] for r in run.watched], color=colour)
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

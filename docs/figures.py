"""Draw the figures of the explanations, docs/figures/*.svg.

.venv/bin/python docs/figures.py            draws them (needs the group `docs`)
.venv/bin/python docs/figures.py --check    fails if one would look different

`rates` and `limits` show the tables of docs/measurements.md; `growth` is computed here, untrained.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import matplotlib
import torch

import qknorm

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
WITHOUT, WITH = (
    {"color": "#c0392b", "label": "without QK-norm"},
    {"color": "#2471a3", "label": "with QK-norm"},
)


def table(first_cell: str) -> list[list[list[float]]]:
    """The numbers in each cell of the table whose header starts with a cell, row by row."""
    lines = (DOCS / "measurements.md").read_text().splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(first_cell))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = line.replace("*", "").strip("|").split("|")
        # Thousands are set apart by a space.
        cells = [re.sub(r"(?<=\d) (?=\d{3}\b)", "", cell) for cell in cells]
        rows.append([[float(x) for x in re.findall(r"\d[\d.]*(?:e-?\d+)?", cell)] for cell in cells])
    return rows


def rates() -> Figure:
    """Loss, logit and entropy over the learning rate."""
    rows = table("| peak learning rate | without QK-norm: loss")
    figure, axes = panels(
        "held-out loss, nats per byte", "largest logit", "entropy of the sharpest layer, nats"
    )
    for i, axis in enumerate(axes):
        for column, style in ((1, WITHOUT), (2, WITH)):
            axis.plot([row[0][0] for row in rows], [row[column][i] for row in rows], marker="o", **style)
        axis.set_xscale("log")
        axis.set_xlabel("peak learning rate")
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False)
    return figure


def growth() -> Figure:
    """What a factor on W_q and W_k does to one attention with random weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 256, 128, generator=generator, dtype=torch.float64)
    w_q, w_k = torch.randn(2, 4, 128, 32, generator=generator, dtype=torch.float64) / 128**0.5
    gain = torch.ones(4, 32, dtype=torch.float64)
    factors = [2 ** (i / 2) for i in range(9)]
    figure, axes = panels(
        "largest logit", "entropy of the softmax, nats", "sensitivity, mean of 1 - sum(p^2)"
    )
    for gains, style in (({}, WITHOUT), ({"q_gain": gain, "k_gain": gain}, WITH)):
        logit, entropy, sensitivity = [], [], []
        for factor in factors:
            q, k = x @ w_q * factor, x @ w_k * factor
            # With the identity as values the output is the weights themselves.
            values = torch.eye(256, dtype=torch.float64).expand(1, 4, 256, 256)
            weights, stats = qknorm.attention(q, k, values, **gains, stats=True, backend="reference")
            logit.append(float(stats.max_logit.max()))
            entropy.append(float(stats.entropy_nats.mean()))
            sensitivity.append(float((1 - weights.square().sum(-1)).mean()))
        for axis, values in zip(axes, (logit, entropy, sensitivity), strict=True):
            axis.plot(factors, values, marker="o", **style)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("factor on W_q and W_k")
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    return figure


def limits() -> Figure:
    """What the norm does not do: little at tuned rates, and no bound on its own gains."""
    figure, (left, right) = panels(
        "loss without minus loss with, nats per byte", "largest logit with QK-norm"
    )
    for place, row in enumerate(table("| peak learning rate | seed")):
        left.scatter([place] * len(row[4]), row[4], color=WITH["color"])
    left.set_xticks([0, 1], ["peak rate 1e-3", "peak rate 3e-3"])
    left.set_xlim(-0.5, 1.5)
    left.set_ylim(0, 0.1)
    rows = table("| peak learning rate | without QK-norm: loss")
    right.plot([row[0][0] for row in rows], [row[2][1] for row in rows], marker="o", color=WITH["color"])
    right.axhline(50, color="#888888", linestyle=":")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("peak learning rate")
    return figure


def panels(*titles: str) -> tuple[Figure, list[Axes]]:
    """A row of axes that look alike."""
    plt.rcParams |= {
        "font.size": 10,
        "svg.hashsalt": "qknorm",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
    }
    figure, axes = plt.subplots(
        1, len(titles), figsize=(3.6 * len(titles), 3.0), constrained_layout=True
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(color="#eeeeee")
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def main() -> None:
    changed = []
    for draw in (rates, growth, limits):
        text = io.StringIO()
        figure = draw()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
        plt.close(figure)
        path = DOCS / "figures" / f"{draw.__name__}.svg"
        drawn = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
        if "--check" not in sys.argv[1:]:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            changed.append(path.name)
    if changed:
        sys.exit(f"{', '.join(changed)} would look different: run docs/figures.py, and look.")


if __name__ == "__main__":
    main()

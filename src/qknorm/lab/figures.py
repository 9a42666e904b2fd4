"""The plots of a report, as plain plotly JSON; the page draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from qknorm.lab.runs import Run

# Okabe-Ito, told apart by every kind of colour vision; black is left to the text.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#666666")


def figures(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Title, caption, element id, css class and JSON of each plot."""
    plots = [
        _plot(
            "loss",
            "Loss",
            "Training loss, nats per token; thin: every step, thick: smoothed.",
            _loss(runs),
        ),
        _plot(
            "max-logit",
            "Largest attention logit",
            "Over all layers and heads, log axis. Dotted: what the gains allow at most.",
            _scalar(runs, "max_logit", log=True),
        ),
        _plot(
            "entropy",
            "Entropy of the sharpest layer",
            "Mean over heads and rows, nats, lowest layer. Near 0 the softmax is one-hot.",
            _scalar(runs, "entropy_nats"),
        ),
        _plot("grad-norm", "Gradient norm", "Before clipping, log axis.", _grad_norm(runs)),
    ]
    ends = [run.final or run.watched[-1] for run in runs if run.final or run.watched]
    for i, run in enumerate(runs):
        if run.final or run.watched:
            plots += _heatmaps(i, run, [end["layers"] for end in ends])
    return plots


def _plot(name: str, title: str, caption: str, figure: dict[str, Any]) -> dict[str, str]:
    # "</" inside a script element would end it.
    text = json.dumps({k: figure[k] for k in ("data", "layout")}).replace("</", "<\\/")
    return {"id": name, "title": title, "caption": caption, "json": text, "kind": figure["kind"]}


def _layout(ytitle: str, *, log: bool = False) -> dict[str, Any]:
    return {
        "margin": {"l": 56, "r": 12, "t": 8, "b": 40},
        "height": 300,
        "xaxis": {"title": {"text": "step"}, "gridcolor": "#eee", "zeroline": False},
        "yaxis": {
            "title": {"text": ytitle},
            "type": "log" if log else "linear",
            "gridcolor": "#eee",
            "zeroline": False,
            "exponentformat": "power",
        },
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "hovermode": "x unified",
    }


def _line(name: str, x: list[Any], y: list[Any], colour: str, **line: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 2} | line,
    }


def _smooth(values: list[float | None], share: float = 0.9) -> list[float | None]:
    """Exponential mean without the bias of its start."""
    total = weight = 0.0
    smoothed: list[float | None] = []
    for value in values:
        if value is not None:
            total = share * total + (1 - share) * value
            weight = share * weight + (1 - share)
        smoothed.append(total / weight if weight else None)
    return smoothed


def _loss(runs: Sequence[Run]) -> dict[str, Any]:
    data = []
    for run, colour in _coloured(runs):
        x, y = [r["step"] for r in run.steps], [r["loss"] for r in run.steps]
        data.append(
            _line(run.title, x, y, colour, width=1)
            | {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
        )
        data.append(_line(run.title, x, _smooth(y), colour))
    return {"data": data, "layout": _layout("nats per token"), "kind": "curve"}


def _scalar(runs: Sequence[Run], key: str, *, log: bool = False) -> dict[str, Any]:
    data = []
    for run, colour in _coloured(runs):
        x = [r["step"] for r in run.watched]
        data.append(_line(run.title, x, [r[key] for r in run.watched], colour))
        bounds = [r["layers"]["bound"] for r in run.watched]
        if key == "max_logit" and bounds and all(bounds):
            top = [max(map(max, bound)) for bound in bounds]
            data.append(_line(f"{run.title}, bound", x, top, colour, width=1.5, dash="dot"))
    unit = "nats" if key == "entropy_nats" else "logit"
    return {"data": data, "layout": _layout(unit, log=log), "kind": "curve"}


def _grad_norm(runs: Sequence[Run]) -> dict[str, Any]:
    data = [
        _line(
            run.title,
            [r["step"] for r in run.steps],
            [r["grad_norm"] for r in run.steps],
            colour,
            width=1,
        )
        for run, colour in _coloured(runs)
    ]
    return {"data": data, "layout": _layout("norm", log=True), "kind": "curve"}


def _heatmaps(index: int, run: Run, every: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Layer x head at the end: largest logit and entropy, on one colour scale for all runs."""
    when = "held-out text, end of the run" if run.final else f"step {run.watched[-1]['step']}"
    layers = (run.final or run.watched[-1])["layers"]
    logits = [math.log10(max(x, 1.0)) for end in every for x in _numbers(end["max_logit"])]
    entropies = [x for end in every for x in _numbers(end["entropy_nats"])]
    logit_colour = [
        [None if x is None else math.log10(max(x, 1.0)) for x in row] for row in layers["max_logit"]
    ]
    return [
        _plot(
            f"heat-{index}-max-logit",
            f"Largest logit: {run.title}",
            f"Layer x head, {when}. Colour by magnitude, the same for all runs.",
            _heatmap(layers["max_logit"], logit_colour, ("#fff7ee", "#d55e00"), max(logits, default=1)),
        ),
        _plot(
            f"heat-{index}-entropy",
            f"Entropy, nats: {run.title}",
            f"Layer x head, {when}. Dark is sharp, the same for all runs.",
            _heatmap(
                layers["entropy_nats"],
                layers["entropy_nats"],
                ("#0072b2", "#f2f8fc"),
                max(entropies, default=1),
            ),
        ),
    ]


def _numbers(table: list[list[float | None]]) -> list[float]:
    return [x for row in table for x in row if x is not None]


def _heatmap(
    values: list[list[float | None]],
    colour_values: list[list[float | None]],
    ends: tuple[str, str],
    top: float,
) -> dict[str, Any]:
    layout = _layout("layer")
    heads, depth = len(values[0]), len(values)
    layout |= {"height": 90 + 34 * min(depth, 16), "hovermode": "closest"}
    layout["xaxis"] = {"title": {"text": "head"}, "dtick": 1 if heads <= 16 else 8}
    layout["yaxis"] = {
        "title": {"text": "layer"},
        "autorange": "reversed",
        "dtick": 1 if depth <= 16 else 8,
    }
    text = [
        ["-" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.2f}" for x in row] for row in values
    ]
    data = {
        "type": "heatmap",
        "z": colour_values,
        "text": text,
        "zmin": 0,
        "zmax": top or 1,
        "colorscale": [[0, ends[0]], [1, ends[1]]],
        "texttemplate": "%{text}" if heads <= 16 else "",
        "xgap": 2,
        "ygap": 2,
        "showscale": False,
        "hovertemplate": "layer %{y}, head %{x}: %{text}<extra></extra>",
    }
    return {"data": [data], "layout": layout, "kind": "heat"}


def _coloured(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]

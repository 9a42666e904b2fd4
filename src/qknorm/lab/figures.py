"""Make the plots of a report as plotly JSON, which the page draws in the browser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from qknorm.lab import heatmaps
from qknorm.lab.plot import finite, layout, plot, shown
from qknorm.lab.runs import Run

# The Okabe-Ito colours, which people with any colour vision can distinguish. Black is used for text.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#666666")


def figures(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Make all plots of a report.

    Args:
        runs: the runs.

    Returns:
        A dictionary for each plot with its title, caption, element id, kind and JSON.
    """
    plots = []
    trained = [run for run in runs if run.steps]
    if trained:
        plots.append(
            plot(
                "curve",
                "loss",
                "Loss",
                "Training loss in nats per token. The thin line shows every step, the thick line is "
                "smoothed.",
                _loss(trained),
            )
        )
    plots += [
        plot(
            "curve",
            "max-logit",
            "Largest attention logit",
            "The largest logit of all layers and heads, on a log axis. The dotted line is the bound "
            "that the gains imply. The band shows when the first growth alert expected a head to reach "
            "the level of a warning. Marks are alerts.",
            _max_logit(runs),
        ),
        plot(
            "curve",
            "entropy",
            "Entropy of the sharpest layer",
            "The entropy of the layer with the lowest mean over heads and rows, in nats. Near 0 the "
            "softmax is one-hot.",
            _entropy(runs),
        ),
    ]
    if trained:
        plots.append(
            plot(
                "curve",
                "grad-norm",
                "Gradient norm",
                "The gradient norm before clipping, on a log axis.",
                _grad_norm(trained),
            )
        )
    watched = [(i, run) for i, run in enumerate(runs) if run.end is not None]
    highest = max(
        (r.max_logit for run in runs for r in run.records if math.isfinite(r.max_logit)), default=1.0
    )
    for i, run in watched:
        plots += heatmaps.over_time(i, run, highest)
    for i, run in watched:
        plots += heatmaps.at_the_end(i, run, [end for other in runs if (end := other.end) is not None])
    return [made | {"json": _json(made["figure"])} for made in plots]


def _json(figure: dict[str, Any]) -> str:
    # "</" would end the script element that holds the JSON.
    return json.dumps(figure, allow_nan=False).replace("</", "<\\/")


def _line(name: str, x: list[Any], y: list[Any], colour: str, **line: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": shown(name),
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 2} | line,
    }


def _smooth(values: list[float | None], share: float = 0.9) -> list[float | None]:
    """Return the exponential moving average, with the correction for its start that Adam also uses."""
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
        x, y = [r["step"] for r in run.steps], [finite(r.get("loss")) for r in run.steps]
        data.append(
            _line(run.title, x, y, colour, width=1)
            | {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
        )
        data.append(_line(run.title, x, _smooth(y), colour))
    return {"data": data, "layout": layout("nats per token")}


def _max_logit(runs: Sequence[Run]) -> dict[str, Any]:
    data = []
    for run, colour in _coloured(runs):
        x = [record.step for record in run.records]
        data.append(_line(run.title, x, [finite(r.max_logit) for r in run.records], colour))
        bounds = [[layer.bound for layer in r.layers.values()] for r in run.records]
        if bounds and all(b is not None for bound in bounds for b in bound):
            top = [finite(max(b for b in bound if b is not None)) for bound in bounds]
            data.append(_line(f"{run.title}, bound", x, top, colour, width=1.5, dash="dot"))
        data += _forecast(run, colour) + _alert_marks(run, colour)
    return {"data": data, "layout": layout("logit", log=True)}


def _forecast(run: Run, colour: str) -> list[dict[str, Any]]:
    """Return a triangle from the logit at the first growth alert to the earliest and latest forecast."""
    alert = next((a for a in run.alerts if a.code == "QM002"), None)
    if alert is None:
        return []
    start, seen = alert.step, alert.evidence["max_logit"]
    early, late, level = (alert.evidence[name] for name in ("early", "late", "level"))
    return [
        {
            "type": "scatter",
            "mode": "none",
            "name": shown(f"{run.title}, forecast at step {start}"),
            "x": [start, early, late, start],
            "y": [seen, level, level, seen],
            "fill": "toself",
            "fillcolor": colour,
            "opacity": 0.25,
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


SYMBOLS: dict[str, str] = {"info": "circle-open", "warning": "triangle-up", "alarm": "x"}


def _alert_marks(run: Run, colour: str) -> list[dict[str, Any]]:
    """Return a mark on the curve for each record with a warning or an alarm."""
    height = {record.step: finite(record.max_logit) for record in run.records}
    said: dict[tuple[int, str], list[str]] = {}
    for alert in run.alerts:
        if alert.severity != "info":
            said.setdefault((alert.step, alert.severity), []).append(
                shown(f"{alert.code} {alert.message}")
            )
    marks = []
    for severity in ("warning", "alarm"):
        points = [(step, texts) for (step, kind), texts in said.items() if kind == severity]
        if points:
            marks.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": shown(f"{run.title}, {severity}"),
                    "x": [step for step, _ in points],
                    "y": [height.get(step) for step, _ in points],
                    "text": [
                        "<br>".join(t[:4] + [f"and {len(t) - 4} more"] * (len(t) > 4)) for _, t in points
                    ],
                    "hovertemplate": "step %{x}: %{text}<extra></extra>",
                    "marker": {"color": colour, "size": 10, "symbol": SYMBOLS[severity]},
                    "showlegend": False,
                }
            )
    return marks


def _entropy(runs: Sequence[Run]) -> dict[str, Any]:
    data = []
    for run, colour in _coloured(runs):
        x = [record.step for record in run.records]
        data.append(_line(run.title, x, [finite(r.entropy_nats) for r in run.records], colour))
    return {"data": data, "layout": layout("nats")}


def _grad_norm(runs: Sequence[Run]) -> dict[str, Any]:
    data = [
        _line(
            run.title,
            [r["step"] for r in run.steps],
            [finite(r.get("grad_norm")) for r in run.steps],
            colour,
            width=1,
        )
        for run, colour in _coloured(runs)
    ]
    return {"data": data, "layout": layout("norm", log=True)}


def _coloured(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]

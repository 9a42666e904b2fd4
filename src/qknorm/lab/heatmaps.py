"""Make heatmaps of the heads of a run: at its end, and over its steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from qknorm.lab.plot import finite, layout, plot, shown
from qknorm.lab.runs import Run
from qknorm.monitor.record import LayerRecord, Record

WARM, COLD = ("#fff7ee", "#d55e00"), ("#0072b2", "#f2f8fc")
MOST_ROWS = 64  # in a model with more heads, a row of the heatmap over time is a layer
MOST_COLUMNS = 300


def at_the_end(index: int, run: Run, ends: Sequence[Record]) -> list[dict[str, Any]]:
    """Make heatmaps of the largest logit and the entropy by layer and head.

    Args:
        index: number of the run, for the element ids.
        run: the run.
        ends: the last records of all runs, which share one colour scale.

    Returns:
        Two plots.
    """
    record = run.end
    assert record is not None
    when = "on held-out text at the end" if record.phase == "eval" else f"at step {record.step}"
    logits = [v for end in ends for layer in end.layers.values() for v in map(_log, layer.max_logit)]
    entropies = [v for end in ends for layer in end.layers.values() for v in layer.entropy_nats]
    tops = [[finite(v) for v in layer.max_logit] for layer in record.layers.values()]
    nats = [[finite(v) for v in layer.entropy_nats] for layer in record.layers.values()]
    names = [shown(name) for name in short_names(list(record.layers))]
    return [
        plot(
            "heat",
            f"heat-{index}-max-logit",
            f"Largest logit: {run.title}",
            f"By layer and head, {when}. Colour is the magnitude, with one scale for all runs.",
            _table(names, tops, [[_log(v) for v in row] for row in tops], WARM, _top(logits)),
        ),
        plot(
            "heat",
            f"heat-{index}-entropy",
            f"Entropy, nats: {run.title}",
            f"By layer and head, {when}. Dark is a low entropy, with one scale for all runs.",
            _table(names, nats, nats, COLD, _top(entropies)),
        ),
    ]


def over_time(index: int, run: Run, highest: float) -> list[dict[str, Any]]:
    """Make heatmaps of the largest logit and the entropy by head and step.

    A model with many heads gets one row for each layer, with the extreme value of its heads.

    Args:
        index: number of the run, for the element ids.
        run: the run.
        highest: the logit at the end of the colour scale.

    Returns:
        Two plots; none if the run has fewer than two records.
    """
    each = math.ceil(len(run.records) / MOST_COLUMNS) or 1
    records = run.records
    if len(records) < 2:
        return []
    names = list(dict.fromkeys(name for record in records for name in record.layers))
    heads = {n: max(len(r.layers[n].max_logit) for r in records if n in r.layers) for n in names}
    short = dict(zip(names, map(shown, short_names(names)), strict=True))
    if sum(heads.values()) <= MOST_ROWS:
        rows: list[tuple[str, int | None]] = [(n, head) for n in names for head in range(heads[n])]
        what = "Layer.head"
    else:
        rows, what = [(name, None) for name in names], "Layer (its extreme head)"
    labels = [short[name] if head is None else f"{short[name]}.{head}" for name, head in rows]
    steps = [record.step for record in records[::each]]

    def over_steps(name: str, extreme: Any) -> list[list[float | None]]:
        """Return the extreme value of all records in a column, so that no spike is lost."""
        table = []
        for path, head in rows:
            values = [_of(record.layers.get(path), name, head, extreme) for record in records]
            groups = [values[i : i + each] for i in range(0, len(values), each)]
            table.append([extreme(found) if (found := _known(group)) else None for group in groups])
        return table

    tops, ratios = over_steps("max_logit", max), over_steps("entropy_ratio", min)
    return [
        plot(
            "time",
            f"time-{index}-max-logit",
            f"Largest logit over time: {run.title}",
            f"{what} by step. Colour is the magnitude, with one scale for all runs.",
            _grid(labels, steps, tops, [[_log(v) for v in row] for row in tops], WARM, _log(highest)),
        ),
        plot(
            "time",
            f"time-{index}-entropy",
            f"Entropy over time: {run.title}",
            f"{what} by step, as a share of ln(visible keys). Dark is a low entropy.",
            _grid(labels, steps, ratios, ratios, COLD, 1.0),
        ),
    ]


def short_names(paths: Sequence[str]) -> list[str]:
    """Return module paths without their common start and end, such as "3" for "model.layers.3.attn"."""
    if len(set(paths)) < 2:
        return [re.sub(r"^.*\.", "", path) for path in paths]
    parts = [path.split(".") for path in paths]
    shortest = min(map(len, parts))
    head = next(i for i in range(shortest + 1) if i == shortest or len({p[i] for p in parts}) > 1)
    rest = [p[head:] for p in parts]
    shortest = min(map(len, rest))
    tail = next(
        i for i in range(shortest + 1) if i >= shortest or len({p[len(p) - 1 - i] for p in rest}) > 1
    )
    return [".".join(p[: len(p) - tail]) or paths[i] for i, p in enumerate(rest)]


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _of(layer: LayerRecord | None, name: str, head: int | None, extreme: Any) -> float | None:
    values = [] if layer is None else getattr(layer, name)
    if head is not None:
        return finite(values[head]) if head < len(values) else None
    known = [v for v in values if math.isfinite(v)]
    return extreme(known) if known else None


def _log(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else math.log10(max(value, 1.0))


def _top(values: Sequence[float | None]) -> float:
    return max((v for v in values if v is not None and math.isfinite(v)), default=1.0)


def _heatmap(colour: Any, ends: tuple[str, str], top: float | None, **other: Any) -> dict[str, Any]:
    data = {
        "type": "heatmap",
        "z": colour,
        "zmin": 0,
        "zmax": top or max(1.0, _top([v for row in colour for v in row])),
        "colorscale": [[0, ends[0]], [1, ends[1]]],
        "showscale": False,
    }
    return data | other


def _words(values: Sequence[Sequence[float | None]]) -> list[list[str]]:
    return [["-" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.2f}" for x in r] for r in values]


def _table(
    names: Sequence[str],
    values: list[list[float | None]],
    colour: list[list[float | None]],
    ends: tuple[str, str],
    top: float,
) -> dict[str, Any]:
    """Return a heatmap by layer and head, with numbers in the cells if there are at most 16 heads."""
    heads, depth = max(map(len, values)), len(values)
    look = layout("layer") | {"height": 90 + 34 * min(depth, 16), "hovermode": "closest"}
    look["xaxis"] = {"title": {"text": "head"}, "dtick": 1 if heads <= 16 else 8}
    look["yaxis"] = {
        "title": {"text": "layer"},
        "autorange": "reversed",
        "dtick": 1 if depth <= 16 else 8,
    }
    data = _heatmap(
        colour,
        ends,
        top,
        text=_words(values),
        customdata=[[name] * heads for name in names],
        texttemplate="%{text}" if heads <= 16 else "",
        xgap=2,
        ygap=2,
        hovertemplate="layer %{customdata}, head %{x}: %{text}<extra></extra>",
    )
    return {"data": [data], "layout": look}


def _grid(
    labels: Sequence[str],
    steps: Sequence[int],
    values: list[list[float | None]],
    colour: list[list[float | None]],
    ends: tuple[str, str],
    top: float | None,
) -> dict[str, Any]:
    """Return a heatmap with a row for each label and a column for each step."""
    rows = len(labels)
    look = layout("") | {"height": 90 + max(120, min(9 * rows, 520)), "hovermode": "closest"}
    look["xaxis"] = {"title": {"text": "step"}}
    each = math.ceil(rows / 24)
    look["yaxis"] = {
        "autorange": "reversed",
        "tickmode": "array",
        "tickvals": list(range(0, rows, each)),
        "ticktext": [labels[i] for i in range(0, rows, each)],
    }
    data = _heatmap(
        colour,
        ends,
        top,
        x=list(steps),
        text=_words(values),
        customdata=[[label] * len(steps) for label in labels],
        hovertemplate="%{customdata}, step %{x}: %{text}<extra></extra>",
    )
    return {"data": [data], "layout": look}

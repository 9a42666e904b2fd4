"""Parts that all plots share: their layout, their texts, and values that can be drawn."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from qknorm.lab.printable import printable


def plot(kind: str, name: str, title: str, caption: str, figure: dict[str, Any]) -> dict[str, Any]:
    """Describe a plot for the template of the page.

    Args:
        kind: the CSS class of the plot.
        name: the id of its element.
        title: the title.
        caption: the sentence below the title.
        figure: data and layout for plotly.

    Returns:
        The description.
    """
    return {"id": name, "title": title, "caption": caption, "figure": figure, "kind": kind}


def shown(name: str) -> str:
    """Escape a name for plotly, which would take tags in it for markup."""
    return escape(printable(name), quote=False)


def finite(value: float | None) -> float | None:
    """Return a number if it can be drawn, and None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def layout(ytitle: str, *, log: bool = False) -> dict[str, Any]:
    """Return the plotly layout of a curve over steps, with a linear or logarithmic y axis."""
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

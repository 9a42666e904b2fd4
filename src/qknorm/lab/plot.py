"""What all plots share: how they look, where they go on the page, and what cannot be drawn."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from qknorm.lab.printable import printable


def plot(kind: str, name: str, title: str, caption: str, figure: dict[str, Any]) -> dict[str, Any]:
    """A figure with its place on the page, element id, and words."""
    return {"id": name, "title": title, "caption": caption, "figure": figure, "kind": kind}


def shown(name: str) -> str:
    """A name as plotly shows it to the letter, which takes tags in it for markup otherwise."""
    return escape(printable(name), quote=False)


def finite(value: float | None) -> float | None:
    """A number that can be drawn, or None."""
    return value if value is not None and math.isfinite(value) else None


def layout(ytitle: str, *, log: bool = False) -> dict[str, Any]:
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

"""How all plots look."""

from __future__ import annotations

from typing import Any


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

"""A record as a table, one line per layer: for a terminal and for a notebook."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qknorm.monitor.record import LayerRecord, Record

TITLES = ("layer", "max logit", "head", "bound", "entropy nats", "entropy ratio", "rms of q", "rms of k")


def title(record: Record) -> str:
    """What the record is of, in one line."""
    phase = "" if record.phase == "train" else f" ({record.phase})"
    if not record.layers:
        return f"step {record.step}{phase}: no attention was seen"
    return (
        f"step {record.step}{phase}: largest logit {_number(record.max_logit)}, "
        f"lowest layer entropy {_number(record.entropy_nats)} nats"
    )


def rows(record: Record) -> list[tuple[str, ...]]:
    """The cells of each layer, under TITLES. Means are over heads, the head is that of the max logit."""
    return [(name or "the model itself", *_cells(layer)) for name, layer in record.layers.items()]


def notes(record: Record) -> list[str]:
    """What is missing, and why."""
    found = [f"{name}: {layer.note}" for name, layer in record.layers.items() if layer.note is not None]
    return found + [f"{name}: nothing was seen, {why}" for name, why in record.silent.items()]


def text(record: Record) -> str:
    """The table in plain characters."""
    lines = [title(record)]
    if record.layers:
        table = [TITLES, *rows(record)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for first, *rest in table:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join((first.ljust(widths[0]), *cells)))
    return "\n".join(lines + notes(record))


def as_html(record: Record) -> str:
    """The table for a notebook."""

    def row(kind: str, cells: tuple[str, ...]) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    body = "".join(row("td", cells) for cells in rows(record))
    lines = "".join(f"<div>{html.escape(line)}</div>" for line in notes(record))
    table = f"<table><thead>{row('th', TITLES)}</thead><tbody>{body}</tbody></table>" if body else ""
    return f"<div>{html.escape(title(record))}</div>{table}{lines}"


def _cells(layer: LayerRecord) -> tuple[str, ...]:
    return (
        _number(layer.top),
        str(layer.worst_head),
        "-" if layer.bound is None else _number(layer.bound),
        _number(layer.mean("entropy_nats")),
        _number(layer.mean("entropy_ratio")),
        *(_number(math.fsum(values) / len(values)) for values in (layer.q_rms, layer.k_rms)),
    )


def _number(value: float) -> str:
    return f"{value:.4g}"

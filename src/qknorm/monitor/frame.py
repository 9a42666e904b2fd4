"""A log as a data frame of pandas, a row for each head of each layer of each record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qknorm.monitor.record import LayerRecord
from qknorm.monitor.to.jsonl import RANK_FILES, read_lines, to_record

if TYPE_CHECKING:
    import pandas

# Statistics of each query head.
OF_HEADS = ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass", "first_mass", "q_rms", "q_rms_cv")
# Of each key head, of which several query heads may share one.
OF_KEY_HEADS = ("k_rms", "k_rms_cv")
COLUMNS = ["step", "phase", "layer", "head", *OF_HEADS, *OF_KEY_HEADS, "bound", "is_normed", "rows"]


def read_frame(path: str | os.PathLike[str]) -> pandas.DataFrame:
    """What a log says of every head, in the order in which it was written.

    Columns: `step`, `phase`, `layer`, `head` as alerts name them, the statistics of `LayerRecord`, and
    for the layer `bound`, `is_normed` and `rows`. What was not measured is NaN.

        read_frame("runs/mine").query("layer == 'blocks.0.attn'").pivot(
            index="step", columns="head", values="max_logit"
        ).plot()

    Args:
        path: of a file of JSON lines, or of the folder that holds it.

    Raises:
        FileNotFoundError: there is no log.
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("this needs an extra: pip install 'qknorm[pandas]'") from error
    return pandas.DataFrame(list(read_rows(path)), columns=COLUMNS)


def read_rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of `read_frame` as dictionaries, which need no pandas; None for what was not measured."""
    for line in read_lines(_file(Path(path))):
        if line["kind"] == "record":
            record = to_record(line)
            for name, layer in record.layers.items():
                for row in _rows(layer):
                    yield {"step": record.step, "phase": record.phase, "layer": name} | row


def _rows(layer: LayerRecord) -> list[dict[str, Any]]:
    heads, kv_heads = len(layer.max_logit), max(1, len(layer.k_rms))
    of_layer = {"bound": layer.bound, "is_normed": layer.is_normed, "rows": layer.rows}
    rows = []
    for head in range(heads):
        key_head = head * kv_heads // heads
        values = {name: getattr(layer, name) for name in OF_HEADS}
        row = {name: None if value is None else value[head] for name, value in values.items()}
        row |= {name: getattr(layer, name)[key_head] for name in OF_KEY_HEADS}
        rows.append({"head": head} | row | of_layer)
    return rows


def _file(path: Path) -> Path:
    """The log in a folder: all ranks write the same records, so that of any rank will do."""
    if not path.is_dir():
        return path
    found = min(path.glob(RANK_FILES), default=path / "metrics.jsonl")
    if not found.is_file():
        raise FileNotFoundError(f"{path} holds no log: no {RANK_FILES} and no metrics.jsonl")
    return found

"""Describe and compare runs of other trainers that the monitor watched."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qknorm.lab.runs import Run
from qknorm.monitor.record import Record


def sentences(runs: Sequence[Run]) -> list[str]:
    """Describe each run by its largest logit, and compare it with the first run.

    Args:
        runs: the runs.

    Returns:
        The sentences. Two runs are compared at the last step that both observed.
    """
    found = [_alone(run) for run in runs]
    watched = [run for run in runs if run.records]
    for run in watched[1:]:
        both = _last_common(watched[0], run)
        if both is None:
            found.append(f"{watched[0].title} and {run.title} have no observed step in common.")
        else:
            found.append(_against(watched[0], run, *both))
    return found


def _alone(run: Run) -> str:
    end = "ended" if run.has_ended else "did not report its end; its newest step is"
    when = f"{end} at step {run.step}" if run.has_ended else f"{end} {run.step}"
    if not run.records:
        loss = "" if run.loss is None else f" Its last training loss is {run.loss:.3f}."
        return f"{run.title} {when}.{loss} Nothing is known of its attention."
    top = max(run.records, key=lambda record: _order(record.max_logit))
    name, layer = max(top.layers.items(), key=lambda item: _order(item[1].top))
    # Scalars of the whole model do not tell the layer.
    where = f" in layer {name}, head {layer.worst_head}," if layer.rows else ""
    largest = f"{_number(top.max_logit)}{',' if where else ''}"
    return f"{run.title} {when}. Its largest logit was {largest}{where} at step {top.step}."


def _last_common(a: Run, b: Run) -> tuple[Record, Record] | None:
    ours, theirs = ({record.step: record for record in run.records} for run in (a, b))
    step = max(ours.keys() & theirs.keys(), default=None)
    return None if step is None else (ours[step], theirs[step])


def _against(a: Run, b: Run, ours: Record, theirs: Record) -> str:
    """Return sentences that compare two runs at one step."""
    x, y = ours.max_logit, theirs.max_logit
    if 0 < x < math.inf and 0 < y < math.inf and not 1 / 1.5 < y / x < 1.5:
        factor = max(x / y, y / x)
        size = f"{factor:,.{int(factor < 10)}f} times as {'large' if y > x else 'small'} as"
    else:
        size = "of the same order as"
    losses = [
        next((line["loss"] for line in run.steps if line["step"] == ours.step and "loss" in line), None)
        for run in (a, b)
    ]
    loss = "" if None in losses else f" Their losses there are {losses[1]:.3f} and {losses[0]:.3f}."
    entropy = (
        ""
        if math.isnan(ours.entropy_nats) or math.isnan(theirs.entropy_nats)
        else f", and the entropy of its sharpest layer is {theirs.entropy_nats:.3f} nats against "
        f"{ours.entropy_nats:.3f}"
    )
    return (
        f"At step {ours.step}, the last that both observed, the largest logit of {b.title} is {size} "
        f"that of {a.title} ({_number(y)} against {_number(x)}){entropy}.{loss}"
    )


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _number(value: float) -> str:
    return f"{value:,.1f}"

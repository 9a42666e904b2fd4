"""What the losses of a run say by themselves, whoever logged them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qknorm.lab.verdict import how_it_rose
from qknorm.monitor.alerts import Alert

FEWEST = 10  # losses, below which nothing is said of how a run ended


def loss_alerts(
    steps: Sequence[dict[str, Any]], final: dict[str, Any] | None, *, has_ended: bool
) -> list[Alert]:
    """Return an alarm for a loss that is not finite (QM011), or for a run that ended diverged (QM012).

    Args:
        steps: lines with a step and perhaps a loss, ascending.
        final: how a run of the lab came out, which has its own verdict; None for other runs.
        has_ended: whether no more lines will come.
    """
    known = [(line["step"], float(line["loss"])) for line in steps if line.get("loss") is not None]
    broken = next(((step, loss) for step, loss in known if not math.isfinite(loss)), None)
    if broken is not None:
        return [_alarm("QM011", broken[0], "the training loss is not finite", {"loss": broken[1]})]
    if final is not None:
        if not final["diverged"]:
            return []
        return [_alarm("QM012", final["steps"], f"the run diverged: {final['reason']}", {})]
    if not has_ended or len(known) < FEWEST:
        return []
    losses = [loss for _, loss in known]
    reason = how_it_rose(losses)
    if reason is None:
        return []
    evidence = {"first": losses[0], "best": min(losses), "last": losses[-1]}
    return [_alarm("QM012", known[-1][0], f"the run diverged: {reason}", evidence)]


def _alarm(code: str, step: int, message: str, evidence: dict[str, float]) -> Alert:
    return Alert(
        code=code,
        severity="alarm",
        step=step,
        layer="",
        heads=(),
        message=message,
        evidence=evidence,
        is_first=True,
    )

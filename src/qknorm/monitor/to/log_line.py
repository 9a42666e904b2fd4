"""Alerts as lines of Python's `logging`, under the name `qknorm`."""

from __future__ import annotations

import logging

from qknorm.monitor.alerts import Alert

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "alarm": logging.ERROR}


def log_line(alert: Alert) -> None:
    """Pass it in `to=` of the alerts. What to do follows the first alert of each code in a run."""
    logging.getLogger("qknorm").log(
        LEVELS[alert.severity],
        "step %d, %s: %s.%s",
        alert.step,
        alert.code,
        alert.message,
        f" {alert.advice}" if alert.is_first else "",
    )

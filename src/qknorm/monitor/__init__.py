"""Exact max logit and softmax entropy, per layer and head, of any model while it trains."""

from qknorm.monitor.alerts import Alert, Alerts
from qknorm.monitor.frame import read_frame
from qknorm.monitor.monitor import Monitor
from qknorm.monitor.record import LayerRecord, Record
from qknorm.monitor.rules import Thresholds
from qknorm.monitor.to.jsonl import JsonLines, rank_path
from qknorm.monitor.to.log_line import log_line
from qknorm.monitor.to.webhook import Webhook

__all__ = [
    "Alert",
    "Alerts",
    "JsonLines",
    "LayerRecord",
    "Monitor",
    "Record",
    "Thresholds",
    "Webhook",
    "log_line",
    "rank_path",
    "read_frame",
]

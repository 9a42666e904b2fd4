"""Exact max logit and softmax entropy, per layer and head, of any model while it trains."""

from qknorm.monitor.monitor import Monitor
from qknorm.monitor.record import LayerRecord, Record

__all__ = ["LayerRecord", "Monitor", "Record"]

"""QK-Norm attention for PyTorch, and the two numbers that tell whether a run is about to blow up."""

from qknorm import nn
from qknorm.auditor import audit
from qknorm.ops import Rows, Stats, attention, logit_bound, logit_stats, qk_norm_rope
from qknorm.spec import Mask, NormDialect, Rope, RowSink, SinkToken, UnsupportedError

__all__ = [
    "Mask",
    "NormDialect",
    "Rope",
    "RowSink",
    "Rows",
    "SinkToken",
    "Stats",
    "UnsupportedError",
    "attention",
    "audit",
    "logit_bound",
    "logit_stats",
    "nn",
    "qk_norm_rope",
]
__version__ = "0.1.0"

"""QK-Norm attention for PyTorch, and the two numbers that tell whether a run is about to blow up."""

import warnings

with warnings.catch_warnings():
    # torch warns on import where NumPy is not installed. Nothing here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch  # noqa: F401

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

"""QK-Norm attention for PyTorch, and the two numbers that tell whether a run is about to blow up."""

from qknorm.ops import Rows, Stats, attention, logit_bound, logit_stats, qk_norm_rope
from qknorm.spec import Mask, NormDialect, Rope, SinkToken, UnsupportedError

__all__ = [
    "Mask",
    "NormDialect",
    "Rope",
    "Rows",
    "SinkToken",
    "Stats",
    "UnsupportedError",
    "attention",
    "logit_bound",
    "logit_stats",
    "qk_norm_rope",
]
__version__ = "0.1.0.dev0"

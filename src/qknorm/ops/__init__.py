"""Pure functions on tensors: attention, QK-norm with RoPE, logit statistics and the logit bound."""

from qknorm.ops.attention import attention
from qknorm.ops.bound import logit_bound
from qknorm.ops.logit_stats import logit_stats
from qknorm.ops.norm_rope import qk_norm_rope
from qknorm.ops.stats import Rows, Stats

__all__ = ["Rows", "Stats", "attention", "logit_bound", "logit_stats", "qk_norm_rope"]

"""Hugging Face: a callback for its Trainer, and a model class that its library loads.

Importing this module registers `QKNormConfig` and `QKNormForCausalLM` with the Auto classes.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("this needs an extra: pip install 'qknorm[transformers]'") from error

from qknorm.integrations.transformers.config import QKNormConfig
from qknorm.integrations.transformers.model import QKNormForCausalLM, QKNormModel
from qknorm.integrations.transformers.trainer import MonitorCallback

__all__ = ["MonitorCallback", "QKNormConfig", "QKNormForCausalLM", "QKNormModel"]

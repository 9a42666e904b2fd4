"""The reference language model, its data, its trainer, and comparisons of QK-norm variants."""

from qknorm.lab.arms import ARMS, Arm
from qknorm.lab.compare import CompareConfig, compare
from qknorm.lab.data import DataConfig
from qknorm.lab.model import LanguageModel, ModelConfig
from qknorm.lab.trainer import TrainConfig, train

__all__ = [
    "ARMS",
    "Arm",
    "CompareConfig",
    "DataConfig",
    "LanguageModel",
    "ModelConfig",
    "TrainConfig",
    "compare",
    "train",
]

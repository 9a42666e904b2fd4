"""The arms: the variants of attention that `qknorm compare` trains and compares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qknorm.lab.capped import Cap
from qknorm.lab.model import ModelConfig
from qknorm.nn.attention_config import SinkKind
from qknorm.spec import NormDialect


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant of attention.

    Attributes:
        help: a short description for the help of the command line.
        norm: the dialect of QK-norm; None without a norm.
        sink: the kind of sink.
        cap: the soft-cap or clamp of the logits; None without one.
        gain_decay: weight decay of gains that are stored as 1 + w, see `TrainConfig`.
    """

    help: str
    norm: NormDialect | None = None
    sink: SinkKind = "none"
    cap: Cap | None = None
    gain_decay: float = 0.0

    def apply(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration of a model with its attention replaced by this variant."""
        return replace(model, norm=self.norm, sink=self.sink, cap=self.cap)


_QK = NormDialect()

ARMS: dict[str, Arm] = {
    "none": Arm(help="no norm on q and k"),
    "qk": Arm(help="QK-norm per head, gain [heads, D], before RoPE", norm=_QK),
    "qk-shared": Arm(
        help="QK-norm per head, one gain [D] for all heads", norm=NormDialect(gain="shared")
    ),
    "qk-full": Arm(
        help="one statistic over all heads (OLMo 2)",
        norm=NormDialect(statistic="full", gain="full"),
    ),
    "qk-after-rope": Arm(
        help="QK-norm after RoPE, gain [heads, D]", norm=NormDialect(order="after_rope")
    ),
    "qkv": Arm(help="QK-norm, and V normalised without a gain", norm=NormDialect(value=True)),
    "qk-nogain": Arm(help="QK-norm without a gain", norm=NormDialect(gain="none")),
    "softcap": Arm(help="no norm, logits through 50 tanh(x / 50)", cap=Cap(kind="soft", limit=50.0)),
    "clamp": Arm(help="no norm, logits clamped to +-50", cap=Cap(kind="clamp", limit=50.0)),
    "qk+sink": Arm(help="QK-norm and a learnable sink logit per head", norm=_QK, sink="logit"),
    "qk+off-by-one": Arm(help="QK-norm and a fixed sink logit of 0", norm=_QK, sink="off_by_one"),
    "qk-decay": Arm(
        help="QK-norm, gain stored as 1 + w with w decayed",
        norm=NormDialect(offset=1.0),
        gain_decay=1e-3,
    ),
}


def get_arm(name: str) -> Arm:
    """Return the arm of a name.

    Raises:
        ValueError: there is no such arm. The message lists all arms.
    """
    if name not in ARMS:
        raise ValueError(f"unknown arm {name!r}: choose from {', '.join(ARMS)}")
    return ARMS[name]

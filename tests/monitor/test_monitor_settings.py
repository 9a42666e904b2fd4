"""The monitor under settings of torch that belong to the whole process (F1, F2): the same records, and
the settings as they were.

Shapes: B batch, T tokens, C width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from qknorm.monitor import Alerts, LayerRecord, Monitor
from qknorm.nn import Attention, AttentionConfig
from qknorm.spec import Mask
from test_taps import Plain
from torch_settings import SWITCHES, default_dtype, precision, switched

B, T, C = 2, 24, 32
NUMBERS = ("max_logit", "entropy_nats", "entropy_ratio", "first_mass", "q_rms", "k_rms_cv", "bound")


def llama() -> nn.Module:
    config = transformers.Qwen3Config(
        hidden_size=C,
        intermediate_size=C,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    return transformers.Qwen3Model(config)


class Padded(nn.Module):
    """Multi-head attention with additive padding, which is streamed and not fused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(C, 4, batch_first=True)
        self.register_buffer("padding", torch.zeros(B, T).index_fill(1, torch.arange(20, T), -1e9))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, key_padding_mask=self.padding)


class Own(nn.Module):
    """Our own layer, with unequal gains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(AttentionConfig(dim=C, num_heads=4, num_kv_heads=2, sink="logit"))
        with torch.no_grad():
            for gain in (self.inner.norm.q_gain, self.inner.norm.k_gain):
                gain.uniform_(0.5, 3.0)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, mask=Mask(causal=True))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "sdpa": (Plain, lambda: 3 * torch.randn(B, T, C)),
    "multihead": (Padded, lambda: 3 * torch.randn(B, T, C)),
    "own": (Own, lambda: 3 * torch.randn(B, T, C)),
    "qwen3": (llama, lambda: torch.randint(64, (B, T))),
}
SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    **{str(d): lambda d=d: default_dtype(d) for d in (torch.bfloat16, torch.float64)},
    **{name: lambda name=name: switched(name) for name in SWITCHES},
}


def records(model: nn.Module, x: Tensor, sample: int | None) -> tuple[dict[str, LayerRecord], list[str]]:
    alerts = Alerts()
    with Monitor.attach(model, every=1, sample=sample) as monitor:
        for _ in range(2):
            model(x)
            (record,) = monitor.step()
            told = [alert.code for alert in alerts(record)]
    assert record.silent == {}
    return record.layers, told


@pytest.mark.parametrize("kind", MODELS)
def test_settings_of_the_process_change_no_record_and_are_left_alone(kind: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[kind]
    model, x = make(), inputs()
    for sample in (None, 7):
        wanted, alerts = records(model, x, sample)
        for name, setting in SETTINGS.items():
            with setting():
                before = precision(), torch.get_default_dtype()
                found, told = records(model, x, sample)
                assert (precision(), torch.get_default_dtype()) == before, name
            assert told == alerts, name
            for layer, record in wanted.items():
                assert found[layer].rows == record.rows, name
                for number in NUMBERS:
                    value = getattr(record, number)
                    near = value if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)
                    assert getattr(found[layer], number) == near, (name, number)

"""The mix-in on a stand-in that calls it as torchtitan's trainer does: torchtitan itself is not on the
package index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.integrations.torchtitan import AttentionMetrics
from qknorm.monitor.to.jsonl import rank_path, read_lines


class Processor:
    """What torchtitan's MetricsProcessor offers to its trainer."""

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.closed = False
        self.model_parts = None

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.frequency == 0

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        self.logged.append((step, extra_metrics or {}))

    def close(self) -> None:
        self.closed = True


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, 2, 8)).unbind(-3)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, k)), is_causal=True)


class Stage(nn.Module):
    """A part of a pipelined model, whose layers keep their numbers."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Attention() for i in numbers})

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).mean() for layer in self.layers.values())  # type: ignore[return-value]


def train(metrics: Any, parts: list[nn.Module], steps: range) -> None:
    """The order of torchtitan's train_step."""
    for step in steps:
        for part in parts:
            part(torch.randn(2, 6, 16)).backward()
        if metrics.should_log(step):
            metrics.log(step, 1.0, 1.0, 1.0, extra_metrics={"lr": 0.1})


def test_numbers_join_what_is_logged_for_all_parts(tmp_path: Path) -> None:
    class Metrics(AttentionMetrics, Processor):
        every = 2
        folder = tmp_path

    metrics = Metrics(frequency=3)
    parts: list[nn.Module] = [torch.compile(Stage(range(2))), Stage(range(2, 3))]  # type: ignore[list-item]
    metrics.model_parts = parts
    train(metrics, parts, range(1, 7))
    assert [step for step, _ in metrics.logged] == [1, 3, 6]
    assert all(extra["lr"] == 0.1 and "attention/max_logit" in extra for _, extra in metrics.logged)
    found = [line for line in read_lines(rank_path(tmp_path, 0)) if line["kind"] == "record"]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert sorted(found[0]["layers"]) == ["layers.0", "layers.1", "layers.2"]
    metrics.close()
    assert metrics.closed
    assert metrics.session is None


def test_a_loaded_checkpoint_moves_the_count_on() -> None:
    class Metrics(AttentionMetrics, Processor):
        every = 1

    metrics, parts = Metrics(frequency=1), [Stage(range(1))]
    metrics.model_parts = parts  # type: ignore[assignment]
    seen: list[Any] = []
    assert metrics.session is not None
    metrics.session.monitor.to.append(lambda record: seen.append(record.step))
    train(metrics, list(parts), range(101, 104))
    assert seen == [100, 101, 102]
    metrics.close()

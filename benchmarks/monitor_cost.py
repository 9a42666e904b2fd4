"""What watching costs: training steps of the lab's model with a monitor and without, interleaved.

    python benchmarks/monitor_cost.py [--json] [--rounds N]

Twins with the same weights, batches and optimizer take turns, ten steps each, in an order drawn anew
every round; one of them is watched. Their losses must stay bit-equal, or no ratio is printed. A ratio is
the median over rounds of the time of ten watched steps by that of ten unwatched ones, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qknorm.lab.environment import describe
from qknorm.lab.model import LanguageModel, ModelConfig
from qknorm.monitor import Monitor
from qknorm.monitor.alerts import Alerts
from qknorm.nn import Attention, param_groups

BLOCK = 10  # steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of the demo, and of a longer sequence with the same number of tokens."""

    name: str
    batch: int
    tokens: int
    attention: str  # "qknorm", or "sdpa": the same model on torch's own attention
    every: int
    sample: int | None = None
    target: float | None = None  # of the ratio


CASES = (
    Case(name="demo", batch=16, tokens=128, attention="qknorm", every=10, target=1.02),
    Case(name="demo", batch=16, tokens=128, attention="qknorm", every=1, target=1.05),
    Case(name="demo", batch=16, tokens=128, attention="sdpa", every=10, target=1.02),
    Case(name="demo", batch=16, tokens=128, attention="sdpa", every=1),
    Case(name="T=2048", batch=1, tokens=2048, attention="qknorm", every=10, target=1.02),
    Case(name="T=2048", batch=1, tokens=2048, attention="qknorm", every=1, target=1.05),
    Case(name="T=2048", batch=1, tokens=2048, attention="sdpa", every=10, target=1.02),
    Case(name="T=2048", batch=1, tokens=2048, attention="sdpa", every=10, sample=128, target=1.02),
    Case(name="T=2048", batch=1, tokens=2048, attention="sdpa", every=1),
    Case(name="T=2048", batch=1, tokens=2048, attention="sdpa", every=1, sample=128),
)


class SdpaAttention(Attention):
    """The layer's own projections and norm around `F.scaled_dot_product_attention`."""

    def forward(self, x: Tensor, *, rope: Any, mask: Any, cache: Any = None, stats: bool = False) -> Any:
        """As the base class, causal."""
        c = self.config
        q, k, v = self.qkv(x).split([n * c.width for n in (c.num_heads, c.kv_heads, c.kv_heads)], -1)
        q, k, v = (t.unflatten(-1, (-1, c.width)).transpose(1, 2) for t in (q, k, v))
        q, k = self.norm_rope(q, k, rope)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def steps(case: Case, *, watched: bool) -> Callable[[], list[float]]:
    """Ten training steps, and their losses."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig())
    if case.attention == "sdpa":
        for layer in model.attention_layers():
            layer.__class__ = SdpaAttention
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3, fused=True)
    monitor = None
    if watched:
        monitor = Monitor.attach(model, every=case.every, sample=case.sample, to=[Alerts()])
    generator = torch.Generator().manual_seed(1)

    def run() -> list[float]:
        losses = []
        for _ in range(BLOCK):
            tokens = torch.randint(0, 256, (case.batch, case.tokens + 1), generator=generator)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if monitor is not None:
                monitor.step()
        return losses

    return run


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Median ratio and quartiles, or what went wrong."""
    runs = {"plain": steps(case, watched=False), "watched": steps(case, watched=True)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    ratios = []
    for n in range(rounds + 1):
        losses, spent = {}, {}
        for name in random.sample(list(runs), len(runs)):
            began = time.perf_counter()
            losses[name] = runs[name]()
            spent[name] = time.perf_counter() - began
        if losses["plain"] != losses["watched"]:
            return vars(case) | {"wrong": "the losses differ"}
        if n:  # the first round warms up
            ratios.append(spent["watched"] / spent["plain"])
            for name, value in spent.items():
                times[name].append(1e3 * value / BLOCK)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return vars(case) | {
        "plain_ms": statistics.median(times["plain"]),
        "watched_ms": statistics.median(times["watched"]),
        "ratio": middle,
        "quartiles": [low, high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    random.seed(0)
    rows = [measure(case, args.rounds) for case in CASES]
    if args.json:
        print(json.dumps({"environment": describe(), "rows": rows}, indent=2))
        return
    for row in rows:
        what = f"{row['name']:7} {row['attention']:7} every {row['every']:<3}"
        what += "" if row["sample"] is None else f"{row['sample']} queries "
        if "wrong" in row:
            print(f"{what} no ratio: {row['wrong']}")
            continue
        low, high = row["quartiles"]
        print(
            f"{what} {row['plain_ms']:.1f} -> {row['watched_ms']:.1f} ms a step, "
            f"ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f}), target {row['target'] or 'none'}"
        )


if __name__ == "__main__":
    main()

"""Does the monitor cry wolf on models that have QK-norm, whoever wrote the norm?

    python benchmarks/normed_models.py [--steps N] [--json FILE]

Three kinds of small models are trained at three learning rates on the sources of Python's standard
library: a GPT written by hand with `nn.RMSNorm` on q and k before SDPA, a Qwen3 of Hugging Face, and the
lab's model with `qknorm.nn.Attention`. Each is watched in every tenth step as a user would, and its
alerts are counted.

A growth warning (QM002) is in vain if the first record at the level does not lie in the interval that
it names. A layer counts as warned in vain if one of its warnings is. The target is at most 2 % of the
layers of healthy runs, and no advice to add QK-norm. A run is healthy if its loss is finite and ends at
least 0.1 nats below its first value.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.lab import environment
from qknorm.lab.data import DataConfig, load
from qknorm.lab.model import LanguageModel, ModelConfig
from qknorm.monitor import Alert, Alerts, Monitor, Record, Thresholds

C, HEADS, LAYERS, CONTEXT, BATCH, VOCABULARY = 64, 4, 3, 96, 16, 256
RATES = (3e-3, 1e-2, 3e-2)
EVERY, WARMUP = 10, 20
TARGET = 0.02


class Attention(nn.Module):
    """Attention as it is written by hand, with PyTorch's norm on q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(C // HEADS, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.mlp_norm = (
            Attention(),
            nn.LayerNorm(C),
            nn.LayerNorm(C),
        )
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByHand(nn.Module):
    """A GPT with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, C), nn.Embedding(CONTEXT, C)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def qwen3() -> nn.Module:
    """Transformers' own class, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=C,
            intermediate_size=3 * C,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            head_dim=C // HEADS,
        )
    )


def lab() -> nn.Module:
    """The lab's model, with gains per head."""
    return LanguageModel(ModelConfig(layers=LAYERS, dim=C, heads=HEADS, vocab_size=VOCABULARY))


KINDS: dict[str, Callable[[], nn.Module]] = {"by hand": ByHand, "Qwen3": qwen3, "qknorm.nn": lab}


def train(kind: str, rate: float, steps: int) -> dict[str, Any]:
    """Train one model; return what the monitor said of it and what was true."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    data = load(DataConfig(), vocab_size=VOCABULARY, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    alerts, said = Alerts(last_step=steps - 1), list[Alert]()
    records, losses = list[Record](), list[float]()
    with Monitor.attach(model, every=EVERY) as monitor:
        for step in range(steps):
            factor = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate * max(factor, 0.05)
            inputs, targets = data.batch(seed=0, step=step, batch=BATCH, context=CONTEXT)
            out = model(inputs)
            logits = out if isinstance(out, Tensor) else out.logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            for record in monitor.step():
                records.append(record)
                said += alerts(record)
    return _judged(kind, rate, records, said, losses)


def _judged(
    kind: str, rate: float, records: list[Record], said: list[Alert], losses: list[float]
) -> dict[str, Any]:
    level = Thresholds().level_warning
    reached = {
        name: next((r.step for r in records if r.layers[name].top >= level), math.inf)
        for name in records[-1].layers
    }
    growth = [alert for alert in said if alert.code == "QM002"]
    vain = {
        alert.layer
        for alert in growth
        if not alert.evidence["early"] <= reached[alert.layer] <= alert.evidence["late"] + EVERY
    }
    last = fmean(losses[-10:])
    return {
        "kind": kind,
        "rate": rate,
        "first_loss": losses[0],
        "last_loss": last,
        "healthy": math.isfinite(last) and last < losses[0] - 0.1,
        "max_logit": max(record.max_logit for record in records),
        "layers": len(reached),
        "normed_layers": sum(layer.is_normed for layer in records[-1].layers.values()),
        "bounded_layers": sum(layer.bound is not None for layer in records[-1].layers.values()),
        "alerts": dict(sorted(Counter(alert.code for alert in said).items())),
        "growth_warnings": len(growth),
        "warned_in_vain": len(vain),
        "advice_to_add_norm": sum("QK-norm" in alert.advice for alert in said),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [train(kind, rate, args.steps) for kind in KINDS for rate in RATES]
    print("model      rate   loss first..last  max logit  bound of  QM002  in vain  alerts")
    for run in runs:
        alerts = ", ".join(f"{code} {count}" for code, count in run["alerts"].items()) or "none"
        print(
            f"{run['kind']:<10} {run['rate']:<6g} {run['first_loss']:>7.3f}..{run['last_loss']:<7.3f} "
            f"{run['max_logit']:>10.1f}  {run['bounded_layers']} of {run['layers']}    "
            f"{run['growth_warnings']:>5} {run['warned_in_vain']:>8}  {alerts}"
        )
    healthy = [run for run in runs if run["healthy"]]
    layers = sum(run["layers"] for run in healthy)
    vain = sum(run["warned_in_vain"] for run in healthy)
    advice = sum(run["advice_to_add_norm"] for run in runs)
    unknown = sum(run["layers"] - run["normed_layers"] for run in runs)
    print(
        f"{len(healthy)} of {len(runs)} runs are healthy; {vain} of their {layers} layers were warned "
        f"in vain ({100 * vain / layers:.1f} %, target at most {100 * TARGET:g} %); advice to add the "
        f"norm: {advice} (target 0); layers whose norm was not seen: {unknown} (target 0)"
    )
    if args.json:
        found = {"date": date.today().isoformat(), "environment": environment.describe(), "runs": runs}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(vain > TARGET * layers or advice > 0 or unknown > 0)


if __name__ == "__main__":
    sys.exit(main())

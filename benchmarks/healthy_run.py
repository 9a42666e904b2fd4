"""Makes tests/monitor/healthy.jsonl.xz: what the monitor records of small models that train well.

    python benchmarks/healthy_run.py

A GPT of somebody's own with SDPA, once without a norm on q and k and once with `nn.RMSNorm`, on the
source of argparse. No rule of the alerts may speak of either, see tests/monitor/test_healthy.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.monitor import Monitor

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "monitor" / "healthy.jsonl.xz"
WIDTH, HEADS, LAYERS, BATCH, CONTEXT, STEPS, EVERY, RATE = 32, 4, 2, 8, 48, 60, 2, 3e-3


class Attention(nn.Module):
    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        make = (lambda: nn.RMSNorm(WIDTH // HEADS)) if normed else nn.Identity
        self.q_norm, self.k_norm = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.attention = Attention(normed=normed)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(normed=normed) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.blocks(self.tokens(ids) + self.places(places)))


def lines(*, normed: bool) -> list[str]:
    """The records of one run, and its last loss."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    model, found = Gpt(normed=normed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with Monitor.attach(model, every=EVERY) as monitor:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 20)
            at = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
            batch = torch.stack([text[i : i + CONTEXT + 1] for i in at])
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for record in monitor.step():
                found.append(
                    {"kind": "record", "run": "normed" if normed else "plain"} | record.to_json()
                )
    print(f"{'with' if normed else 'without'} the norm: loss {loss.item():.3f}")
    return [json.dumps(_short(line)) for line in found]


def _short(value: object) -> object:
    """Six digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def main() -> None:
    torch.set_num_threads(1)
    with lzma.open(TARGET, "wt") as file:
        for normed in (False, True):
            file.writelines(line + "\n" for line in lines(normed=normed))
    print(f"{TARGET}: {TARGET.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

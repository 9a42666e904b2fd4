"""What each process of test_ranks.py does; results go to a file per rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from qknorm import Mask
from qknorm.monitor import Monitor
from qknorm.nn import Attention, AttentionConfig

WIDTH, HEADS, D = 16, 4, 8


class Heads(nn.Module):
    """Attention over some of the heads, as tensor parallelism leaves it on a rank."""

    def __init__(self, weight_q: Tensor, weight_k: Tensor) -> None:
        super().__init__()
        self.weight_q, self.weight_k = nn.Parameter(weight_q), nn.Parameter(weight_k)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            F.linear(x, w).unflatten(-1, (-1, D)).transpose(1, 2) for w in (self.weight_q, self.weight_k)
        )
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


class Model(nn.Module):
    """Layers by name, each over the same x."""

    def __init__(self, layers: dict[str, Heads]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> None:
        for layer in self.layers.values():
            layer(x)


def weights(extreme_head: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Two layers; one head of the first has by far the largest logits."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name in ("first", "second"):
        q, k = (torch.randn(HEADS * D, WIDTH, generator=generator) for _ in range(2))
        if name == "first":
            q.view(HEADS, D, WIDTH)[extreme_head] *= 20
        found[name] = (q, k)
    return found


def batch() -> Tensor:
    """[4, 12, WIDTH]; the last sequence is the loudest."""
    x = torch.randn(4, 12, WIDTH, generator=torch.Generator().manual_seed(6))
    x[3] *= 2
    return x


def share(kind: str, rank: int, world: int, extreme_head: int) -> tuple[Model, Tensor]:
    """The part of model and batch that a rank holds."""
    layers, x = weights(extreme_head), batch()
    if kind == "data":
        return Model({n: Heads(*w) for n, w in layers.items()}), x.chunk(world)[rank]
    if kind == "tensor":
        parts = {n: [t.chunk(world)[rank].clone() for t in w] for n, w in layers.items()}
        return Model({n: Heads(*w) for n, w in parts.items()}), x
    if kind == "both":  # 2 x 2: heads among (0, 1) and (2, 3), tokens between the pairs
        parts = {n: [t.chunk(2)[rank % 2].clone() for t in w] for n, w in layers.items()}
        return Model({n: Heads(*w) for n, w in parts.items()}), x.chunk(2)[rank // 2]
    assert kind == "pipeline"  # a layer a rank, and none for the others
    mine = list(layers.items())[rank : rank + 1]
    return Model({n: Heads(*w) for n, w in mine}), x


def whole(extreme_head: int) -> tuple[Model, Tensor]:
    """Everything in one process."""
    return Model({n: Heads(*w) for n, w in weights(extreme_head).items()}), batch()


def run(rank: int, world: int, kind: str, extreme_head: int, folder: str) -> None:
    """One process: three steps, the records of which are saved."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    tensor_parallel: Any = None
    if kind == "tensor":
        tensor_parallel = dist.group.WORLD
    elif kind == "both":
        tensor_parallel = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model, x = share(kind, rank, world, extreme_head)
    records = []
    with Monitor.attach(model, every=1, tensor_parallel=tensor_parallel) as monitor:
        for step in range(3):
            if not (kind == "data" and step == 1 and rank == 0):  # a rank that saw no batch in a step
                model(x)
            records.append([record.to_json() for record in monitor.step()])
    torch.save(records, Path(folder) / f"rank{rank}.pt")
    dist.barrier()  # a rank that leaves early cuts off those that still receive
    dist.destroy_process_group()


class Block(nn.Module):
    """Attention of qknorm.nn and a projection, for wrappers that shard parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(AttentionConfig(dim=WIDTH, num_heads=HEADS, head_dim=D))
        self.plain = Heads(*(torch.randn(HEADS * D, WIDTH) / 4 for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, mask=Mask(causal=True))
        return x + self.plain(x).transpose(1, 2).flatten(2)[..., :WIDTH]


def train_blocks(kind: str, rank: int, world: int, *, attach_first: bool) -> list[Any]:
    """Four steps of SGD under a wrapper; what was recorded, and the losses."""
    torch.manual_seed(7)
    model: Any = nn.Sequential(Block(), Block())
    x = batch().chunk(world)[rank]
    monitor = Monitor.attach(model, every=2) if attach_first else None
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    monitor = monitor or Monitor.attach(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
        records = [record.to_json() for record in monitor.step()]
        found.append({"loss": float(total) / world, "records": records})
    monitor.detach()
    return found


def run_wrapped(rank: int, world: int, kind: str, attach_first: bool, folder: str) -> None:
    """One process of a wrapped training."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = train_blocks(kind, rank, world, attach_first=attach_first)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

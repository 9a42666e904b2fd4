"""Small models of every kind, trained in every way, with and without a monitor: see test_matrix.py.

A cell is (kind of model, way of running, wrapper). It is trained twice from the same weights on the same
batches; what is returned is compared by the tests.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qknorm.monitor import Monitor
from qknorm.nn import Attention, AttentionConfig

WIDTH, HEADS, D, B, T = 16, 2, 8, 4, 6
STEPS = 2

KINDS = ("sdpa", "multihead", "own", "llama", "qwen3")
WAYS = ("eager", "compile", "checkpoint", "blocks")
WRAPPERS = ("ddp", "fsdp1", "fsdp1_orig", "fsdp2")


class Sdpa(nn.Module):
    """What a user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * D)
        self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).transpose(1, 3).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(AttentionConfig(dim=WIDTH, num_heads=HEADS, backend="stock"))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


class Block(nn.Module):
    def __init__(self, attention: nn.Module, is_checkpointed: bool) -> None:
        super().__init__()
        self.attention, self.mlp = attention, nn.Linear(WIDTH, WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            x = x + checkpoint(self.attention, x, use_reentrant=False)
        else:
            x = x + self.attention(x)
        return x + F.silu(self.mlp(x))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], depth: int, is_checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(make(), is_checkpointed) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class HuggingFace(nn.Module):
    """With embeddings as input, and a tensor as output."""

    def __init__(self, name: str, depth: int, is_checkpointed: bool) -> None:
        import transformers

        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": 16,
            "num_hidden_layers": depth,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 1,
            "head_dim": D,
            "vocab_size": 7,
            "use_cache": False,
            "attn_implementation": "sdpa",
        }
        config = getattr(transformers, f"{name}Config")(**sizes)
        self.inner = transformers.AutoModel.from_config(config)
        self.inner.embed_tokens = None  # which would have no gradient
        if is_checkpointed:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})
        self.blocks = self.inner.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(inputs_embeds=x).last_hidden_state


def make(kind: str, way: str, depth: int) -> nn.Module:
    """The same weights at every call, no two gains alike."""
    torch.manual_seed(3)
    is_checkpointed = way == "checkpoint"
    model: nn.Module
    if kind in ("llama", "qwen3"):
        model = HuggingFace(kind.capitalize(), depth, is_checkpointed)
    else:
        layer = {"sdpa": Sdpa, "multihead": Multihead, "own": Own}[kind]
        model = Model(layer, depth, is_checkpointed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(20.0)  # logits of some size, also without a norm
    return model.train()


def wrap(model: Any, wrapper: str) -> nn.Module:
    if wrapper == "alone":
        return model
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        use_orig_params=wrapper == "fsdp1_orig",
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )


def train(
    kind: str, way: str, wrapper: str, *, every: int | None, depth: int = 2, backend: str = "aot_eager"
) -> dict[str, Any]:
    """Outputs, gradients, graphs and records of a few steps; `every=None` is without a monitor."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model: Any = make(kind, way, depth)
    # The hooks of FSDP break the graph of a checkpointed region: there blocks are compiled one by one.
    whole = way == "compile" or (way == "checkpoint" and wrapper in ("alone", "ddp"))
    if way != "eager" and not whole:
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
    model = wrap(model, wrapper)
    run = torch.compile(model, backend=counter, fullgraph=wrapper == "alone") if whole else model
    monitor = None if every is None else Monitor.attach(model, every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    world, rank = (1, 0) if wrapper == "alone" else (dist.get_world_size(), dist.get_rank())
    tensors: list[Tensor] = []
    records: list[Any] = []
    try:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(B, T, WIDTH, generator=generator).chunk(world)[rank]
            out = run(x)
            out.square().mean().backward()
            tensors.append(out.detach().clone())
            for parameter in model.parameters():
                grad = parameter.grad
                if grad is not None:
                    tensors.append(getattr(grad, "_local_tensor", grad).clone())
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                records += [record.to_json() for record in monitor.step()]
    finally:
        if monitor is not None:
            monitor.detach()
    return {"tensors": tensors, "records": records, "graphs": counter.frame_count}


def cell(kind: str, way: str, wrapper: str, **options: Any) -> dict[str, Any]:
    """Both trainings of a cell, or the error of the one without a monitor, which torch refuses."""
    try:
        plain = train(kind, way, wrapper, every=None, **options)
    except Exception:
        return {"refused": traceback.format_exc()}
    watched = train(kind, way, wrapper, every=1, **options)
    return {
        "graphs": (plain["graphs"], watched["graphs"]),
        "is_equal": len(plain["tensors"]) == len(watched["tensors"])
        and all(torch.equal(a, b) for a, b in zip(plain["tensors"], watched["tensors"], strict=True)),
        "records": watched["records"],
    }


def join(rank: int, world: int, folder: str) -> None:
    """Become one of the ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


def run_cells(rank: int, world: int, cells: list[tuple[str, str, str]], folder: str) -> None:
    """One rank: every cell after the other, and what came of them in a file."""
    join(rank, world, folder)
    found = {}
    for one in cells:
        found[one] = cell(*one)
        dist.barrier()
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

"""QK-clip on two ranks: replicas stay equal to the bit, and shards are clipped as the whole is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qknorm.monitor import Monitor
from qknorm.nn import Attention, AttentionConfig, qk_clip_

WORLD, TAU = 2, 1.0


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "multihead":
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    normed = AttentionConfig(dim=32, num_heads=4)
    plain = AttentionConfig(dim=32, num_heads=4, num_kv_heads=2, norm=None)
    return nn.Sequential(Attention(normed), Attention(plain))


def batch(rank: int) -> Tensor:
    """`[2, 16, 32]`; the second rank has the larger logits."""
    return (1 + 2 * rank) * torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(rank))


def clipped(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    with Monitor.attach(model, every=1) as monitor:
        for x in batches:
            model(x)
        (record,) = monitor.step()
    factors = qk_clip_(model, record.max_logits, TAU)
    assert factors
    return {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}


def run(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
    torch.set_num_threads(1)
    found = {}
    for kind in ("multihead", "ours"):
        for wrap in ("replica", "sharded"):
            model = model_of(kind)
            found[kind, wrap] = clipped(fully_shard(model) if wrap == "sharded" else model, batch(rank))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_clip_alike() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=WORLD)
        first, second = (torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD))
    for kind in ("multihead", "ours"):
        whole = clipped(model_of(kind), *map(batch, range(WORLD)))
        before = dict(model_of(kind).named_parameters())
        assert any(not torch.equal(p, before[n]) for n, p in whole.items())
        for wrap in ("replica", "sharded"):
            for name, p in whole.items():
                assert torch.equal(first[kind, wrap][name], second[kind, wrap][name]), (kind, wrap, name)
                assert torch.allclose(first[kind, wrap][name], p, rtol=1e-5), (kind, wrap, name)

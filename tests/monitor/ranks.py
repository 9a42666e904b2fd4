"""What the processes of test_ranks.py do: every scenario of a number of ranks, one after the other."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F

from qknorm import Mask, NormDialect
from qknorm.integrations.session import Session
from qknorm.integrations.torchtitan import AttentionMetrics
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


def shared(rank: int, world: int, kind: str, extreme_head: int) -> list[Any]:
    """The records of three steps of a model that is shared among ranks."""
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
    return records


class Block(nn.Module):
    """Attention of qknorm.nn and a projection, for wrappers that shard parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(AttentionConfig(dim=WIDTH, num_heads=HEADS, head_dim=D))
        self.plain = Heads(*(torch.randn(HEADS * D, WIDTH) / 4 for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, mask=Mask(causal=True))
        return x + self.plain(x).transpose(1, 2).flatten(2)[..., :WIDTH]


def only(out: Any) -> Tensor:
    """The tensor of a layer that may return statistics as well."""
    return out[0] if isinstance(out, tuple) else out


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


# F21, F35, F63 -------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Attention whose only logit is its input."""

    def forward(self, logit: float) -> None:
        q = torch.full((1, 1, 1, 1), logit)
        F.scaled_dot_product_attention(q, torch.ones_like(q), q, scale=1.0)


def late(rank: int, world: int) -> list[Any]:
    """Layers that first run in another step on each rank: the largest logit of each step."""
    steps = ((120, None, None), (120, 400, None), (7, 4, 9))
    model, tops = Scores(), []
    with Monitor.attach(model, every=1) as monitor:
        for step in steps:
            logit = step[rank]
            if logit is not None:
                model(float(logit))
            (record,) = monitor.step()
            tops.append(record.max_logit)
    return tops


def branches(rank: int, world: int) -> list[Any]:
    """FSDP2 around two branches of which each rank runs one, and a third that runs late on one rank."""
    torch.manual_seed(4)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = AttentionConfig(dim=WIDTH, num_heads=HEADS)
            self.parts = nn.ModuleDict({n: Attention(config) for n in ("image", "text", "late")})

        def forward(self, x: Tensor, names: list[str]) -> None:
            for name in names:
                self.parts[name](x)

    model = Branches()
    if world > 1:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        model = fully_shard(model, mesh=mesh, reshard_after_forward=True)
    records = []
    with Monitor.attach(model, every=1) as monitor, torch.no_grad():
        for step in range(3):
            names = [["image"], ["text"]][rank] if world > 1 else ["image", "text"]
            if step == 1 and rank == world - 1:
                names = [*names, "late"]
            model(batch(), names)
            records += [record.to_json() for record in monitor.step()]
    return records


def leaving(rank: int, world: int) -> str:
    """Each way out, on one rank only. A collective in it would meet the barrier on the other."""

    class Processor:
        def should_log(self, step: int) -> bool:
            return False

        def close(self) -> None: ...

    class Metrics(AttentionMetrics, Processor):
        every = 1

    def begun() -> Session:
        model = Scores()
        session = Session(model, None, every=1)
        model(1.0)
        session.step()
        model(2.0)  # which a flush would gather
        return session

    def fail_in_a_with_statement() -> None:
        model = Scores()
        with Monitor.attach(model, every=1):
            model(1.0)
            raise RuntimeError("on purpose")

    metrics, model = Metrics(), Scores()
    metrics.model_parts = [model]
    model(1.0)
    metrics.should_log(1)
    model(2.0)
    failed, detached = begun(), begun()
    if rank == world - 1:
        failed.close(failed=True)
        detached.monitor.detach()
        metrics.close()
        with contextlib.suppress(RuntimeError):
            fail_in_a_with_statement()
    dist.barrier()
    if rank != world - 1:
        failed.close(failed=True)
        detached.close(failed=True)
        metrics.close()
    return "left"


def broken_on_one_rank(rank: int, world: int) -> list[Any]:
    """A layer that cannot say what it saw on one rank: the collectives are entered all the same."""
    model, found = nn.ModuleDict({"one": Scores(), "other": Scores()}), []
    with Monitor.attach(model, every=1) as monitor:
        for step in range(2):
            model["one"](10.0 + rank)
            model["other"](20.0 + rank)
            if step == 0 and rank == 1:
                monitor.layers["one"].heads = None  # type: ignore[assignment]
            found += [record.to_json() for record in monitor.step()]
            monitor.layers["one"].heads = 1
        model["one"](10.0 + rank)
        model["other"](20.0 + rank)
        if rank == 1:  # what is packed between two collectives
            monitor.layers["one"].buffers["train"] = torch.ones(1, 1, dtype=torch.float64)
        found += [record.to_json() for record in monitor.step()]
    return found


# F36 ------------------------------------------------------------------------------------------------


def norm_alone(rank: int, world: int) -> dict[str, Any]:
    """A norm that is sharded by itself: output, gradients, bound and record, and those without."""

    def trained(mesh: Any, **options: Any) -> dict[str, Any]:
        torch.manual_seed(11)
        layer: Any = Attention(AttentionConfig(dim=WIDTH, num_heads=HEADS, num_kv_heads=2, **options))
        with torch.no_grad():
            for gain in layer.norm.parameters():
                gain.uniform_(0.5, 2.0)
        if mesh is not None:
            fully_shard(layer.norm, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        with Monitor.attach(layer, every=1) as monitor:
            out = only(layer(batch()))
            out.square().mean().backward()
            (record,) = monitor.step()
        grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in layer.parameters()]
        bound = layer.logit_bound()
        record = record.layers[""]
        return {
            "tensors": [out.detach(), *grads],
            "bounds": [bound, record.bound, *record.gain_max],
            "note": record.note,
        }

    def freed() -> tuple[str, Tensor, Tensor]:
        config = AttentionConfig(dim=WIDTH, num_heads=HEADS, norm=NormDialect(offset=1.0))
        torch.manual_seed(11)
        layer = Attention(config)
        nn.init.uniform_(layer.norm.q_gain, 0.5, 2.0)
        bound = layer.logit_bound()
        inner = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        wrapped = FullyShardedDataParallel(nn.Sequential(inner), device_id=torch.device("cpu"))
        wrapped(batch())
        try:
            said = str(layer.logit_bound())
        except ValueError as error:
            said = str(error)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return said, bound, layer.logit_bound()

    pair = dist.device_mesh.init_device_mesh("cpu", (world, 1), mesh_dim_names=("outer", "inner"))
    found: dict[str, Any] = {"freed": freed()}
    for name, options in {
        "reference": {"backend": "reference"},
        "stock": {"backend": "stock"},
        "cpu": {"backend": "cpu"},
        "token": {"backend": "stock", "sink": "token"},
    }.items():
        found[name] = [trained(mesh, **options) for mesh in (None, pair["inner"], pair["outer"])]
    return found


SHARED = {2: ("data", "tensor", "pipeline"), 4: ("data", "tensor", "both", "pipeline")}
WRAPPED = [(kind, first) for kind in ("ddp", "fsdp2") for first in (True, False)]


def scenarios(world: int) -> dict[str, Callable[[int, int], Any]]:
    """What so many ranks do, by name."""
    found: dict[str, Callable[[int, int], Any]] = {}
    for kind in SHARED.get(world, ()):
        for head in (0, 3):
            found[f"{kind} {head}"] = lambda rank, world, a=(kind, head): shared(rank, world, *a)
    if world == 2:
        for kind, first in WRAPPED:
            found[f"{kind} {first}"] = lambda rank, world, kind=kind, first=first: train_blocks(
                kind, rank, world, attach_first=first
            )
        for scenario in (branches, leaving, broken_on_one_rank, norm_alone):
            found[scenario.__name__] = scenario
    if world == 3:
        found["late"] = late
    return found


def run(rank: int, world: int, folder: str) -> None:
    """One process; what came of each scenario, or its error, goes to a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {}
    for name, scenario in scenarios(world).items():
        try:
            found[name] = scenario(rank, world)
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()  # a rank that leaves early cuts off those that still receive
    dist.destroy_process_group()

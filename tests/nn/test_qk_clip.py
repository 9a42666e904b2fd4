"""QK-clip: no maximum above tau on the same batch, the published rule, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm import NormDialect
from qknorm.monitor import Monitor, Record
from qknorm.nn import Attention, AttentionConfig, HeadRows, Projections, QKNorm, qk_clip_

TAU = 4.0
C, T = 64, 24


class Own(nn.Module):
    """Grouped attention as it is written by hand, with a RoPE-like rotation that keeps lengths."""

    def __init__(self, *, bias: bool = False, norm: QKNorm | None = None) -> None:
        super().__init__()
        self.head_dim = 16
        self.q_proj, self.k_proj = nn.Linear(C, 4 * 16, bias=bias), nn.Linear(C, 2 * 16, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(C, 2 * 16), nn.Linear(C, C)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.norm is not None:
            q, k = self.norm(q, k)
        q, k = q.roll(1, -1), k.roll(1, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    def __init__(self, keys: int = C, **options: Any) -> None:
        super().__init__()
        self.keys = keys
        self.inner = nn.MultiheadAttention(C, 4, batch_first=True, kdim=keys, vdim=keys, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = x[..., : self.keys]
        out: Tensor = self.inner(x, y, y, need_weights=False)[0]
        return out


def ours(**options: Any) -> Attention:
    return Attention(AttentionConfig(dim=C, num_heads=4, **options))


def record_of(model: nn.Module, x: Tensor) -> Record:
    with Monitor.attach(model, every=1) as monitor:
        model(x)
        (record,) = monitor.step()
    return record


SHARED = NormDialect(gain="shared", offset=1.0)
MODELS = {
    "ours": lambda: ours(norm=None, bias=True),
    "ours grouped": lambda: ours(norm=None, num_kv_heads=2),
    "ours, sink token": lambda: ours(norm=None, sink="token"),
    "gains": ours,
    "gains grouped": lambda: ours(num_kv_heads=2),
    "gains 1 + w": lambda: ours(norm=NormDialect(offset=1.0)),
    "shared gains": lambda: ours(norm=SHARED, num_kv_heads=2),
    "full gains": lambda: ours(norm=NormDialect(gain="full", statistic="full")),
    "by hand": lambda: Own(bias=True),
    "by hand, QKNorm": lambda: Own(norm=QKNorm(4, 2, 16)),
    "MultiheadAttention": MultiHead,
    "MultiheadAttention, other keys": lambda: MultiHead(keys=32),
}


def enlarge(model: nn.Module) -> None:
    """Make the logits of the heads differ, and most of them large."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gain" in name:
                p.add_(torch.linspace(0.2, 3.0, p.numel()).view(p.shape))
            elif (
                name.split(".")[-1] in ("in_proj_weight", "q_proj_weight", "in_proj_bias") or "q" in name
            ):
                p.mul_(torch.linspace(0.05, 8.0, len(p)).view(-1, *[1] * (p.dim() - 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_after_a_clip_no_maximum_is_above_tau(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = MODELS[kind](), torch.randn(2, T, C)
    enlarge(model)
    model, x = model.to(dtype), x.to(dtype)
    before, state = record_of(model, x), copy.deepcopy(model.state_dict())
    ((path, old),) = before.max_logits.items()
    assert max(old) > 2 * TAU
    factors = qk_clip_(model, before.max_logits, TAU)[path]
    assert factors.tolist() == pytest.approx([min(1.0, TAU / top) for top in old])
    new = record_of(model, x).max_logits[path]
    slack = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert max(new) <= TAU * (1 + (slack if dtype == torch.bfloat16 else 0.0))
    if "shared" not in kind:
        wanted = [min(TAU, top) for top in old]
        assert new == pytest.approx(wanted, rel=slack)
    # What it does not need to touch keeps its bits.
    changed = {n for n, p in model.state_dict().items() if not torch.equal(p, state[n])}
    assert changed
    assert all("out" not in n and "v_" not in n and "value" not in n for n in changed)
    again = copy.deepcopy(model.state_dict())
    qk_clip_(model, {path: [TAU] * len(old)}, TAU)
    assert all(torch.equal(p, again[n]) for n, p in model.state_dict().items())


def test_heads_below_tau_keep_their_bits() -> None:
    torch.manual_seed(0)
    layer = ours(norm=None, bias=True)
    old = [p.detach().clone() for p in (layer.qkv.weight, layer.qkv.bias)]
    qk_clip_(layer, {"": [-1.0, 8.0, -math.inf, 4.0]}, TAU)
    for before, after in zip(old, (layer.qkv.weight, layer.qkv.bias), strict=True):
        same = (before == after).view(3, 4, 16, -1).all(-1).all(-1)
        assert same.tolist() == [[True, False, True, True]] * 2 + [[True] * 4]
    assert torch.allclose(layer.qkv.weight[16:32], old[0][16:32] * 0.5**0.5, rtol=1e-5)


def published(q: Tensor, k: Tensor, tops: Tensor, tau: float) -> None:
    """The rule of the paper, written out: W_q and W_k of each head times sqrt(tau / s)."""
    for head, top in enumerate(tops.tolist()):
        if top > tau:
            rows = slice(16 * head, 16 * head + 16)
            q[rows] *= (tau / top) ** 0.5
            k[rows] *= (tau / top) ** 0.5


def test_each_clip_of_a_run_with_muon_is_that_of_the_published_rule() -> None:
    """Twenty steps. The oracle computes the maxima densely in float64, before each step."""
    torch.manual_seed(0)
    model, x, y = MultiHead(bias=False), torch.randn(4, T, C), torch.randn(4, T, C)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.3, weight_decay=0.0)
    weight, clipped = model.inner.in_proj_weight, 0
    with Monitor.attach(model, every=1) as monitor:
        for _ in range(20):
            q, k, _ = (
                F.linear(x, w).detach().double().unflatten(-1, (4, 16)).transpose(1, 2)
                for w in weight.chunk(3)
            )
            tops = (q @ k.mT / 4).amax((0, 2, 3))
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            wanted = weight.detach().clone()
            published(*wanted.chunk(3)[:2], tops, TAU)
            for record in monitor.step():
                clipped += len(qk_clip_(model, record.max_logits, TAU))
            assert torch.allclose(weight, wanted, rtol=1e-5, atol=0.0)
    assert clipped > 5


def test_other_projections_are_passed() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query_key = nn.Linear(C, 2 * C, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.query_key(x).chunk(2, -1))
            return F.scaled_dot_product_attention(q, k, k)

    torch.manual_seed(0)
    model, x = Fused(), 3 * torch.randn(2, T, C)
    record = record_of(model, x)
    with pytest.raises(
        ValueError, match="the projections of the model are not known: pass projections="
    ):
        qk_clip_(model, record.max_logits, 0.1)
    w = model.query_key.weight
    known = {"": Projections([HeadRows(w, 4, 16)], [HeadRows(w, 4, 16, C)])}
    qk_clip_(model, record.max_logits, 0.1, projections=known)
    assert max(record_of(model, x).max_logits[""]) <= 0.1


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_has_to_be_positive(tau: float) -> None:
    with pytest.raises(ValueError, match="tau must be a positive number"):
        qk_clip_(ours(norm=None), {"": [1.0] * 4}, tau)


@pytest.mark.parametrize("top", [math.nan, math.inf])
def test_what_is_refused_changes_nothing(top: float) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = ours(norm=None), ours(norm=None)

    model = Two()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="the largest logit of b is not finite"):
        qk_clip_(model, {"a": [9.0] * 4, "b": [top] * 4}, TAU)
    with pytest.raises(ValueError, match="b has 3 maxima for a parameter of 4 heads"):
        qk_clip_(model, {"a": [9.0] * 4, "b": [9.0] * 3}, TAU)
    gainless = ours(norm=NormDialect(gain="none"))
    with pytest.raises(ValueError, match="normalised and have no gain"):
        qk_clip_(gainless, {"": [9.0] * 4}, TAU)
    assert all(torch.equal(p, state[n]) for n, p in model.state_dict().items())

"""Modules that call FlexAttention, under the names and in the ways in which they do."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from qknorm.monitor import Monitor
from test_taps import CAUSAL, B, C, D, H, T, agree, dense

IDS = torch.tensor([[0] * 10 + [1] * 20 + [2] * 7, [0] * 36 + [1]])
compiled_flex = torch.compile(flex_attention, dynamic=False)


class Base(nn.Module):
    """Projections; keeps q and k for the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, H * D)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Contiguous: of other views of a product the compiler cannot lower FlexAttention on a CPU.
        q, k = (f(x).unflatten(-1, (-1, D)).transpose(1, 2).contiguous() for f in (self.q, self.k))
        self.seen.append((q.detach(), k.detach()))
        return q, k


class ByName(Base):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k = self.project(x)
        return flex_attention(q, k, k, **options)


class ByModule(Base):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k = self.project(x)
        return flex.flex_attention(q, k, k, **options)


class Compiled(Base):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k = self.project(x)
        return compiled_flex(q, k, k, **options)


class OnTheClass(Base):
    """As torchtitan keeps it."""

    _flex: ClassVar[Any] = staticmethod(torch.compile(flex_attention, dynamic=False))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k = self.project(x)
        return OnTheClass._flex(q, k, k, **options)


def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (IDS[b, q] == IDS[b, k])


PACKED = CAUSAL & (IDS[:, None, :, None] == IDS[:, None, None, :])


def run(module: Base, x: Tensor, sample: int | None = None, **options: Any) -> Any:
    before = module(x, **options)
    with Monitor.attach(module, every=1, sample=sample) as monitor:
        out = module(x, **options)
        record = monitor.step()[0]
    assert torch.equal(out, before)
    return record.layers[""]


@pytest.mark.parametrize("kind", [ByName, ByModule, Compiled, OnTheClass])
def test_documents(kind: type[Base]) -> None:
    torch.manual_seed(1)
    module, x = kind(), 3 * torch.randn(B, T, C)
    block_mask = create_block_mask(packed, B, None, T, T, device="cpu")
    with torch.no_grad():
        found = run(module, x, block_mask=block_mask, scale=0.5)
    agree(found, dense(*module.seen[-1], PACKED, scale=0.5))


def test_a_mask_of_every_head_and_a_modified_score() -> None:
    torch.manual_seed(2)
    module, x, slopes = ByName(), 3 * torch.randn(B, T, C), torch.tensor([0.1, 0.2, 0.3, 0.4])
    tables = torch.randn(B, 2 * T)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 5 * torch.tanh(s / 5) - slopes[h] * (q - k) + tables[b][q - k + T]

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 3 + 5 * h)

    block_mask = create_block_mask(window, None, H, T, T, device="cpu")
    with torch.no_grad():
        found = run(module, x, block_mask=block_mask, score_mod=score)

    q, k = (t.double() for t in module.seen[-1])
    distance = torch.arange(T)[:, None] - torch.arange(T)
    visible = (distance >= 0) & (distance < 3 + 5 * torch.arange(H)[:, None, None])
    bias = tables[:, (distance + T)][:, None].double() - slopes.double()[:, None, None] * distance
    s = 5 * torch.tanh(q @ k.mT * D**-0.5 / 5) + bias
    top = s.masked_fill(~visible, -torch.inf).amax((0, 2, 3))
    p = s.masked_fill(~visible, -torch.inf).softmax(-1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.tensor(found.max_logit).double(), top, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.tensor(found.entropy_nats).double(), entropy, rtol=2e-5, atol=2e-5)


def test_inside_a_compiled_model_a_mask_is_measured_and_a_modified_score_is_named() -> None:
    torch.manual_seed(3)
    module, x = ByName(), 3 * torch.randn(B, T, C)
    block_mask = create_block_mask(packed, B, None, T, T, device="cpu")
    with torch.no_grad(), Monitor.attach(module, every=1) as monitor:
        compiled = torch.compile(module, fullgraph=True, dynamic=False)
        compiled(x, block_mask=block_mask)
        agree(monitor.step()[0].layers[""], dense(*module.seen[-1], PACKED))
        compiled(x, score_mod=lambda s, b, h, q, k: s + 1)
        assert "score_mod" in monitor.step()[0].silent[""]


def test_names_are_as_before() -> None:
    names = ("flex_attention", "compiled_flex", "scaled_dot_product_attention")
    before = [globals()[name] for name in names] + [vars(OnTheClass)["_flex"], flex.flex_attention]
    with Monitor.attach(nn.ModuleList([ByName(), OnTheClass(), Compiled(), ByModule()]), every=1):
        assert globals()["flex_attention"] is not before[0]
    after = [globals()[name] for name in names] + [vars(OnTheClass)["_flex"], flex.flex_attention]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert scaled_dot_product_attention is torch.nn.functional.scaled_dot_product_attention

"""Row blocks of fused projections: Muon orthogonalises the update of each, and the weight follows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from qknorm.nn import Attention, AttentionConfig, param_groups, row_blocks

C = 32


def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(AttentionConfig(dim=C, num_heads=4, num_kv_heads=2))


def batch(seed: int) -> Tensor:
    return torch.randn(2, 8, C, generator=torch.Generator().manual_seed(seed))


def muon(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize(("split", "sizes"), [("qkv", [32, 16, 16]), ("heads", [8] * 8)])
def test_muon_updates_each_block_by_itself(split: str, sizes: list[int]) -> None:
    """Three steps, with accumulation and clipping, against Muon on blocks that are copies."""
    model = layer()
    (matrix,) = (g for g in param_groups(model, weight_decay=0.0, split=split) if g["name"] == "matrix")
    blocks = matrix["params"][: len(sizes)]
    assert [b.shape for b in blocks] == [(n, C) for n in sizes]
    assert matrix["params"][len(sizes) :] == [model.out.weight]
    whole = model.qkv.weight
    copies = [Parameter(rows.detach().clone()) for rows in whole.split(sizes)]
    ours, oracle = muon(blocks), muon(copies)
    for step in range(3):
        ours.zero_grad()
        wanted = torch.zeros_like(whole)
        for part in range(2):
            x = batch(10 * step + part)
            twin = copy.deepcopy(model)
            twin.zero_grad()
            twin(x).square().mean().backward()
            wanted += twin.qkv.weight.grad
            model(x).square().mean().backward()
        assert torch.equal(whole.grad, wanted)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for one, gradient in zip(copies, whole.grad.split(sizes), strict=True):
            one.grad = gradient.clone()
        ours.step()
        oracle.step()
        assert torch.equal(whole, torch.cat([c.detach() for c in copies]))
        model.out.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_do_not_pile_up(set_to_none: bool) -> None:
    model = layer()
    optimizer = muon(param_groups(model, weight_decay=0.0, split="heads")[0]["params"])
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(0)).square().mean().backward()
    twin = layer()
    twin(batch(0)).square().mean().backward()
    assert torch.equal(model.qkv.weight.grad, twin.qkv.weight.grad)


def test_a_model_that_moves_takes_its_blocks_along() -> None:
    model = layer()
    blocks = row_blocks(model.qkv.weight, [32, 16, 16])
    model.double()
    optimizer = torch.optim.SGD(blocks, lr=1.0)
    before = model.qkv.weight.detach().clone()
    model(batch(0).double()).square().mean().backward()
    optimizer.step()
    assert blocks[0].dtype == torch.float64
    assert torch.equal(model.qkv.weight, before - model.qkv.weight.grad)


def test_multihead_attention_is_known_and_embeddings_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(7, C), nn.MultiheadAttention(C, 4))
    groups = {g["name"]: g["params"] for g in param_groups(model, weight_decay=0.1, split="heads")}
    assert [len(p) for p in groups["matrix"]] == [8] * 12 + [C]
    assert model[0].weight in set(groups["decay"])


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks of \[3, 3\] rows do not make up the 8 rows"):
        row_blocks(Parameter(torch.zeros(8, 2)), [3, 3])
    with pytest.raises(ValueError, match='split must be "qkv", "heads" or None; got'):
        param_groups(layer(), weight_decay=0.0, split="head")  # type: ignore[arg-type]

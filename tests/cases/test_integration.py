"""Public failures (see README.md) about conventions, compilation and optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qknorm import Mask, NormDialect, logit_stats
from qknorm.nn import Attention, AttentionConfig, QKNorm, RotaryEmbedding, param_groups


def test_case_23_a_stored_zero_of_offset_one_is_a_gain_of_one():
    torch.manual_seed(0)
    shifted, plain = QKNorm(2, 1, 8, NormDialect(offset=1.0)), QKNorm(2, 1, 8)
    for stored, gain in zip(shifted.parameters(), shifted.effective_gains(), strict=True):
        assert torch.equal(stored, torch.zeros_like(stored))
        assert torch.equal(gain, torch.ones_like(stored))
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    for a, b in zip(shifted(q, k), plain(q, k), strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() > 0.5  # read as a plain gain, both would be 0


def test_case_23_shifting_twice_would_show_as_logits_times_4():
    torch.manual_seed(1)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    right, twice = QKNorm(2, 2, 8, NormDialect(offset=1.0)), QKNorm(2, 2, 8, NormDialect(offset=1.0))
    with torch.no_grad():
        for stored in twice.parameters():
            stored += 1
        once_max, twice_max = (
            logit_stats(*norm(q, k), mask=Mask()).max_logit for norm in (right, twice)
        )
    assert_close(twice_max, once_max * 4)


def test_case_23_reset_and_load_keep_the_convention():
    norm = QKNorm(2, 2, 8, NormDialect(offset=1.0))
    with torch.no_grad():
        norm.q_gain.fill_(0.25)
    copy_ = QKNorm(2, 2, 8, NormDialect(offset=1.0))
    copy_.load_state_dict(norm.state_dict())
    assert torch.equal(copy_.effective_gains()[0], torch.full((2, 8), 1.25))
    copy_.reset_parameters()
    assert torch.equal(copy_.effective_gains()[0], torch.ones(2, 8))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        config = AttentionConfig(dim=16, num_heads=2, num_kv_heads=1, window=5)
        self.layers = nn.ModuleList(Attention(config) for _ in range(2))
        self.rotary = RotaryEmbedding(4, layout="half")

    def forward(self, x, stats=False):
        rope, found = self.rotary(x.shape[1]), []
        for layer in self.layers:
            y = layer(x, rope=rope, stats=stats)
            if stats:
                y, layer_stats = y
                found.append(layer_stats)
            x = x + y
        return x, found


def test_case_24_statistics_asked_for_after_compilation_come_from_both_layers():
    torch.manual_seed(2)
    model, x = TwoLayers(), torch.randn(2, 12, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    first, none = compiled(x)
    assert none == []
    again, found = compiled(x, stats=True)
    plain, expected = model(x, stats=True)
    assert_close(first, again, atol=0, rtol=0)
    assert_close(again, plain, atol=1e-5, rtol=1e-5)
    for a, b in zip(found, expected, strict=True):
        assert a.row_count == 24
        for name in ("max_logit", "entropy_nats", "entropy_ratio"):
            assert_close(getattr(a, name), getattr(b, name), atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[0].max_logit, found[1].max_logit)


NAMES = ["q_norm", "query_layernorm", "ln_q", "norms.0"]


class NamedNorms(nn.Module):
    """A norm under each name that a filter by name knows or forgets, and a plain weight."""

    def __init__(self):
        super().__init__()
        self.q_norm = QKNorm(4, 2, 8)
        self.query_layernorm = QKNorm(4, 2, 8, NormDialect(gain="shared"))
        self.ln_q = QKNorm(4, 2, 8, NormDialect(gain="full"))
        self.norms = nn.ModuleList([QKNorm(4, 2, 8)])
        self.attention = Attention(AttentionConfig(dim=16, num_heads=2, sink="token"))
        self.proj = nn.Linear(16, 16, bias=False)

    def gains(self):
        return [p for name in NAMES for p in self.get_submodule(name).parameters()]


def decay(model, groups):
    """10 000 AdamW steps with zero gradients, lr 1e-3; the groups carry the decay of 0.1."""
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, foreach=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(10_000):
        optimizer.step()


def test_case_26_gains_survive_10_000_steps_of_weight_decay_under_any_name():
    torch.manual_seed(3)
    model = NamedNorms()
    weight, sink = model.proj.weight.detach().clone(), model.attention.sink_key.detach().clone()
    decay(model, param_groups(model, weight_decay=0.1))
    for gain in model.gains():
        assert torch.equal(gain, torch.ones_like(gain))
    assert torch.equal(model.attention.sink_key, sink)
    assert_close(model.proj.weight, weight * 0.3679, rtol=1e-3, atol=0)


def test_case_26_without_the_groups_the_gain_falls_to_0_3679():
    """The fault itself, so that the test above cannot pass for want of decay."""
    model = QKNorm(2, 2, 8)
    decay(model, list(model.parameters()))
    assert_close(model.q_gain.detach(), torch.full((2, 8), 0.3679), rtol=1e-3, atol=0)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_case_26_marks_stay_effective_through_deepcopy(copies):
    model = NamedNorms()
    for _ in range(copies):
        model = copy.deepcopy(model)
    groups = {g["name"]: g for g in param_groups(model, weight_decay=0.1)}
    without = {id(p) for p in groups["no_decay"]["params"]}
    assert groups["no_decay"]["weight_decay"] == 0
    sinks = [model.attention.sink_key, model.attention.sink_value]
    for p in [*model.gains(), *sinks, *model.attention.norm.parameters()]:
        assert id(p) in without


def test_case_26_a_two_dimensional_gain_is_not_a_matrix():
    model = NamedNorms()
    assert model.q_norm.q_gain.dim() == 2
    groups = {g["name"]: g["params"] for g in param_groups(model, weight_decay=0.1)}
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for p in groups["matrix"]}
    assert matrices == {"proj.weight", "attention.qkv.weight", "attention.out.weight"}

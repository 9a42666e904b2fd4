"""Parameter groups and marks: what decays, what a matrix optimizer may take."""

import copy

import pytest
import torch
from torch import nn

from qknorm import NormDialect
from qknorm.nn import Attention, AttentionConfig, QKNorm, mark, marked_parameters, param_groups


class Model(nn.Module):
    def __init__(self, sink="logit", dialect=NormDialect(), bias=True):
        super().__init__()
        self.embed = nn.Embedding(7, 16)
        self.attention = Attention(
            AttentionConfig(dim=16, num_heads=2, norm=dialect, sink=sink, bias=bias, gate=True)
        )
        self.norm = nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 16, 3)
        self.lm_head = nn.Linear(16, 7, bias=False)


def names_by_group(model, groups):
    names = {id(p): name for name, p in model.named_parameters()}
    return {g["name"]: {names[id(p)] for p in g["params"]} for g in groups}


def test_every_parameter_is_in_exactly_one_group_with_its_decay():
    model = Model()
    groups = param_groups(model, weight_decay=0.1)
    found = [p for g in groups for p in g["params"]]
    assert len(found) == len({id(p) for p in found}) == len(list(model.parameters()))
    assert {g["name"]: g["weight_decay"] for g in groups} == {
        "matrix": 0.1,
        "decay": 0.1,
        "no_decay": 0.0,
    }
    assert names_by_group(model, groups) == {
        "matrix": {"attention.qkv.weight", "attention.gate.weight", "attention.out.weight"},
        "decay": {"embed.weight", "conv.weight", "lm_head.weight"},
        "no_decay": {
            "attention.qkv.bias",
            "attention.gate.bias",
            "attention.out.bias",
            "attention.norm.q_gain",
            "attention.norm.k_gain",
            "attention.sink_logit",
            "norm.weight",
            "norm.bias",
            "conv.bias",
        },
    }


@pytest.mark.parametrize("gain", ["per_head", "shared", "full"])
@pytest.mark.parametrize("sink", ["logit", "token"])
def test_gains_and_sinks_of_any_shape_do_not_decay(gain, sink):
    model = Model(sink, NormDialect(gain=gain))
    groups = names_by_group(model, param_groups(model, weight_decay=0.1))
    own = {name for name, _, _, _ in marked_parameters(model)}
    assert len(own) == (3 if sink == "logit" else 4)
    assert own <= groups["no_decay"]


def test_empty_groups_are_left_out():
    groups = param_groups(QKNorm(2, 2, 8), weight_decay=0.1)
    assert [g["name"] for g in groups] == ["no_decay"]
    assert param_groups(nn.Identity(), weight_decay=0.1) == []


def test_frozen_parameters_are_left_out():
    model = Model()
    model.attention.qkv.weight.requires_grad_(False)
    model.attention.norm.q_gain.requires_grad_(False)
    names = set().union(*names_by_group(model, param_groups(model, weight_decay=0.1)).values())
    assert not names & {"attention.qkv.weight", "attention.norm.q_gain"}
    assert "attention.norm.k_gain" in names


def test_no_matrix_says_which_names_a_matrix_optimizer_must_not_take():
    model = Model()
    groups = names_by_group(model, param_groups(model, weight_decay=0.1, no_matrix=("qkv",)))
    assert groups["matrix"] == {"attention.gate.weight", "attention.out.weight"}


def test_gain_decay_applies_to_gains_stored_as_one_plus_w_and_pulls_them_to_one():
    model = Model(dialect=NormDialect(offset=1.0))
    groups = param_groups(model, weight_decay=0.1, gain_decay=0.05)
    assert names_by_group(model, groups)["gain"] == {"attention.norm.q_gain", "attention.norm.k_gain"}
    assert {g["name"]: g["weight_decay"] for g in groups}["gain"] == 0.05
    gain = model.attention.norm.q_gain
    with torch.no_grad():
        gain.fill_(0.5)
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    gain.grad = torch.zeros_like(gain)
    optimizer.step()
    assert torch.allclose(model.attention.norm.effective_gains()[0], torch.tensor(1 + 0.5 * 0.995))
    # The sink is no gain and does not decay with them.
    assert "attention.sink_logit" in names_by_group(model, groups)["no_decay"]


def test_gain_decay_is_refused_for_gains_stored_as_w():
    with pytest.raises(ValueError, match=r"attention\.norm\.q_gain"):
        param_groups(Model(), weight_decay=0.1, gain_decay=0.05)


def test_marks_can_be_read_by_other_trainers():
    model = Model(dialect=NormDialect(offset=1.0))
    found = {name: (p, kind, offset) for name, p, kind, offset in marked_parameters(model)}
    assert set(found) == {"attention.norm.q_gain", "attention.norm.k_gain", "attention.sink_logit"}
    for name, (p, kind, offset) in found.items():
        assert p is model.get_parameter(name)
        assert kind == p.qknorm_kind == ("sink" if "sink" in name else "gain")
        assert offset == p.qknorm_offset == (0.0 if "sink" in name else 1.0)
        assert p.no_weight_decay is True
        assert p.use_muon is False
    assert not hasattr(model.attention.qkv.weight, "qknorm_kind")


def test_marks_are_set_on_construction_and_renewed_on_copies():
    model = Model()
    assert model.attention.norm.q_gain.qknorm_kind == "gain"
    twin = copy.deepcopy(model)
    for name, p, kind, _ in marked_parameters(twin):
        assert p is twin.get_parameter(name)
        assert p is not model.get_parameter(name)
        assert p.qknorm_kind == kind
        assert p.no_weight_decay is True


def test_a_parameter_replaced_by_loading_or_casting_stays_marked():
    model = Model().to(torch.bfloat16)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    groups = names_by_group(model, param_groups(model, weight_decay=0.1))
    assert {"attention.norm.q_gain", "attention.norm.k_gain", "attention.sink_logit"} <= groups[
        "no_decay"
    ]


def test_shared_parameters_are_listed_once():
    model = Model()
    model.lm_head.weight = model.embed.weight
    found = [id(p) for g in param_groups(model, weight_decay=0.1) for p in g["params"]]
    assert len(found) == len(set(found))
    torch.optim.AdamW(param_groups(model, weight_decay=0.1))  # refuses a parameter in two groups


def test_mark_returns_the_parameter_it_marks():
    parameter = nn.Parameter(torch.ones(2, 2))
    assert mark(parameter, "gain", offset=1.0) is parameter
    assert (parameter.qknorm_kind, parameter.qknorm_offset) == ("gain", 1.0)

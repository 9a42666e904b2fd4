"""Parameter groups and marks: what decays, what a matrix optimizer may take."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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


# F10: told by type and by tying, names as whole parts.


def matrices(model, **options):
    return names_by_group(model, param_groups(model, weight_decay=0.1, **options)).get("matrix", set())


class Gpt(nn.Module):
    """A GPT whose embeddings and head are named as the caller says."""

    def __init__(self, tokens="wte", positions="wpe", head="lm_head", *, tie=None):
        super().__init__()
        if tie == "head first":
            self.add_module(head, nn.Linear(16, 11, bias=False))
        self.add_module(tokens, nn.Embedding(11, 16))
        self.add_module(positions, nn.Embedding(8, 16))
        self.h = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32) for _ in range(2))
        self.ln_f = nn.LayerNorm(16)
        if tie != "head first":
            self.add_module(head, nn.Linear(16, 11, bias=False))
        if tie:
            getattr(self, head).weight = getattr(self, tokens).weight


DECODER_LAYER = {
    "self_attn.in_proj_weight",
    "self_attn.out_proj.weight",
    "multihead_attn.in_proj_weight",
    "multihead_attn.out_proj.weight",
    "linear1.weight",
    "linear2.weight",
}


def test_f10_a_decoder_layer_of_torch_is_matrices_norms_and_biases():
    model = nn.TransformerDecoderLayer(16, 2, 32)
    groups = names_by_group(model, param_groups(model, weight_decay=0.1))
    assert groups["matrix"] == DECODER_LAYER
    assert groups.keys() == {"matrix", "no_decay"}


@pytest.mark.parametrize(
    ("tokens", "positions", "head"),
    [
        ("wte", "wpe", "lm_head"),
        ("tok_emb", "pos_emb", "head"),
        ("tok_embeddings", "pos", "output"),
        ("embed_in", "x", "embed_out"),
        ("vectors", "places", "lm_head"),
    ],
)
def test_f10_a_gpt_keeps_embeddings_and_head_from_the_matrix_optimizer(tokens, positions, head):
    wanted = {f"h.{i}.{name}" for i in range(2) for name in DECODER_LAYER}
    for tie in (None, "embedding first", "head first"):
        model = Gpt(tokens, positions, head, tie=tie)
        assert matrices(model) == wanted
        groups = names_by_group(model, param_groups(model, weight_decay=0.1))
        outside = {f"{positions}.weight", f"{tokens}.weight", f"{head}.weight"}
        assert groups["decay"] == outside & {name for name, _ in model.named_parameters()}
        wrapped = nn.Sequential()
        wrapped.add_module("module", model)
        assert matrices(wrapped) == {f"module.{name}" for name in wanted}
    if tokens == "vectors":  # a tie is enough, whatever the names
        assert matrices(Gpt("vectors", "places", "logits", tie="head first")) == wanted


def test_f10_an_output_inside_a_numbered_block_is_no_head():
    model = nn.ModuleDict({"layer": nn.ModuleList([nn.ModuleDict({"output": nn.Linear(4, 4)})])})
    model["multihead"], model["outputs_of"], model["subheading"] = (nn.Linear(4, 4) for _ in range(3))
    assert matrices(model) == {
        "layer.0.output.weight",
        "multihead.weight",
        "outputs_of.weight",
        "subheading.weight",
    }


def test_f10_names_in_no_matrix_are_whole_parts_anywhere():
    model = nn.ModuleDict({"router": nn.ModuleList([nn.Linear(4, 4)]), "routers": nn.Linear(4, 4)})
    assert matrices(model) == {"router.0.weight", "routers.weight"}
    assert matrices(model, no_matrix=("router",)) == {"routers.weight"}


class CohereLayerNorm(nn.Module):
    """A norm of another project, with a gain per head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


def test_f10_what_is_no_matrix_for_its_shape_or_its_owner():
    """Convolutions, experts, one row; norms with two axes; biases with three; a bag of embeddings."""
    model = nn.ModuleDict(
        {
            "conv": nn.Conv1d(4, 4, 3),
            "value": nn.Linear(8, 1),
            "q_norm": CohereLayerNorm(),
            "wide": nn.LayerNorm((4, 8)),
            "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "bag": nn.EmbeddingBag(5, 8),
        }
    )
    model.register_parameter("experts", nn.Parameter(torch.ones(3, 8, 8)))
    model.register_parameter("pos_emb", nn.Parameter(torch.ones(9, 8)))
    groups = names_by_group(model, param_groups(model, weight_decay=0.1))
    assert groups["matrix"] == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert groups["decay"] == {"conv.weight", "value.weight", "bag.weight", "experts", "pos_emb"}
    assert groups["no_decay"] >= {
        "q_norm.weight",
        "wide.weight",
        "wide.bias",
        "attention.bias_k",
        "attention.bias_v",
    }


class Adapted(nn.Module):
    """LoRA over a frozen base, with the types and names of peft 0.21."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        ends = base.weight.shape
        if isinstance(base, nn.Embedding):
            self.lora_embedding_A, self.lora_embedding_B = (
                nn.ParameterDict({"default": nn.Parameter(torch.randn(*shape))})
                for shape in ((rank, ends[0]), (ends[1], rank))
            )
        else:
            self.lora_A = nn.ModuleDict({"default": nn.Linear(ends[1], rank, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, ends[0], bias=False)})


def test_f10_a_low_rank_adapter_trains_its_two_matrices_over_a_frozen_base():
    model = Gpt().requires_grad_(False)
    for owner in (model, *model.h):
        for name in ("wte", "lm_head", "linear1"):
            if hasattr(owner, name):
                setattr(owner, name, Adapted(getattr(owner, name)))
    groups = names_by_group(model, param_groups(model, weight_decay=0.1))
    assert groups == {
        "matrix": {f"h.{i}.linear1.lora_{m}.default.weight" for i in range(2) for m in "AB"},
        "decay": {
            "lm_head.lora_A.default.weight",
            "lm_head.lora_B.default.weight",
            "wte.lora_embedding_A.default",
            "wte.lora_embedding_B.default",
        },
    }


def test_f10_muon_takes_the_matrix_group_and_adamw_the_others():
    model = Gpt(tie="embedding first")
    groups = {g.pop("name"): g for g in param_groups(model, weight_decay=0.1)}
    optimizers = [torch.optim.Muon([groups.pop("matrix")], lr=0.1)]
    optimizers.append(torch.optim.AdamW(groups.values(), lr=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_f10_shards_of_fully_shard_are_grouped_and_flat_parameters_are_refused(one_rank):
    model, sharded, flat = (Gpt(tie="embedding first") for _ in range(3))
    for block in sharded.h:
        fully_shard(block)
    fully_shard(sharded)
    assert names_by_group(sharded, param_groups(sharded, weight_decay=0.1)) == names_by_group(
        model, param_groups(model, weight_decay=0.1)
    )
    wrapped = FullyShardedDataParallel(flat, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="before wrapping"):
        param_groups(wrapped, weight_decay=0.1)

"""Public failures of other projects that an auditor can meet, found in the gains. Each faulty
module is found with its code and its evidence; nothing of that code is said about its right twin.

Shapes: B batch, T tokens, H heads (Hk of k and v), D head width, R rotary width.
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from audited import (
    Layer,
    Model,
    codes_of,
    eager,
    formula_of,
    model_of,
    normed,
    only,
    rms,
    sdpa,
    tokens,
    uneven,
)
from qknorm.auditor import audit
from qknorm.auditor.targets import load
from qknorm.auditor.weights import audit_weights
from qknorm.nn import param_groups

# 20, 22, 23: gains that come from elsewhere -----------------------------------------------------------


def test_case_20_unit_and_shared_gains_in_a_trained_model():
    per_head = torch.tensor([1.0, 4.0])[:, None].expand(2, 64)  # the spread that each head had

    def report_of(gain):
        return audit(model_of(normed, D=64, gains=(gain, gain)), tokens(), trained=True)

    unit, shared, own = report_of(torch.ones(2, 64)), report_of(uneven(64)), report_of(per_head)
    (one,) = only(unit, "QK020")
    assert one.evidence["value"] == pytest.approx(1.0, abs=1e-4)
    assert "QK006" in codes_of(shared)
    assert formula_of(shared).gain == "shared"
    assert not codes_of(own) & {"QK006", "QK020"}
    assert_close(formula_of(own).q_gain_values, per_head.double(), atol=1e-3, rtol=0)


INITIAL = 7.0  # so that "left at its initial value" shows


def exported(drop):
    """A target at its initial values, after a load of what an export has written."""
    torch.manual_seed(0)
    source = model_of(normed, layers=2)
    written = {name: x for name, x in source.state_dict().items() if not drop(name)}
    target = model_of(normed, layers=2, gains=(torch.full((2, 8), INITIAL),) * 2)
    target.load_state_dict(written, strict=False)
    return source, target


@pytest.mark.parametrize(
    ("dropped", "found"),
    [
        ("_gain", {("layers.0", "q"), ("layers.1", "q")}),
        ("layers.1.k_gain", {("layers.1", "k")}),
    ],
)
def test_case_22_a_merged_export_without_gains(dropped, found):
    _, target = exported(lambda name: name.endswith(dropped))
    faults = only(audit(target, tokens(), trained=True), "QK020")
    assert {(one.layer, one.message.split()[3]) for one in faults} == found
    assert all(one.evidence["value"] == pytest.approx(INITIAL, rel=1e-4) for one in faults)
    source, whole = exported(lambda name: False)
    assert_close(whole(tokens()), source(tokens()), atol=0, rtol=0)
    report = audit(whole, tokens(), trained=True)
    assert "QK020" not in codes_of(report)
    assert_close(
        formula_of(report, 1).k_gain_values, source.layers[1].k_gain.double(), atol=1e-3, rtol=0
    )


def file_of(path, change):
    """Two layers under the names of released checkpoints."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs qknorm[transformers]")
    made = {}
    for layer in range(2):
        for side in "qk":
            name = f"model.layers.{layer}.self_attn.{side}"
            made[f"{name}_proj.weight"] = torch.randn(16, 8)
            made[f"{name}_norm.weight"] = uneven(8)
    change(made)
    safetensors.save_file(made, path)
    return audit_weights(path)


def test_case_22_a_file_without_a_gain_or_with_gains_at_their_initial_value(tmp_path):
    gain = "model.layers.1.self_attn.k_norm.weight"
    path = tmp_path / "merged.safetensors"
    (one,) = only(file_of(path, lambda made: made.pop(gain)), "QK016")
    assert (one.layer, one.message) == ("model.layers.1", "q has a norm and k has none")
    (one,) = only(file_of(path, lambda made: made[gain].fill_(INITIAL)), "QK020")
    assert (one.layer, one.evidence) == ("model.layers.1", {"value": INITIAL})
    assert not codes_of(file_of(path, lambda made: None)) & {"QK001", "QK016", "QK020"}


def test_case_22_a_checkpoint_whose_file_lacks_a_gain(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    safetensors = pytest.importorskip("safetensors.torch", reason="needs qknorm[transformers]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(uneven(8))
    model.save_pretrained(tmp_path)
    whole, inputs, *_ = load(str(tmp_path))
    assert "QK020" not in codes_of(audit(whole, inputs, trained=True))
    file = tmp_path / "model.safetensors"
    held = safetensors.load_file(file)
    del held["model.layers.1.self_attn.k_norm.weight"]
    safetensors.save_file(held, file, metadata={"format": "pt"})
    lacking, inputs, *_ = load(str(tmp_path))
    (one,) = only(audit(lacking, inputs, trained=True), "QK020")
    assert one.layer == "model.layers.1.self_attn"
    assert one.message.startswith("every gain of k is 1")


@pytest.mark.parametrize("stored", ["zero", "uneven"])
def test_case_23_gains_of_one_plus_w_are_read_back_as_what_they_do(stored):
    w = torch.zeros(2, 8) if stored == "zero" else uneven(2, 8) - 1.0

    def report_of(offset):
        made = model_of(lambda x, gain, side: rms(x, gain + offset), gains=(w, w))
        return audit(made, tokens(), trained=True)

    once, twice = report_of(1.0), report_of(2.0)
    for report, offset in ((once, 1.0), (twice, 2.0)):
        for values in (formula_of(report).q_gain_values, formula_of(report).k_gain_values):
            assert_close(values, (w + offset).double(), atol=1e-3, rtol=0)
    if stored == "zero":
        # Both sit at their initial value; what that is shows the second shift.
        values = [only(report, "QK020")[0].evidence["value"] for report in (once, twice)]
        assert values == [pytest.approx(1.0, rel=1e-4), pytest.approx(2.0, rel=1e-4)]
        bounds = [only(report, "QK022")[0].evidence["bound"] for report in (once, twice)]
        assert bounds[1] / bounds[0] == pytest.approx(4.0, rel=1e-3)
    else:
        assert not codes_of(once) & {"QK020"}


def test_case_23_zeros_read_as_plain_gains_leave_everything_without_effect():
    zeros = torch.zeros(2, 8)

    def report_of(offset):
        made = model_of(lambda x, gain, side: rms(x, gain + offset), gains=(zeros, zeros))
        return audit(made, tokens())

    plain, shifted = report_of(0.0), report_of(1.0)
    (one,) = only(plain, "QK009")  # q and k are 0: attention is uniform
    assert one.layer == "layers.0"
    assert not plain.formulas
    assert any("layers.0" in sentence for sentence in plain.not_probed)
    assert "QK009" not in codes_of(shifted)
    assert_close(formula_of(shifted).q_gain_values, torch.ones(2, 8).double(), atol=1e-3, rtol=0)


def test_case_23_a_file_that_stores_zeros(tmp_path):
    def as_offsets(made):
        for name, x in made.items():
            if "norm" in name:
                x.zero_()

    found = only(file_of(tmp_path / "offsets.safetensors", as_offsets), "QK020")
    assert {one.evidence["value"] for one in found} == {0.0}
    assert len(found) == 4


# 26: weight decay -------------------------------------------------------------------------------------

NAMES = {
    # The gains of q and k, and a filter of names that spares others.
    "q_norm": ("k_norm", "layernorm"),
    "query_layernorm": ("key_layernorm", "q_norm"),
    "ln_q": ("ln_k", "norm"),
    "norms.0": ("norms.1", "_norm"),
}


class NamedNorms(Layer):
    """A layer whose norms are called as its author liked."""

    def __init__(self, q_name, k_name):
        super().__init__(2, 8, None)
        self.names = q_name, k_name
        norms = [nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)]
        for norm in norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        if "." in q_name:
            self.norms = nn.ModuleList(norms)
        else:
            self.add_module(q_name, norms[0])
            self.add_module(k_name, norms[1])

    def hat(self, x, gain, side):
        return self.get_submodule(self.names[side == "k"])(x)


@pytest.mark.parametrize("name", NAMES)
def test_case_26_gains_that_decay_are_found_under_any_name(name):
    other, spared = NAMES[name]
    model = Model(lambda: NamedNorms(name, other), layers=1)
    by_name = [
        {"params": [p for n, p in model.named_parameters() if spared not in n], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if spared in n], "weight_decay": 0.0},
    ]
    wrong = torch.optim.AdamW([group for group in by_name if group["params"]], lr=1e-3)
    right = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    (one,) = only(audit(model, tokens(), optimizer=wrong), "QK010")
    assert one.evidence == {"weight_decay": 0.1}
    assert one.message == "gains of k and q decay by 0.1"
    assert "QK010" not in codes_of(audit(model, tokens(), optimizer=right))


def test_case_26_a_gain_with_two_axes_is_no_matrix():
    model = model_of(normed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    weights = [p for n, p in model.named_parameters() if p.ndim == 2 and "gain" not in n]
    (one,) = only(audit(model, tokens(), optimizer=torch.optim.Muon(matrices)), "QK010")
    assert "matrix optimizer" in one.message
    assert "QK010" not in codes_of(audit(model, tokens(), optimizer=torch.optim.Muon(weights)))


# 17: an audit keeps nothing alive ---------------------------------------------------------------------


def test_case_17_a_report_keeps_neither_the_model_nor_a_graph():
    model = model_of(normed, layers=2, attends={"eager": eager, "sdpa": sdpa})
    watched = [weakref.ref(x) for x in (model, *model.modules(), *model.parameters())]
    report = audit(model, tokens())
    assert len(report.formulas) == 2
    for formula in report.formulas.values():
        assert not formula.q_gain_values.requires_grad
    assert all(p.grad is None for p in model.parameters())
    del model
    gc.collect()
    assert not any(ref() is not None for ref in watched)

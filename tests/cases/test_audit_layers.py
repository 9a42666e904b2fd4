"""Models that an auditor must survive, and what it must read in them: layers that raise, frozen weights,
writing in place, shared keys, packed gains, long windows. F numbers are those of the faults.

Shapes: B batch, T tokens, H heads, D head width.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from audited import (
    D,
    H,
    Layer,
    Model,
    assert_sound,
    causal,
    codes_of,
    eager,
    formula_of,
    gains,
    grouped,
    hugging_face,
    model_of,
    normed,
    of,
    only,
    rms,
    sdpa,
    tokens,
    uneven,
)
from qknorm.auditor import audit

# F40: what raises -------------------------------------------------------------------------------------


class Guarding(Layer):
    """Refuses large projections, as a value guard in training does."""

    limit = None

    def hat(self, x, gain, side):
        if self.limit is not None and float(x.detach().abs().max()) > self.limit:
            raise RuntimeError("value guard")
        return rms(x, gain)


def guarding(*guarded, layers=3):
    model = Model(lambda: Guarding(H, D, None, gains=gains()), layers=layers)
    for n in guarded:
        model.layers[n].limit = 8.0
    return model


def test_f40_a_layer_that_raises_is_listed_and_the_others_are_audited():
    report = audit(guarding(1), tokens())
    assert list(report.formulas) == ["layers.0", "layers.2"]
    assert report.not_probed == ["layers.1 raised RuntimeError: value guard"]
    assert not report.codes
    # The findings of the others are still there.
    model = guarding(1)
    model.layers[2].value = rms
    assert [one.layer for one in only(audit(model, tokens()), "QK003")] == ["layers.2"]
    assert not audit(guarding(0, 1, 2), tokens()).formulas


def test_f40_a_rule_that_raises_costs_only_what_it_would_have_found(monkeypatch):
    from qknorm.auditor import auditor, rules

    def of_eps(layer):
        raise KeyError("eps")

    broken = tuple(of_eps if rule is rules.of_eps else rule for rule in rules.RULES_OF_A_LAYER)
    monkeypatch.setattr(auditor, "RULES_OF_A_LAYER", broken)
    model = model_of(normed, value=rms)
    report = audit(model, tokens())
    assert report.not_probed == ["layers.0, of eps raised KeyError: 'eps'"]
    assert report.codes == {"QK003"}
    assert formula_of(report).eps == pytest.approx(1e-6, rel=0.05)


def test_f40_an_attention_that_cannot_be_followed_is_listed(monkeypatch):
    from qknorm.auditor.trace import Trace

    own = Trace._sdpa

    def not_in_the_first(self, *args, **kwargs):
        if self.path == "layers.0":
            raise NotImplementedError("such a mask")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Trace, "_sdpa", not_in_the_first)
    report = audit(model_of(normed, layers=2, attends={"own": sdpa}), tokens())
    assert list(report.formulas) == ["layers.1"]
    assert report.not_probed == ["layers.0 raised NotImplementedError: such a mask"]


class Particular(Model):
    """Takes only the tokens that it was first called with."""

    seen = None

    def forward(self, tokens, path=None):
        self.seen = tokens if self.seen is None else self.seen
        if not torch.equal(self.seen, tokens):
            raise ValueError("other tokens")
        return super().forward(tokens, path)


def test_f40_a_probe_of_the_whole_model_that_raises_is_listed():
    model = Particular(lambda: Layer(H, D, normed, gains=gains()))
    report = audit(model, tokens())
    assert report.not_probed == ["leaks of eager raised ValueError: other tokens"]
    assert list(report.formulas) == ["layers.0", "layers.1"]
    assert not report.codes


@pytest.mark.parametrize("where", ["weights", "weights and inputs", "call"])
def test_f40_inference_mode(where):
    with torch.inference_mode(where != "call"):
        model = of(Layer)
        if where == "call":
            model.layers[0].value = rms
    held = {name: (p, p.clone(), p.is_inference()) for name, p in model.named_parameters()}
    with torch.inference_mode(where != "weights"):
        report = audit(model, tokens())
    assert list(report.formulas) == ["layers.0", "layers.1"], report.not_probed
    assert report.codes == ({"QK003"} if where == "call" else set())
    for name, p in model.named_parameters():
        own, value, was_inference = held[name]
        assert p is own
        assert torch.equal(p, value)
        assert p.is_inference() == was_inference


# F44: eps that counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-2, 0.1, 1.0])
def test_f44_an_eps_beside_what_it_is_added_to(eps):
    model = model_of(lambda x, gain, side: rms(x, gain, eps=eps))
    report = audit(model, tokens())
    (one,) = only(report, "QK007")
    (layer,) = model.layers
    seen = []
    layer.q.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    model(tokens())
    share = eps / (eps + float(seen[0].unflatten(-1, (H, D)).square().mean(-1).median()))
    assert one.evidence["share"] == pytest.approx(share, rel=0.05)
    assert f"{one.evidence['share']:.1%}" in one.message
    assert formula_of(report).eps == pytest.approx(eps, rel=0.05)
    assert report.codes == {"QK007"}, "it is no loss of precision"


def test_f44_what_is_large_for_a_small_layer_is_small_for_another():
    def report_of(size):
        model = model_of(lambda x, gain, side: rms(x, gain, eps=1e-3))
        with torch.no_grad():
            model.layers[0].q.weight *= size
            model.layers[0].k.weight *= size
        return audit(model, tokens())

    assert "QK007" not in codes_of(report_of(3.0))
    assert only(report_of(0.3), "QK007")[0].evidence["share"] > 0.02


# F52: frozen ------------------------------------------------------------------------------------------


def frozen(model):
    return model.requires_grad_(False)


def test_f52_a_frozen_model_is_found_what_a_trainable_one_is():
    def q_alone(x, gain, side):
        return rms(x, gain if side == "q" else None)

    for hat in (normed, q_alone, lambda x, gain, side: x):
        for pair in ((torch.ones(H, D), torch.ones(H, D)), gains()):
            model = model_of(hat, gains=pair)
            found = [audit(m, tokens(), trained=True) for m in (model, frozen(model))]
            free, fixed = ({(one.code, one.message) for one in report.findings} for report in found)
            assert free == fixed
            assert not any(p.requires_grad for p in model.parameters())
            if hat is not normed:
                assert "QK009" in codes_of(found[1])
    # The base alone is frozen.
    model = model_of(normed, gains=(torch.ones(H, D), torch.ones(H, D)))
    model.layers[0].q_gain.requires_grad_(False)
    (one,) = only(audit(model, tokens(), trained=True), "QK020")
    assert "every gain of q is 1" in one.message
    assert [p.requires_grad for p in (model.layers[0].q_gain, model.layers[0].k_gain)] == [False, True]


# F53: in place ----------------------------------------------------------------------------------------


class InPlace(Layer):
    """Writes into its projections, and into what it is given."""

    def forward(self, x, attend=None):
        x.mul_(1.5)
        q, k, v = (f(x) for f in (self.q, self.k, self.v))
        q *= 0.5
        k.mul_(0.25).add_(0.0)
        v.neg_()
        q, k, v = (y.unflatten(-1, (-1, self.D)) for y in (q, k, v))
        q, k = rms(q, self.q_gain), rms(k, self.k_gain)
        return self.out(self.attend(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2).flatten(2))


def softmax_in_place(q, k, v):
    k, v = grouped(q, k, v)
    s = q @ k.mT
    s *= q.shape[-1] ** -0.5
    s.masked_fill_(~causal(q.shape[2]), -torch.inf)
    s -= s.amax(-1, keepdim=True)
    s.exp_()
    return (s / s.sum(-1, keepdim=True)) @ v


def test_f53_writing_in_place():
    model = of(InPlace)
    report = audit(model, tokens())
    assert_sound(report)
    for n, layer in enumerate(model.layers):
        formula = formula_of(report, n)
        torch.testing.assert_close(
            formula.q_gain_values, layer.q_gain.detach().double(), atol=1e-3, rtol=0
        )
        # eps is seen beside the projections, of which a half and a quarter are normed.
        assert formula.eps == pytest.approx(4e-6, rel=0.05)
    softmax = audit(model_of(normed, attends={"own": softmax_in_place}), tokens())
    assert formula_of(softmax).scale == pytest.approx(D**-0.5, rel=1e-3)
    assert formula_of(softmax).causal
    assert not softmax.codes


# F54: keys of another layer ---------------------------------------------------------------------------


class Sharing(nn.Module):
    """The first layer makes the keys and values of all."""

    def __init__(self, layers=3, dim=8):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, dim), nn.Linear(dim, 31, bias=False)
        self.layers = nn.ModuleList(Sharer(H, D, normed, gains=gains()) for _ in range(layers))
        for layer in self.layers[1:]:
            del layer.k, layer.v
            layer.k_gain = None

    def forward(self, tokens):
        x, kv = self.embedding(tokens), None
        for layer in self.layers:
            out, kv = layer(F.rms_norm(x, x.shape[-1:]), kv)
            x = x + out
        return self.head(x)


class Sharer(Layer):
    def forward(self, x, kv):
        q = rms(self.q(x).unflatten(-1, (-1, D)), self.q_gain).transpose(1, 2)
        if kv is None:
            k, v = (f(x).unflatten(-1, (-1, D)) for f in (self.k, self.v))
            kv = rms(k, self.k_gain).transpose(1, 2), v.transpose(1, 2)
        return self.out(eager(q, *kv).transpose(1, 2).flatten(2)), kv


class Again(Model):
    """One layer, called twice."""

    def forward(self, tokens, path=None):
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + self.layers[0](F.rms_norm(x, x.shape[-1:]))
        return self.head(x)


def test_f54_each_attention_has_a_path_of_its_own():
    model = Sharing()
    report = audit(model, tokens())
    assert_sound(report, ["layers.0", "layers.1", "layers.2"])
    for n, layer in enumerate(model.layers):
        formula = formula_of(report, n)
        for found, gain in (
            (formula.q_gain_values, layer.q_gain),
            (formula.k_gain_values, model.layers[0].k_gain),
        ):
            torch.testing.assert_close(found, gain.detach().double(), atol=1e-3, rtol=0)
    model.layers[2].idle = nn.Linear(2, 2)
    assert only(audit(model, tokens()), "QK009")[0].layer == "layers.2"
    again = Again(lambda: Layer(H, D, normed, gains=gains()), layers=1)
    assert_sound(audit(again, tokens()), ["layers.0", "layers.0 #2"])


def gemma(name, **options):
    """What an audit says of a small text model of a Gemma whose last two layers share keys."""
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    config = getattr(transformers, f"{name}TextConfig")(
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=5,
        hidden_size_per_layer_input=8,
        vocab_size=97,
        vocab_size_per_layer_input=97,
        initializer_range=0.15,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(0)
    report = audit(getattr(transformers, f"{name}ForCausalLM")(config))
    assert list(report.formulas) == [f"model.layers.{n}.self_attn" for n in range(4)]
    assert "the formula of 4 of 4 attentions" in report.exercised
    return report


def test_f53_gemma_3n():
    report = gemma("Gemma3n", laurel_rank=4)
    # Two products in a row that mix its streams are no attention.
    assert not report.not_probed
    assert report.codes == {"QK003"}


def test_f54_gemma_4_whose_last_layers_share_keys():
    report = gemma("Gemma4", global_head_dim=16)
    assert [formula.window for formula in report.formulas.values()] == [5, None, 5, None]
    assert not codes_of(report) & {"QK009", "QK015", "QK016"}


# F55: a window longer than the text -------------------------------------------------------------------


def forgets_its_window_under_sdpa(monkeypatch, window):
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    own = modeling.create_sliding_window_causal_mask

    def create(config, *args, **kwargs):
        is_lost = config._attn_implementation == "sdpa"
        return (modeling.create_causal_mask if is_lost else own)(config, *args, **kwargs)

    monkeypatch.setattr(modeling, "create_sliding_window_causal_mask", create)
    types = ["sliding_attention"] * 2
    return hugging_face(sliding_window=window, use_sliding_window=True, layer_types=types)


@pytest.mark.parametrize("window", [5, 32])
def test_f55_a_window_that_one_path_forgets_is_seen(monkeypatch, window):
    model = forgets_its_window_under_sdpa(monkeypatch, window)
    assert {one.evidence["path"] for one in only(audit(model), "QK015")} >= {"eager"}
    monkeypatch.undo()
    report = audit(model)
    assert not report.codes
    assert not report.not_probed
    assert {formula.window for formula in report.formulas.values()} == {window}


def test_f55_a_window_that_no_text_shows_is_listed():
    model = hugging_face(
        sliding_window=200, use_sliding_window=True, layer_types=["sliding_attention"] * 2
    )
    listed = "a window of 200 keys: the model was called with 24 tokens"
    assert audit(model).not_probed == [listed]
    # Longer inputs show it.
    report = audit(model, torch.randint(5, 64, (1, 208)))
    assert not report.not_probed
    assert {formula.window for formula in report.formulas.values()} == {200}


# F56: gains in one parameter --------------------------------------------------------------------------


class Packed(Layer):
    def __init__(self, packed):
        super().__init__(H, D, None)
        self.gains = nn.Parameter(packed)

    def hat(self, x, gain, side):
        if self.gains.shape[-2] == H * 2:  # heads of both sides one below the other
            return rms(x, self.gains.view(2, H, D)[int(side == "k")])
        return rms(x, self.gains[..., int(side == "k"), :, :])


@pytest.mark.parametrize("shape", [(2, H, D), (1, 2, H, D), (2 * H, D), (2, 1, D)])
def test_f56_gains_that_are_packed_into_one_parameter(shape):
    packed = uneven(*shape)
    if len(shape) == 4:
        packed = packed[0]
    model = Model(lambda: Packed(packed), layers=1)
    report = audit(model, tokens(), trained=True)
    assert not report.codes, report.findings
    both = packed.reshape(2, -1, D).expand(2, H, D)
    kind = "shared" if shape == (2, 1, D) else "head"
    formula = formula_of(report)
    assert (formula.gain, formula.k_gain) == (kind, kind)
    for found, wanted in zip((formula.q_gain_values, formula.k_gain_values), both, strict=True):
        torch.testing.assert_close(found, wanted.double(), atol=1e-3, rtol=0)
    decays = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    (one,) = only(audit(model, tokens(), optimizer=decays), "QK010")
    assert one.evidence == {"weight_decay": 0.1}


class Given(Layer):
    """Its gains are the model's, which hands them over."""

    def __init__(self):
        super().__init__(H, D, None)

    def hat(self, x, gain, side, gains):
        return rms(x, gains[int(side == "k")])


class Giving(Model):
    def __init__(self):
        super().__init__(Given)
        self.gains = nn.Parameter(uneven(2, 2, H, D))

    def forward(self, tokens, path=None):
        x = self.embedding(tokens)
        for layer, own in zip(self.layers, self.gains, strict=True):
            x = x + layer(F.rms_norm(x, x.shape[-1:]), gains=own)
        return self.head(x)


def test_f56_a_gain_that_another_module_holds_is_a_gain():
    model = Giving()
    report = audit(model, tokens())
    assert_sound(report)
    for n in range(2):
        wanted = model.gains[n, 0].detach().double()
        torch.testing.assert_close(formula_of(report, n).q_gain_values, wanted, atol=1e-3, rtol=0)
    bare = audit(model_of(lambda x, gain, side: rms(x), gains=(None, None)), tokens())
    assert "QK005" in codes_of(bare)

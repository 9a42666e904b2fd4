"""Public failures (see README.md) about telemetry, seen through the monitor."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monitored import (
    MASKED,
    ROUNDING,
    Sdpa,
    agree,
    by_own,
    every_way,
    llama,
    own_layer,
    record_of,
    truth,
    visible_by,
)
from qknorm import Mask
from qknorm.monitor import Monitor
from qknorm.monitor.alerts import Alerts
from qknorm.nn import Attention, AttentionConfig, RotaryEmbedding
from test_telemetry import packed_logits


@every_way
def test_case_15_the_maximum_is_over_visible_pairs_of_real_tokens(way):
    logits, documents = packed_logits()
    mask = Mask(causal=True, documents=documents)
    layer = way(logits, mask)
    assert layer.max_logit == pytest.approx([2.5, 1.5], abs=1e-6)
    assert layer.rows == 5
    agree(layer, truth(logits, visible_by(mask, 8)))


@every_way
def test_case_15_the_answer_is_the_same_unpadded_and_as_padded_batch(way):
    logits, documents = packed_logits()
    padded = way(logits, Mask(causal=True, documents=documents))
    real = (documents[0] >= 0).nonzero().flatten()
    tight = logits[:, :, real][:, :, :, real]
    unpadded = way(tight, Mask(causal=True, documents=documents[:, real]))
    batch = torch.cat((logits[:, :, :4, :4], logits[:, :, 4:, 4:]))
    # A padding query sees real keys here, and must not count.
    batch[0, :, 3, 0] = batch[1, :, 2, 0] = batch[1, :, 3, 1] = 999.0
    rows = way(batch, Mask(causal=True, key_padding=documents.view(2, 4) >= 0))
    for layer in (unpadded, rows):
        assert layer.rows == padded.rows == 5
        for name in ("max_logit", "entropy_nats", "entropy_ratio"):
            assert getattr(layer, name) == pytest.approx(getattr(padded, name), abs=1e-5), name


@pytest.mark.parametrize("way", MASKED, ids=lambda f: f.__name__)
def test_case_15_sampled_rows_obey_the_mask_and_say_that_they_are_sampled(way):
    logits, documents = packed_logits()
    for sample in range(1, 8):
        record = way(logits, Mask(causal=True, documents=documents), sample=sample, whole=True)
        # The one row of a sample of one may be padding; then the layer is silent.
        assert list(record.layers) == ([] if record.silent else [""])
        assert not record.silent or sample == 1
        for layer in record.layers.values():
            assert layer.coverage == "sampled"
            assert layer.rows <= sample
            assert layer.max_logit[0] <= 2.5 + 1e-6
            assert layer.max_logit[1] <= 1.5 + 1e-6


def test_case_15_our_own_layer_is_exact_whatever_sample_says():
    logits, documents = packed_logits()
    layer = by_own(logits, Mask(causal=True, documents=documents), sample=2)
    assert (layer.coverage, layer.rows) == ("exact", 5)
    assert layer.max_logit == pytest.approx([2.5, 1.5], abs=1e-6)


@every_way
def test_case_15_a_maximum_below_zero_is_not_zero(way):
    """Two sequences; one has padding in front, where a whole row sees nothing."""
    logits = -50.0 - 10 * torch.rand(2, 2, 4, 4)
    real = torch.tensor([[False, True, True, True], [True, True, True, False]])
    mask = Mask(causal=True, key_padding=real)
    layer = way(logits, mask)
    assert max(layer.max_logit) < -50.0
    assert layer.rows == 6
    agree(layer, truth(logits, visible_by(mask, 4)))


@every_way
def test_case_15_where_nothing_is_visible_no_maximum_is_made_up(way):
    """The layer is named among the silent ones, or says -inf; it never says 0."""
    nothing = Mask(key_padding=torch.zeros(1, 3, dtype=torch.bool))
    record = way(torch.ones(1, 2, 3, 3), nothing, whole=True)
    assert record.max_logit == -math.inf
    assert record.layers.keys() | record.silent.keys() == {""}
    assert all(layer.rows == 0 for layer in record.layers.values())


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex_attention"])
def test_case_15_a_padded_llama_says_what_it_says_of_the_sequences_apart(kernel):
    model = llama(attn_implementation=kernel)
    with torch.no_grad():
        # Token 0 is padding; along its own direction, which no other token has, keys are large.
        model.embed_tokens.weight[:, 0] = 0.0
        model.embed_tokens.weight[0] = 10 * F.one_hot(torch.tensor(0), 32)
        for block in model.layers:
            block.self_attn.o_proj.weight[0] = block.mlp.down_proj.weight[0] = 0.0
            for name in ("q_proj", "k_proj"):
                getattr(block.self_attn, name).weight.mul_(40)
            block.self_attn.k_proj.weight[:, 0] = 1000.0
    tokens = torch.randint(1, 16, (2, 9))
    real = torch.ones(2, 9, dtype=torch.long)
    real[0, :3], real[1, 5:] = 0, 0
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    tokens = tokens * real
    # FlexAttention has no backward pass on the CPU; Hugging Face compiles it, which takes a minute.
    eager = torch.compiler.set_stance("force_eager")
    with Monitor.attach(model, every=1) as monitor, torch.no_grad(), eager:
        model(tokens, attention_mask=real, position_ids=positions)
        (padded,) = monitor.step()
        for i in range(2):
            model(tokens[i : i + 1, real[i] == 1])
        (apart,) = monitor.step()
        model(tokens, position_ids=positions)
        (trap,) = monitor.step()
    assert len(padded.layers) == 2
    for name, layer in padded.layers.items():
        assert trap.layers[name].top > 5 * layer.top > 0, "the padding is no trap"
        assert layer.rows == apart.layers[name].rows == 6 + 5
        for field in ("max_logit", "entropy_nats", "entropy_ratio", "q_rms", "k_rms"):
            right = pytest.approx(getattr(apart.layers[name], field), rel=2e-4, abs=2e-4)
            assert getattr(layer, field) == right, field


@every_way
def test_case_16_a_hidden_key_adds_zero_to_the_entropy(way):
    """Logits (0, 0, -inf): documents hide the key in the middle."""
    layer = way(torch.zeros(1, 1, 3, 3), Mask(documents=torch.tensor([[0, 9, 0]])))
    assert layer.entropy_nats == [pytest.approx(2 / 3 * math.log(2), abs=1e-6)]
    assert layer.entropy_ratio == [pytest.approx(1.0, abs=1e-6)]


@every_way
def test_case_16_a_key_of_probability_zero_adds_zero_to_the_entropy(way):
    layer = way(torch.tensor([0.0, 0.0, -1e30]).expand(1, 2, 3, 3), Mask())
    assert layer.entropy_nats == pytest.approx([math.log(2)] * 2, abs=1e-6)


@every_way
def test_case_16_rows_with_one_key_are_left_out_of_the_ratio_alone(way):
    layer = way(torch.zeros(1, 1, 3, 3), Mask(causal=True))
    assert layer.entropy_ratio == [pytest.approx(1.0, abs=1e-6)]
    assert layer.entropy_nats == [pytest.approx((math.log(2) + math.log(3)) / 3, abs=1e-6)]


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("written", ["front", "back"])
def test_case_16_the_length_of_the_buffer_does_not_enter_the_entropy(kind, written):
    """Logits (2, 2) in a buffer of 4096: a static cache is written from the front."""
    keys = torch.arange(4096)
    visible = (keys < 2 if written == "front" else keys >= 4094).view(1, 1, 1, 4096)
    k = visible.view(4096, 1).expand(1, 1, 4096, 4).float()
    mask = visible if kind == "bool" else torch.zeros(1).masked_fill(~visible, -math.inf)
    layer = record_of(Sdpa(), torch.ones(1, 1, 1, 4), k, attn_mask=mask, scale=0.5)
    assert layer.max_logit == [2.0]
    assert layer.entropy_nats == [pytest.approx(0.6931, abs=1e-4)]
    assert layer.entropy_ratio == [pytest.approx(1.0, abs=1e-6)]


def test_case_16_a_static_cache_says_what_a_growing_one_says():
    transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")
    model = llama().eval()
    tokens = torch.randint(16, (2, 7))
    shown = []
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=64),
    ):
        with Monitor.attach(model, every=1) as monitor, torch.no_grad():
            for part in tokens.split([5, 1, 1], 1):
                model(part, past_key_values=cache, use_cache=True)
            shown.append(next(r for r in monitor.step() if r.layers).layers)
    for name, right in shown[0].items():
        assert shown[1][name].rows == right.rows == 2 * 7
        for field in ("max_logit", "entropy_nats", "entropy_ratio"):
            wanted = pytest.approx(getattr(right, field), rel=1e-5, abs=1e-6)
            assert getattr(shown[1][name], field) == wanted, field


def test_case_16_the_causal_flag_of_sdpa_is_aligned_as_the_kernel_aligns_it():
    """With fewer queries than keys torch lets query 0 see key 0 alone."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    k[:, :, 3:] *= 100
    layer = record_of(Sdpa(), q, k, is_causal=True, scale=1.0)
    visible = torch.ones(3, 7, dtype=torch.bool).tril()
    agree(layer, truth(q.double() @ k.double().mT, visible))
    assert layer.rows == 3


@pytest.mark.parametrize(
    ("sink", "logit", "mass"), [("off_by_one", 0.0, 0.25), ("logit", 0.0, 0.25), ("logit", 100.0, 1.0)]
)
def test_case_16_and_18_entropy_is_over_the_keys_and_the_sink_has_its_mass(sink, logit, mass):
    """Three equal logits below zero are no smaller for the sink of 0 beside them."""
    for level in (0.0, -3.0):
        layer, x = own_layer(torch.full((1, 2, 3, 3), level), sink=sink)
        if sink == "logit":
            nn.init.constant_(layer.sink_logit, logit)
        found = record_of(layer, x, mask=Mask())
        assert found.max_logit == [level] * 2
        assert found.entropy_nats == pytest.approx([math.log(3)] * 2, abs=1e-6)
        assert found.entropy_ratio == pytest.approx([1.0] * 2, abs=1e-6)
        share = 1 / (1 + 3 * math.exp(level - logit))
        assert level != 0.0 or share == pytest.approx(mass)
        assert found.sink_mass == pytest.approx([share] * 2, abs=1e-6)


@pytest.mark.parametrize("sinks", [(0.0, 0.0, 5.0, 100.0), (-2.0, 1.0, 7.0, 0.5)])
def test_case_16_and_18_the_sinks_of_gpt_oss(sinks):
    """Zero logits in a windowed and in a full layer: every mass is a closed form."""
    transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")
    config = transformers.GptOssConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.GptOssModel(config)
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight.zero_()
            block.self_attn.q_proj.bias.zero_()
            block.self_attn.sinks.copy_(torch.tensor(sinks))
    with Monitor.attach(model, every=1) as monitor:
        model(torch.randint(16, (2, 6)))
        (record,) = monitor.step()
    for layer, window in zip(record.layers.values(), (3, 6), strict=True):
        keys = [min(i + 1, window) for i in range(6)]
        masses = [sum(math.exp(s) / (math.exp(s) + n) for n in keys) / 6 for s in sinks]
        assert layer.sink_mass == pytest.approx(masses, abs=1e-5)
        assert layer.entropy_nats == pytest.approx([sum(map(math.log, keys)) / 6] * 4, abs=1e-5)
        assert layer.max_logit == [0.0] * 4


def test_case_18_packed_documents_share_the_sink_and_watching_leaves_its_gradient():
    layer, x = own_layer(2 * torch.randn(1, 2, 9, 9), sink="logit")
    nn.init.uniform_(layer.sink_logit, -1.0, 3.0)
    documents = torch.tensor([[0] * 4 + [1] * 5])

    def gradient():
        layer.zero_grad()
        layer(x, mask=Mask(causal=True, documents=documents)).square().sum().backward()
        return layer.sink_logit.grad.clone()

    plain = gradient()
    with Monitor.attach(layer, every=1) as monitor:
        watched = gradient()
        packed = monitor.step()[0].layers[""]
        for part in x.split([4, 5], 1):
            layer(part, mask=Mask(causal=True))
        apart = monitor.step()[0].layers[""]
    assert (plain != 0).all()
    assert torch.equal(plain, watched)
    for field in ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass"):
        assert getattr(packed, field) == pytest.approx(getattr(apart, field), abs=1e-5), field


def normed_layer(scale):
    """Eight heads of width 256 with the usual norm, and 128 tokens, so that q and k are Gaussian."""
    layer = Attention(AttentionConfig(dim=512, num_heads=8, head_dim=256, scale=scale))
    with torch.no_grad():
        layer.qkv.weight.normal_()
    return layer, torch.randn(1, 128, 512)


@pytest.mark.parametrize(("scale", "bound", "entropy"), [(1 / 16, 16.0, 4.38), (1.0, 256.0, 0.31)])
def test_case_13_the_bound_is_shown_beside_the_maximum_at_the_scale_that_runs(scale, bound, entropy):
    layer, x = normed_layer(scale)
    found = record_of(layer, x, mask=Mask())
    assert found.bound == pytest.approx(bound, rel=2e-5)  # it covers rounding
    assert found.gain_max == (1.0, 1.0)
    assert bound / 6 < found.top <= found.bound
    assert fmean(found.entropy_nats) == pytest.approx(entropy, abs=0.04)
    assert found.entropy_ratio == pytest.approx([e / math.log(128) for e in found.entropy_nats])
    q, k = (F.rms_norm(torch.randn(1, 8, 128, 256), (256,)) for _ in range(2))
    foreign = record_of(Sdpa(), q, k, scale=scale)
    assert fmean(foreign.entropy_nats) == pytest.approx(entropy, abs=0.04)
    agree(foreign, truth(scale * q.double() @ k.double().mT, torch.tensor(True)), 1e-4)


@pytest.mark.parametrize("scale", [1 / 16, 1.0])
def test_case_13_low_entropy_for_the_number_of_keys_is_worth_a_warning(scale):
    layer, x = normed_layer(scale)
    with Monitor.attach(layer, every=1) as monitor:
        layer(x, mask=Mask())
        alerts = Alerts()(monitor.step()[0])
    spoken = [a for a in alerts if "entropy" in a.message and a.severity != "info"]
    assert bool(spoken) == (scale == 1.0)


@pytest.mark.parametrize("gains", ["ones", "unequal"])
def test_case_13_the_bound_holds_and_is_reached(gains):
    layer = Attention(AttentionConfig(dim=16, num_heads=2, num_kv_heads=1, head_dim=8, scale=0.7))
    with torch.no_grad():
        if gains == "unequal":
            layer.norm.q_gain.uniform_(-2.0, 2.0)
            layer.norm.k_gain.uniform_(-3.0, 3.0)
        layer.qkv.weight[:24] = layer.qkv.weight[:8].repeat(3, 1)
    x = torch.randn(2, 40, 16)
    found = record_of(layer, x, rope=RotaryEmbedding(8, layout="half")(40))
    maxima = [g.detach().abs().max().item() for g in (layer.norm.q_gain, layer.norm.k_gain)]
    assert found.gain_max == pytest.approx(tuple(maxima))
    assert found.top <= found.bound * (1 + 1e-6)
    assert found.bound <= 0.7 * 8 * maxima[0] * maxima[1] * (1 + 1e-6)
    if gains == "ones":
        assert found.top == pytest.approx(0.7 * 8, rel=1e-5)


@pytest.mark.parametrize("scalar", [256, 1])
def test_case_13_gemma_is_read_with_its_scale_and_its_gains_of_one_plus_w(scalar):
    transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")
    config = transformers.Gemma3TextConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=scalar,
    )
    model = transformers.Gemma3TextModel(config)
    norms = [getattr(model.layers[0].self_attn, name) for name in ("q_norm", "k_norm")]
    tokens = torch.randint(16, (1, 24))
    found = record_of(model, tokens)
    assert found.bound == pytest.approx(256 * scalar**-0.5, rel=2e-5)
    assert found.gain_max == (1.0, 1.0)
    assert 0 < found.top <= found.bound * ROUNDING
    with torch.no_grad():
        norms[0].weight.fill_(0.5)
        norms[1].weight.fill_(-3.0)
    found = record_of(model, tokens)
    assert found.gain_max == (1.5, 2.0)
    assert found.bound == pytest.approx(256 * 3 * scalar**-0.5, rel=2e-5)


def long_inputs(tokens=4096):
    torch.manual_seed(0)
    return [torch.randn(1, 2, tokens, 64, requires_grad=True) for _ in range(3)]


def long_step(watched, sample=None):
    """Output, gradients, the record and what is kept for the backward pass."""
    q, k, v = long_inputs()
    saved, model = [], Sdpa()
    monitor = Monitor.attach(model, every=1, sample=sample) if watched else None
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append(x.numel()), x)[1], lambda x: x
    ):
        out = model(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    layer = None
    if monitor is not None:
        layer = monitor.step()[0].layers[""]
        monitor.detach()
    return [out.detach(), *grads], saved, layer


@pytest.mark.parametrize("sample", [None, 64])
def test_case_17_long_sequences_keep_nothing_and_change_nothing(sample):
    plain, plain_saved, _ = long_step(False)
    watched, saved, layer = long_step(True, sample)
    assert saved, "the hook saw nothing"
    assert max(saved) <= 2 * 4096 * 64
    assert sorted(saved) == sorted(plain_saved), "watching keeps something alive"
    for a, b in zip(watched, plain, strict=True):
        assert torch.equal(a, b)
    assert layer.coverage == ("exact" if sample is None else "sampled")
    assert layer.rows == (sample or 4096)
    q, k, _ = (x.detach().double() for x in long_inputs())
    right = truth(q @ k.mT / 8, torch.ones(4096, 4096, dtype=torch.bool).tril())
    if sample is None:
        agree(layer, right)
    else:
        assert (torch.tensor(layer.max_logit) <= right["max_logit"] + 1e-5).all()


@pytest.mark.parametrize("tokens", [4097, 10000])
def test_case_17_one_sharp_pair_in_a_long_sequence_is_found_unless_rows_are_sampled(tokens):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, tokens, 8) for _ in range(2))
    q[0, 0, tokens - 5] = k[0, 0, 17] = 15.0
    q[0, 0, 3] = k[0, 0, 900] = -40.0
    exact, sampled = (record_of(Sdpa(), q, k, is_causal=True, sample=n) for n in (None, 16))
    assert (exact.coverage, sampled.coverage) == ("exact", "sampled")
    assert exact.rows == tokens
    assert exact.max_logit == [pytest.approx(15 * 15 * 8**0.5, rel=1e-6)]
    assert sampled.rows == 16
    assert sampled.top <= exact.top

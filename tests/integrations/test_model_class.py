"""`QKNormForCausalLM` as transformers uses it: every dialect, caches, generation, files, training."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from qknorm import Mask, NormDialect
from qknorm.integrations.transformers import QKNormConfig, QKNormForCausalLM
from qknorm.nn import Attention, QKNorm

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
DIALECTS = {
    "default": {},
    "shared": {"gain": "shared"},
    "1 + w": {"offset": 1.0},
    "full": {"gain": "full", "statistic": "full"},
    "after rope": {"order": "after_rope"},
    "no gain": {"gain": "none"},
    "value": {"value": True},
    "centered": {"centered": True, "eps": 1e-5},
    "outside": {"eps_place": "outside"},
    "none": None,
}


def new_model(implementation: str = "eager", **options: Any) -> QKNormForCausalLM:
    """A model with unequal gains and sinks."""
    torch.manual_seed(0)
    config = QKNormConfig(**SIZES | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("sinks"):
                p.add_(0.4 * torch.randn_like(p))
            elif p.dim() == 2:
                p.mul_(5)
    return model


def tokens(rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_attention_is_that_of_the_library(dialect: str) -> None:
    """The layer of `qknorm.nn` with the same weights gives the same output: window, sink, gate."""
    options = {"sink": "logit", "gate": True, "attention_bias": True, "rotary_dim": 8}
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    model = new_model(qk_norm=DIALECTS[dialect], **options, **windows)
    x = torch.randn(2, 20, 48)
    for i, kind in enumerate(model.config.layer_types):
        theirs = model.model.layers[i].self_attn
        ours = Attention(model.config.attention(i))
        with torch.no_grad():
            for name in ("weight", "bias"):
                parts = [getattr(getattr(theirs, f"{n}_proj"), name) for n in "qkv"]
                getattr(ours.qkv, name).copy_(torch.cat(parts))
            ours.out.load_state_dict(theirs.o_proj.state_dict())
            ours.gate.load_state_dict(theirs.gate_proj.state_dict())
            ours.sink_logit.copy_(theirs.sinks)
            if theirs.qk_norm is not None:
                ours.norm.load_state_dict(theirs.qk_norm.state_dict())
        rope = model.model.rotary[kind](torch.arange(20))
        wanted = ours(x, rope=rope)
        visible = Mask(causal=True, window=ours.config.window).visible(20, 20, x.device)
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[:, None]
        found, _ = theirs(x, rope, mask)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block": "sandwich", "norm_offset": 1.0, "tie_word_embeddings": True, "embedding_scale": 7.0},
        {"block": "post", "sink": "off_by_one", "qk_norm": {"gain": "full", "statistic": "full"}},
        {"block": "parallel", "stream_norm": "layer", "rope_layout": "interleaved", "logit_scale": 0.5},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "gate": True},
        {"gated_mlp": False, "hidden_act": "gelu", "rotary_dim": 0, "final_logit_softcapping": 3.0},
    ],
)
def test_generation_goes_on_as_one_pass_would(options: dict[str, Any], tmp_path: Path) -> None:
    """Greedy tokens through a dynamic and a static cache are those of passes without a cache."""
    model = new_model(**options)
    ids = tokens()
    attention = torch.ones_like(ids)
    attention[0, :4] = 0  # padding on the left
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": attention}
    dynamic = model.generate(ids, **how)
    static = model.generate(ids, **how, cache_implementation="static")
    plain = model.generate(ids, **how, use_cache=False)
    assert torch.equal(dynamic, plain)
    assert torch.equal(static, plain)
    beams = model.generate(ids, **how, num_beams=3)
    assert torch.equal(beams, model.generate(ids, **how, num_beams=3, use_cache=False))
    # What is saved is loaded, by the Auto classes too.
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(again) is QKNormForCausalLM
    assert torch.equal(again(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()


def test_implementations_agree_and_one_without_sinks_is_refused() -> None:
    ids = tokens()
    wanted = new_model("eager")(ids).logits
    torch.testing.assert_close(new_model("sdpa")(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="has no sinks: load the model with attn_implementation"):
        new_model("sdpa", sink="logit")(ids)


def test_gains_stay_fp32_and_mean_what_the_file_says(tmp_path: Path) -> None:
    new_model(qk_norm={"offset": 1.0}, sink="logit").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    fp32 = {name.split(".")[-1] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert fp32 == {"q_gain", "k_gain", "sinks"}
    held = load_file(tmp_path / "model.safetensors")
    offsets = [x for name, x in held.items() if name.endswith("gain_offset")]
    assert [float(x) for x in offsets] == [1.0, 1.0]
    save_file(
        {n: x * 0 if n.endswith("gain_offset") else x for n, x in held.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match=r"mean 0 \+ w in the file and 1 \+ w in its config.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids = tokens()
    found = []
    for on in (False, True):
        model = new_model().train()
        if on:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(g, found[1][name]) for name, g in found[0].items())


def test_first_values_are_those_of_the_modules() -> None:
    torch.manual_seed(0)
    model = QKNormForCausalLM(
        QKNormConfig(**SIZES, qk_norm={"offset": 1.0}, norm_offset=1.0, sink="logit")
    )
    for module in model.modules():
        if isinstance(module, QKNorm):
            assert all(bool((gain == 1).all()) for gain in module.effective_gains())
    assert not bool(model.model.norm.weight.any())
    assert not bool(model.model.layers[0].self_attn.sinks.any())
    meta = copy.deepcopy(model)
    with torch.device("meta"):
        meta = QKNormForCausalLM(model.config)
    meta.to_empty(device="cpu")
    meta.init_weights()
    assert bool(meta.model.rotary["full_attention"].inverse_frequency.isfinite().all())


def test_peft_and_a_pipeline_take_it() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = new_model()
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    ids = tokens()
    tuned(ids, labels=ids).loss.backward()
    assert {n.split(".")[-3] for n, p in tuned.named_parameters() if p.grad is not None} == {
        "lora_A",
        "lora_B",
    } or any(p.grad is not None for p in tuned.parameters())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"block": "both"}, "block must be one of pre, post, sandwich, parallel; got 'both'"),
        ({"sink": "token"}, "sink must be one of none, off_by_one, logit; got 'token'"),
        ({"layer_types": ["full_attention"]}, "for each of the 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "needs sliding_window"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3 key heads"),
        ({"qk_norm": {"offset": 0.5}}, "offset must be 0 (gain w) or 1 (gain 1 + w); got 0.5"),
    ],
)
def test_bad_configurations_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=re.escape(why)):
        QKNormConfig(**SIZES | options)


def test_a_rotation_that_is_not_known_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type 'dynamic' is not supported: use default, linear"):
        QKNormForCausalLM(QKNormConfig(**SIZES, rope_parameters=rope))


def test_every_field_of_the_dialect_reaches_the_norm() -> None:
    odd = NormDialect(statistic="full", gain="full", offset=1.0, eps=1e-3, eps_place="sum", value=True)
    model = new_model(qk_norm=asdict(odd))
    assert model.model.layers[1].self_attn.qk_norm.dialect == odd

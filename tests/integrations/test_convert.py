"""Conversions: every family there and back to the bit, equal logits, and seeded faults named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qknorm.cli.convert import convert
from qknorm.integrations.transformers import QKNormConfig, QKNormForCausalLM
from qknorm.integrations.transformers import convert as conversion
from qknorm.integrations.transformers.convert import compare, from_qknorm, to_qknorm, with_layout
from qknorm.integrations.transformers.families import FAMILIES
from qknorm.integrations.transformers.lab_checkpoint import from_lab, to_lab
from qknorm.lab.arms import ARMS
from qknorm.lab.model import LanguageModel, ModelConfig, saved_model
from qknorm.lab.trainer import TrainConfig, train

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "qwen3",
        {"head_dim": 24, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3, yarn": ("qwen3", {"head_dim": 24, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 24,
            "sliding_window": 16,
            "query_pre_attn_scalar": 30,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere, no norm": ("cohere", {}),
    "lfm2": ("lfm2", {"layer_types": ["full_attention"] * 3, "block_multiple_of": 8}),
    "llama": ("llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
}


def model_of(kind: str, dtype: torch.dtype = torch.float32, **other: Any) -> PreTrainedModel:
    """A model of transformers with unequal gains and biases."""
    name, options = KINDS[kind]
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.model(family.config(**SIZES | options | other)).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "norm" in path:
                p.add_(0.3 * torch.randn_like(p))
            elif p.dim() == 2:
                p.mul_(4)
            else:
                p.normal_()
    return model.to(dtype)


def equal(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    same = all(
        torch.equal(x, second[name]) and x.dtype == second[name].dtype for name, x in first.items()
    )
    return first.keys() == second.keys() and same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_are_exact(kind: str, dtype: torch.dtype) -> None:
    """`to_qknorm` compares the logits at three distances; here they are compared once more."""
    model = model_of(kind, dtype)
    ours = to_qknorm(model)
    if dtype == torch.float32:
        ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(3))
        positions = torch.arange(500, 524)[None]
        with torch.no_grad():
            wanted = model(ids, position_ids=positions).logits
            found = ours(ids, position_ids=positions).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    back = from_qknorm(ours, KINDS[kind][0])
    assert type(back) is type(model)
    assert equal(back, model)
    assert equal(to_qknorm(back), ours)


@pytest.mark.parametrize("kind", ["qwen3", "cohere", "olmo2", "llama"])
def test_layouts_of_rope_there_and_back(kind: str) -> None:
    """Weights, biases and gains are put in order by one routine; half of a head may stay unrotated."""
    ours = to_qknorm(model_of(kind))
    other = "half" if ours.config.rope_layout == "interleaved" else "interleaved"
    turned = with_layout(ours, other)
    assert turned.config.rope_layout == other
    assert not equal(turned, ours)
    assert equal(with_layout(turned, ours.config.rope_layout), ours)
    assert equal(from_qknorm(turned, KINDS[kind][0]), model_of(kind))


def test_a_partial_rotation_in_both_layouts() -> None:
    torch.manual_seed(0)
    model = QKNormForCausalLM(QKNormConfig(**SIZES, rotary_dim=6, attention_bias=True)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gain" in name or "bias" in name:
                p.add_(torch.randn_like(p))
    turned = with_layout(model, "interleaved")
    assert equal(with_layout(turned, "half"), model)


def test_gains_change_their_form_only_if_nothing_is_lost() -> None:
    """Equal gains of all heads become one, a gain in half precision may become 1 + w."""
    ours = QKNormForCausalLM(QKNormConfig(**SIZES)).eval()
    theirs = from_qknorm(ours, "qwen3")
    assert theirs.model.layers[0].self_attn.q_norm.weight.shape == (16,)
    gain = ours.model.layers[1].self_attn.qk_norm.k_gain
    with torch.no_grad():
        gain[1, 3] += 0.25
    why = "model.layers.1.self_attn.qk_norm.k_gain differs by up to 0.25 between heads"
    with pytest.raises(ValueError, match=re.escape(why)):
        from_qknorm(ours, "qwen3")
    with torch.no_grad():
        gain[:, 3] = 1 + 2.0**-12
    half = ours.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"q_norm|k_norm.weight would be rounded by up to 0.000244"):
        from_qknorm(half, "qwen3")
    small = QKNormConfig(**SIZES, qk_norm={"gain": "shared"}, block="sandwich", norm_offset=1.0)
    small = QKNormForCausalLM(
        QKNormConfig(**small.to_dict() | {"embedding_scale": 8.0, "hidden_act": "gelu_pytorch_tanh"})
    )
    with torch.no_grad():
        small.model.layers[0].self_attn.qk_norm.q_gain[2] = 1e-9  # 1 + w cannot say that
    with pytest.raises(ValueError, match=r"q_gain stored as 1 \+ w would be off by up to"):
        from_qknorm(small, "gemma3_text")


@pytest.mark.parametrize(
    ("options", "family", "why"),
    [
        ({"sink": "logit"}, "qwen3", "qwen3 cannot express sink='logit'"),
        ({"gate": True, "gated_mlp": False}, "llama", "gate=True"),
        ({"rotary_dim": 8}, "olmo2", "rotary_dim=8"),
        ({"attention_scale": 0.1}, "cohere", "attention_scale=0.1"),
        ({"block": "parallel"}, "qwen3", "block='parallel'"),
        ({"qk_norm": None}, "qwen3", "qk_norm=None"),
        ({}, "llama", "llama cannot express qk_norm=NormDialect("),
        ({}, "gpt2", "gpt2 is no family that can be converted: known are qwen3, gemma3_text"),
    ],
)
def test_what_a_family_cannot_express_is_named(options: dict[str, Any], family: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        from_qknorm(QKNormForCausalLM(QKNormConfig(**SIZES | options)), family)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of the type conv"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
)
def test_what_ours_cannot_express_is_named(kind: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        to_qknorm(model_of(kind, **options))


def test_an_unknown_family_is_refused() -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2))
    with pytest.raises(ValueError, match="gpt2 is no family that can be converted"):
        to_qknorm(gpt2)


def _layers(model: QKNormForCausalLM) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def unit_gain(model: QKNormForCausalLM) -> None:
    _layers(model)[1].qk_norm.q_gain.fill_(1.0)


def shift_twice(model: QKNormForCausalLM) -> None:
    _layers(model)[1].qk_norm.k_gain.add_(1.0)


def swap(model: QKNormForCausalLM) -> None:
    norm = _layers(model)[1].qk_norm
    q = norm.q_gain.clone()
    norm.q_gain.copy_(norm.k_gain)
    norm.k_gain.copy_(q)


def unpermuted(model: QKNormForCausalLM) -> None:
    order = conversion.head_order(24, 24, "interleaved")
    for name in ("q_proj", "k_proj"):
        weight = getattr(_layers(model)[1], name).weight
        weight.copy_(conversion.reordered(weight, order, is_gain=False))


def gain_in_another_order(model: QKNormForCausalLM) -> None:
    order = conversion.head_order(24, 24, "interleaved")
    gain = _layers(model)[1].qk_norm.q_gain
    gain.copy_(conversion.reordered(gain, order, is_gain=True))


def values_swapped(model: QKNormForCausalLM) -> None:
    weight = _layers(model)[1].v_proj.weight
    weight.copy_(weight.roll(24, 0))


FAULTS = (unit_gain, shift_twice, swap, unpermuted, gain_in_another_order, values_swapped)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_weights_is_found_in_its_layer(fault: Callable[[Any], None]) -> None:
    model = model_of("qwen3")
    ours = to_qknorm(model)
    compare(model, ours)
    with torch.no_grad():
        fault(ours)
    with pytest.raises(ValueError, match=r"the models differ at layer 1, attention: by [0-9.e-]+ where"):
        compare(model, ours)


def test_a_tensor_that_is_missing_or_left_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3")
    state = model.state_dict()

    def without(name: str) -> dict[str, Tensor]:
        return {key: x for key, x in state.items() if not key.startswith(name)}

    for lost, why in (
        ("model.layers.2.self_attn.q_norm", "no tensor for model.layers.2.self_attn.qk_norm.q_gain"),
        ("model.layers.1.", "no tensor for model.layers.1.attention_norm.weight"),
    ):
        monkeypatch.setattr(model, "state_dict", lambda lost=lost: without(lost))
        with pytest.raises(ValueError, match=re.escape(why)):
            to_qknorm(model)
    extra = state | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    monkeypatch.setattr(model, "state_dict", lambda: extra)
    with pytest.raises(ValueError, match=r"has no place for model.layers.0.self_attn.sinks"):
        to_qknorm(model)


@pytest.mark.parametrize("arm", ARMS)
def test_models_of_the_lab_there_and_back(arm: str) -> None:
    config = ARMS[arm].apply(ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, window=9, gate=True))
    torch.manual_seed(0)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gain" in name or "sink" in name:
                p.add_(torch.randn_like(p))
    plain = json.loads(json.dumps(asdict(config)))
    if config.cap is not None:
        with pytest.raises(ValueError, match="the arm caps its logits"):
            from_lab(plain, model.state_dict())
        return
    ours = from_lab(plain, model.state_dict())
    ours.set_attn_implementation("eager")
    ids = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model(ids), rtol=1e-4, atol=1e-5)
    values, state = to_lab(ours)
    again = LanguageModel(saved_model(values))
    again.load_state_dict(state)
    assert equal(again, model)


def test_the_command_converts_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("qwen3", torch.bfloat16).save_pretrained(tmp_path / "qwen3")
    (tmp_path / "qwen3" / "tokenizer.json").write_text("{}")
    options: dict[str, Any] = {"layout": None, "dtype": "auto", "as_json": False}
    assert convert(tmp_path / "qwen3", tmp_path / "ours", "qknorm", **options) == 0
    assert "is now" in capsys.readouterr().out
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(ours) is QKNormForCausalLM
    assert (tmp_path / "ours" / "tokenizer.json").is_file()
    turned = options | {"layout": "interleaved", "as_json": True}
    assert convert(tmp_path / "ours", tmp_path / "turned", "qknorm", **turned) == 0
    assert json.loads(capsys.readouterr().out)["from"] == "qknorm"
    assert convert(tmp_path / "turned", tmp_path / "back", "qwen3", **options) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert equal(back, model_of("qwen3", torch.bfloat16))
    assert {path.name for path in tmp_path.iterdir()} == {"qwen3", "ours", "turned", "back"}


def test_the_command_converts_a_run(tmp_path: Path) -> None:
    train(
        TrainConfig(model=ModelConfig(layers=1, dim=32, heads=2), steps=2, batch=2, context=32),
        tmp_path / "run",
    )
    options: dict[str, Any] = {"layout": None, "dtype": "auto", "as_json": False}
    assert convert(tmp_path / "run", tmp_path / "ours", "qknorm", **options) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generate(
        torch.tensor([[5, 6]]), max_new_tokens=3
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"source": "nothing"}, "has no config.json"),
        ({"target": "llama"}, "exists already: name a folder that is to be made"),
        ({"to": "bert"}, "--to takes qknorm or qwen3"),
        ({"layout": "full"}, "--layout takes half or interleaved; got full"),
        ({"dtype": "int8"}, "--dtype takes auto, float32"),
        ({"to": "qwen3"}, "qwen3 cannot express qk_norm=None"),
        ({"cut": True}, "cannot be"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    model_of("llama").save_pretrained(tmp_path / "llama")
    if change.get("cut"):
        file = tmp_path / "llama" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:2000])
    source, target = (tmp_path / change.get(n, d) for n, d in (("source", "llama"), ("target", "new")))
    with pytest.raises(ValueError, match=re.escape(why)):
        convert(
            source,
            target,
            change.get("to", "qknorm"),
            layout=change.get("layout"),
            dtype=change.get("dtype", "auto"),
            as_json=False,
        )
    assert {path.name for path in tmp_path.iterdir()} == {"llama"}

"""Our own layers and torch's are read back as configured, though neither shows plain tensor code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qknorm import Mask, NormDialect, UnsupportedError, attention
from qknorm.auditor import Formula, Report, audit
from qknorm.lab.arms import ARMS
from qknorm.lab.model import LanguageModel, ModelConfig
from qknorm.nn import Attention, AttentionConfig, RotaryEmbedding
from qknorm.nn.marks import marked_parameters
from qknorm.ops.backends import BACKENDS, by_definition

B, T, C, H = 2, 24, 32, 4
GAINS = {"per_head": "head", "shared": "shared", "full": "head", "none": None}


@torch.no_grad()
def unequal_(model: nn.Module) -> None:
    """No two gains or sinks alike: with equal gains most mistakes are invisible."""
    for _, parameter, kind, offset in marked_parameters(model):
        values = torch.rand(parameter.shape) + 0.5 - offset
        parameter.copy_(values if kind == "gain" else 2 * torch.randn(parameter.shape))


def same(found: Any, wanted: Any) -> bool:
    return math.isclose(found, wanted, rel_tol=1e-2) if isinstance(wanted, float) else found == wanted


def assert_is(formula: Formula, c: AttentionConfig, **others: Any) -> None:
    """Every field, from the configuration and what the layer was called with."""
    n = c.norm
    wanted: dict[str, Any] = {
        "q_norm": None if n is None else "rms",
        "k_norm": None if n is None else "rms",
        "statistic": None if n is None else n.statistic,
        "gain": None if n is None else GAINS[n.gain],
        # The gain of the only head is that of all.
        "k_gain": None if n is None else GAINS[n.gain] if c.kv_heads > 1 else "shared",
        "eps": None if n is None else n.eps,
        "eps_place": None if n is None else "inside",
        "order": None if n is None else "before",
        "rope": "half",
        "rotary_width": c.width,
        "v_norm": False,
        "scale": c.width**-0.5 if c.scale is None else c.scale,
        "softcap": None,
        "window": c.window,
        "sink": None if c.sink == "none" else c.sink,
        "causal": True,
        "q_heads": c.num_heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.width,
    } | others
    wrong = {
        name: (getattr(formula, name), value)
        for name, value in wanted.items()
        if not same(getattr(formula, name), value)
    }
    assert not wrong
    assert wanted.keys() | {"q_gain_values", "k_gain_values"} == vars(formula).keys()


def assert_gains(formula: Formula, layer: Attention) -> None:
    read = formula.q_gain_values, formula.k_gain_values
    if layer.norm is None:
        assert read == (None, None)
        return
    for found, wanted in zip(read, layer.norm.effective_gains(), strict=True):
        torch.testing.assert_close(found, wanted.double(), rtol=1e-3, atol=1e-3)


def report_on(config: AttentionConfig, *, mask: Mask = Mask(causal=True), **rotary: Any) -> Report:
    """Of one layer, whose gains must have been read back."""
    torch.manual_seed(1)
    layer = Attention(config)
    unequal_(layer)
    table = RotaryEmbedding(**{"rotary_dim": config.width, "layout": "half"} | rotary)
    report = audit(layer, {"x": torch.randn(B, T, C), "rope": table(T), "mask": mask})
    assert_gains(report.formulas[""], layer)
    return report


# One layer ------------------------------------------------------------------------------------------

NO_WARNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 16},
    "sink": {"sink": "logit"},
    "off by one": {"sink": "off_by_one"},
    "sink token": {"sink": "token", "num_kv_heads": 2},
    "window": {"window": 5},
    "window and sink": {"window": 5, "sink": "logit"},
    "gate and biases": {"gate": True, "bias": True},
    "scale 1": {"scale": 1.0},
    "shared gain": {"norm": NormDialect(gain="shared")},
    "flat gain": {"norm": NormDialect(gain="full")},
    "1 + w": {"norm": NormDialect(offset=1.0)},
    "larger eps": {"norm": NormDialect(eps=1e-5)},
    "no norm": {"norm": None},
    **{backend: {"backend": backend} for backend in ("stock", "reference")},
}


@pytest.mark.parametrize("name", NO_WARNING)
def test_a_layer_is_read_back_without_a_warning(name: str) -> None:
    config = AttentionConfig(**{"dim": C, "num_heads": H} | NO_WARNING[name])
    report = report_on(config)
    assert not report.codes, report.findings
    assert_is(report.formulas[""], config)


@pytest.mark.parametrize(
    ("norm", "codes", "others"),
    [
        ({"order": "after_rope"}, {"QK002"}, {"order": "after"}),
        ({"value": True}, {"QK003"}, {"v_norm": True}),
        (
            {"statistic": "full", "gain": "full"},
            {"QK004"},
            {"statistic": "full", "gain": "full", "k_gain": "full"},
        ),
        ({"gain": "none"}, {"QK005"}, {"order": "not identifiable"}),
        ({"eps_place": "outside"}, {"QK007"}, {"eps_place": "outside"}),
        ({"eps_place": "sum"}, {"QK007"}, {"eps": 1e-6 / 8}),
        ({"eps": 1e-8}, {"QK007"}, {}),
    ],
    ids=str,
)
def test_a_dialect_that_is_worth_a_warning_gets_it(
    norm: dict[str, Any], codes: set[str], others: dict[str, Any]
) -> None:
    config = AttentionConfig(dim=C, num_heads=H, num_kv_heads=2, norm=NormDialect(**norm))
    report = report_on(config)
    assert report.codes == codes, report.findings
    assert_is(report.formulas[""], config, **others)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_the_rotation_is_read_back(layout: str, rotary_dim: int) -> None:
    config = AttentionConfig(dim=C, num_heads=H, num_kv_heads=2)
    report = report_on(config, rotary_dim=rotary_dim, layout=layout)
    assert not report.codes, report.findings
    assert_is(report.formulas[""], config, rope=layout, rotary_width=rotary_dim)


def test_a_mask_that_is_not_causal_is_read_back() -> None:
    config = AttentionConfig(dim=C, num_heads=H)
    assert_is(report_on(config, mask=Mask()).formulas[""], config, causal=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_low_precision_statistic(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model = LanguageModel(ModelConfig(vocab_size=61, layers=2, dim=C, heads=H, kv_heads=2))
    unequal_(model)
    report = audit(model.to(dtype), torch.randint(61, (B, T)))
    assert not report.codes, report.findings
    assert len(report.formulas) == 2


# The model of the lab -------------------------------------------------------------------------------

CODES = {
    "qk-full": {"QK004"},
    "qk-after-rope": {"QK002"},
    "qkv": {"QK003"},
    "qk-nogain": {"QK005"},
    "clamp": {"QK011"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "qk-full": {"gain": "full", "k_gain": "full"},
    "qk-after-rope": {"order": "after"},
    "qkv": {"v_norm": True},
    "qk-nogain": {"order": "not identifiable"},
    "softcap": {"softcap": 50.0},
}


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_of_the_lab_is_read_back(arm: str) -> None:
    torch.manual_seed(3)
    config = ARMS[arm].apply(ModelConfig(vocab_size=61, layers=2, dim=C, heads=H, kv_heads=2))
    model = LanguageModel(config)
    unequal_(model)
    report = audit(model, torch.randint(61, (B, T)))
    assert report.codes == CODES.get(arm, set()), report.findings
    assert not report.not_probed
    for n, layer in enumerate(model.attention_layers()):
        formula = report.formulas[f"blocks.{n}.attention"]
        assert_is(formula, config.attention, **OTHERS.get(arm, {}))
        assert_gains(formula, layer)


# What was read is the definition: the kernel is compared with it --------------------------------------


def test_a_kernel_that_is_not_the_definition_is_a_path_that_disagrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ModelConfig(vocab_size=61, layers=2, dim=C, heads=H, backend="stock")
    torch.manual_seed(4)
    model, tokens = LanguageModel(config), torch.randint(61, (B, T))
    unequal_(model)
    sound = audit(model, tokens)
    assert not sound.codes
    assert "paths: forward, plain" in sound.exercised
    own = BACKENDS["stock"]
    unscaled = replace(own, run=lambda call: own.run(replace(call, scale=1.0)))
    monkeypatch.setitem(BACKENDS, "stock", unscaled)
    (one,) = audit(model, tokens).at_least("warning")
    assert (one.code, one.evidence["path"]) == ("QK015", "plain")
    assert one.evidence["difference"] > 1e-3


def test_only_the_reference_runs_by_definition_whichever_backend_is_named() -> None:
    q, k, v = (torch.randn(1, H, 5, 8, requires_grad=True) for _ in range(3))
    wanted = attention(q, k, v, backend="reference")
    with by_definition() as replaced:
        assert torch.equal(attention(q, k, v, backend="stock"), wanted)
        with by_definition() as inner:
            attention(q, k, v, backend="reference")
        with pytest.raises(UnsupportedError):
            attention(q.double(), k.double(), v.double(), backend="cpu")
    assert (replaced, inner) == ({"stock"}, {"reference"})
    own, dense = attention(q, k, v, backend="stock"), type(wanted.grad_fn).__name__
    assert "Attention" in type(own.grad_fn).__name__
    assert "Attention" not in dense


# torch's own ----------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """As most models call it."""

    def __init__(self, *, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def of_torch(kind: str, *, batch_first: bool) -> nn.Module:
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(C, H, 48, batch_first=batch_first)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return SelfAttention(batch_first=batch_first, need_weights=kind == "weights")


@pytest.mark.parametrize(("batch", "tokens"), [(2, 7), (7, 2), (6, 6), (1, 5), (5, 1)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["output", "weights", "encoder"])
def test_attention_of_torch_has_no_norm_and_its_scale(
    kind: str, batch_first: bool, batch: int, tokens: int
) -> None:
    torch.manual_seed(5)
    x = torch.randn(batch, tokens, C)
    report = audit(of_torch(kind, batch_first=batch_first), x if batch_first else x.transpose(0, 1))
    assert not report.codes, report.findings
    layers = ["layers.0.self_attn", "layers.1.self_attn"] if kind == "encoder" else ["attention"]
    assert list(report.formulas) == layers
    config = AttentionConfig(dim=C, num_heads=H, norm=None)
    for formula in report.formulas.values():
        assert_is(formula, config, rope=None, rotary_width=0, causal=False)
    assert [one.code for one in report.findings] == ["QK001"] * len(layers)
    # Sequences and tokens are told apart.
    assert f"batch and length: {(batch, tokens)}" in report.exercised


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_causal_mask_of_torch_is_read_back(batch_first: bool) -> None:
    torch.manual_seed(6)
    model = of_torch("encoder", batch_first=batch_first)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    report = audit(model, {"src": torch.randn(6, 6, C), "mask": mask, "is_causal": True})
    assert len(report.formulas) == 2
    assert all(formula.causal for formula in report.formulas.values())

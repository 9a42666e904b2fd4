"""The auditor on two released projects' own attention: the formulas that their sources state are read
back, and every finding is confirmed by a small computation without the auditor.

Much of what is found is a choice that the projects document.

Shapes: B batch, H heads, T tokens, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from architectures import D, Hq
from peers import DIM, IMAGES, LANGUAGE, TOKENS, decoder, flux, transformer_flux, x_transformers
from qknorm.auditor import audit
from readback import assert_read_back

PEERS = {f"x-transformers-{one.name}": one for one in LANGUAGE} | {
    f"diffusers-{one.name}": one for one in IMAGES
}


@pytest.mark.parametrize("name", PEERS)
def test_the_formula_is_read_back_and_nothing_else_is_found(name: str) -> None:
    peer = PEERS[name]
    model, inputs = peer.build()
    report = audit(model, inputs)
    assert_read_back(report, peer.formulas, partial(peer.gain, model))
    assert report.codes == set(peer.codes.split()), report.findings
    notes = {one.code for one in report.findings if one.severity == "info"}
    assert notes == set(peer.notes.split()), report.findings
    refused = [line for line in report.not_probed if not line.startswith("leaks: ")]
    assert len(refused) == len(peer.refused)
    for line, (path, reason) in zip(refused, peer.refused.items(), strict=True):
        assert line.startswith(f"{path}: ")
        assert reason in line


# Without the auditor -------------------------------------------------------------------------------


def module_of(name: str) -> tuple[nn.Module, nn.Module]:
    """The first attention of a peer, and the model."""
    peer = PEERS[name]
    model, _ = peer.build()
    return model.get_submodule(next(iter(peer.formulas))), model


def modules_of(name: str) -> list[nn.Module]:
    """All attentions of a peer whose formula is in the table."""
    peer = PEERS[name]
    model, _ = peer.build()
    return [model.get_submodule(path) for path in peer.formulas]


def random_input(tokens: int = TOKENS) -> Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(7))


@contextmanager
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The logits `[B, H, T, T]` of every call of the kernel, without its mask."""
    logits: list[Tensor] = []
    kernel = F.scaled_dot_product_attention

    def spy(
        q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float | None = None, **more: Any
    ) -> Tensor:
        logits.append((q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale))
        return kernel(q, k, v, *args, scale=scale, **more)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", spy)
        yield logits


@torch.no_grad()
def logits_of(module: nn.Module, x: Tensor, **more: Any) -> Tensor:
    """`[B, H, T, T]` as the softmax of x-transformers takes them, later tokens included."""
    module.attend.causal = module.causal = False
    _, seen = module(x, return_intermediates=True, **more)
    return seen.pre_softmax_attn


@torch.no_grad()
def by_hand(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """The same from the weights and the formula of the table."""
    formula = next(iter(PEERS[name].formulas.values()))

    def side(norm: str | None, weight: Tensor, part: str) -> Tensor:
        y = (x @ weight.T).unflatten(-1, (-1, D)).transpose(1, 2)  # [B, H, T, D]
        if norm is not None:
            y = y / y.square().sum(-1, keepdim=True).sqrt() * (1 if norm == "l2" else D**0.5)
        if norm == "l2" and hasattr(module.qk_norm_q_scale, "shape"):
            y = y * getattr(module, f"qk_norm_{part}_scale")
        if norm == "rms":
            y = y * (1 + getattr(module, f"{part}_rmsnorm").gamma)
        R = formula.rotary_width
        if R:
            angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, R, 2) / R)
            pairs = torch.view_as_complex(y[..., :R].unflatten(-1, (-1, 2)).contiguous())
            turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
            y = torch.cat((turned, y[..., R:]), -1)
        return y

    q = side(formula.q_norm, module.to_q.weight, "q")
    k = side(formula.k_norm, module.to_k.weight, "k")
    logits = formula.scale * q @ k[:, torch.arange(Hq) % formula.kv_heads].mT
    return logits if formula.softcap is None else formula.softcap * (logits / formula.softcap).tanh()


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "kv_heads", "softclamp", "rope", "cosine", "cosine-one_kv_head", "cosine-rope"),
        *("cosine_gains", "rms", "rms-rope-kv_heads", "rms-of_k", "rms-of_v"),
    ],
)
def test_the_logits_of_x_transformers_are_those_of_its_formula(name: str) -> None:
    module, model = module_of(f"x-transformers-{name}")
    x, more = random_input(), {}
    if model.attn_layers.rotary_pos_emb is not None:
        more["rotary_pos_emb"] = model.attn_layers.rotary_pos_emb(torch.arange(TOKENS))
    found = logits_of(module, x, **more)
    torch.testing.assert_close(found, by_hand(f"x-transformers-{name}", module, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "kv_heads", "cosine", "cosine_gains"])
def test_the_kernel_of_x_transformers_computes_what_its_own_softmax_does(name: str) -> None:
    models = [PEERS[f"x-transformers-{name}{path}"].build() for path in ("", "-flash")]
    with torch.no_grad():
        one, other = (model(**inputs) for model, inputs in models)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "grows"),
    [("plain", True), ("rms-of_k", True), ("rms", False), ("cosine", False), ("cosine_gains", False)],
)
def test_only_a_norm_of_q_keeps_its_projection_from_the_logits(name: str, grows: bool) -> None:
    """QK001 and QK016 of x-transformers."""
    module, _ = module_of(f"x-transformers-{name}")
    x = random_input()
    before = logits_of(module, x)
    module.to_q.weight.data.mul_(4)
    after = logits_of(module, x)
    torch.testing.assert_close(after, before * (4 if grows else 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "grows"),
    [("plain", True), ("rms", False), ("layer", False), ("layer-gainless", False), ("l2", False)],
)
def test_only_a_norm_keeps_the_projections_of_diffusers_from_the_logits(
    name: str, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QK001 of diffusers."""
    module, _ = module_of(f"diffusers-{name}")
    module.to_q.weight.data.mul_(30)  # far above eps
    with seen(monkeypatch) as logits, torch.no_grad():
        module(random_input())
        module.to_q.weight.data.mul_(4)
        module(random_input())
    torch.testing.assert_close(logits[1], logits[0] * (4 if grows else 1), rtol=1e-3, atol=1e-3)


def test_a_gain_is_a_parameter_beside_the_projections() -> None:
    """QK005, and QK006: one gain `[D]` for all heads."""
    projections = {"to_q.weight", "to_k.weight", "to_v.weight", "to_out.weight"}
    for name in ("cosine", "cosine-flash", "cosine-one_kv_head", "cosine-rope"):
        module, _ = module_of(f"x-transformers-{name}")
        assert {name for name, _ in module.named_parameters()} == projections
    for name in ("l2", "layer-gainless"):
        module, _ = module_of(f"diffusers-{name}")
        assert not [*module.norm_q.parameters(), *module.norm_k.parameters()]
    for name in ("rms", "layer", "flux", "lumina2"):
        for module in modules_of(f"diffusers-{name}"):
            assert module.norm_q.weight.shape == module.norm_k.weight.shape == (D,)
            assert module.to_q.out_features == Hq * D


def test_a_short_vector_is_blown_up() -> None:
    """QK007: with a clamp of the length, and not with an eps added to the mean square."""
    direction = torch.randn(D, generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()
    gammas = x_transformers.x_transformers.MultiheadRMSNorm(D, heads=1)
    lp = module_of("diffusers-l2")[0].norm_q
    for norm, clamp in (
        (x_transformers.x_transformers.l2norm, 1e-12),
        (lambda x: gammas(x)[0, 0] / D**0.5, 1e-12),
        (lp, 1e-5),
    ):
        assert norm(2 * clamp * direction).norm().item() == pytest.approx(1, rel=1e-3)
        assert norm(0.1 * clamp * direction).norm().item() == pytest.approx(0.1, rel=1e-3)
    added = module_of("diffusers-rms")[0].norm_q
    assert added(2e-5 * direction).norm() < 0.01


def test_lengths_in_bf16() -> None:
    """QK008: x-transformers takes lengths in the dtype of the model, diffusers mean squares in fp32."""
    name = "x-transformers-rms"
    model, inputs = PEERS[name].build()
    assert audit(model.bfloat16(), inputs).codes == {"QK007", "QK008"}
    model, inputs = PEERS["diffusers-rms"].build()
    low = {key: x.bfloat16() for key, x in inputs.items()}
    assert not audit(model.bfloat16(), low).codes
    x = 3 * torch.randn(4096, 128, generator=torch.Generator().manual_seed(1)).bfloat16()

    def error(normed: Tensor) -> float:
        """Root mean square of the relative error of lengths."""
        lengths = normed.double().norm(dim=-1)
        return float((lengths / lengths.mean() - 1).square().mean().sqrt())

    own = error(x_transformers.x_transformers.l2norm(x))
    rounded = error(x_transformers.x_transformers.l2norm(x.float()).bfloat16())
    assert own > 1e-3
    assert own > 3 * rounded


@pytest.mark.parametrize("name", ["rms", "rms-of_v"])
def test_v_grows_with_its_projection_unless_it_is_normed(name: str) -> None:
    """QK003."""
    module, _ = module_of(f"x-transformers-{name}")
    with torch.no_grad():
        before = module(random_input())
        module.to_v.weight.mul_(4)
        after = module(random_input())
    torch.testing.assert_close(after, before * (1 if name == "rms-of_v" else 4), rtol=1e-4, atol=1e-4)


def test_one_head_lowers_the_others() -> None:
    """QK004: in Wan, and not in Lumina 2."""

    def others(module: nn.Module, is_split: bool) -> Tensor:
        y = module.to_q(random_input())
        return module.norm_q(y.unflatten(-1, (Hq, D)) if is_split else y).flatten(2)[..., D:]

    for name, is_split in (("wan", False), ("lumina2", True)):
        for module in modules_of(f"diffusers-{name}"):
            with torch.no_grad():
                before = others(module, is_split)
                module.to_q.weight[:D].mul_(10)
                assert (others(module, is_split).norm() < 0.5 * before.norm()) == (not is_split)


@pytest.mark.parametrize(
    ("name", "used"), [("rms-old_processor", False), ("rms-unscaled", False), ("rms", True)]
)
def test_the_old_processor_does_not_call_the_norms(name: str, used: bool) -> None:
    """QK009 and QK001: the processor that diffusers takes by itself does, unless there is no scale."""
    module, _ = module_of(f"diffusers-{name}")
    module.to_q.weight.data.mul_(30)  # far above eps
    with torch.no_grad():
        before = module(random_input())
        module.to_q.weight.mul_(4)
        assert torch.allclose(module(random_input()), before, atol=1e-4) == used
        module.to_q.weight.div_(4)
        module.norm_q.weight.mul_(3)
        module.norm_k.weight.mul_(3)
        assert torch.equal(module(random_input()), before) != used


def aligned(module: nn.Module) -> None:
    """Keys equal to queries, whose own logits are the largest that there are."""
    module.to_k.weight.data.copy_(module.to_q.weight)


def bound_of(model: nn.Module, inputs: Any, path: str) -> float:
    return next(
        float(one.evidence["bound"])
        for one in audit(model, inputs).findings
        if one.code == "QK022" and one.layer == path
    )


def test_the_bound_is_reached_and_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """QK022: 10 for cosines of x-transformers, 1 for its first gains, D^-0.5 for "l2" of diffusers."""
    path = "attn_layers.layers.0.1"
    for name, bound in (("cosine", 10.0), ("cosine_gains", 1.0)):
        model, inputs = PEERS[f"x-transformers-{name}"].build()
        module = model.get_submodule(path)
        if name == "cosine_gains":
            module.qk_norm_q_scale.data.fill_(D**0.25)
            module.qk_norm_k_scale.data.fill_(D**0.25)
        assert bound_of(model, inputs, path) == pytest.approx(bound, rel=1e-3)
        aligned(module)
        assert logits_of(module, random_input()).max().item() == pytest.approx(bound, rel=1e-3)
    model, inputs = PEERS["diffusers-l2"].build()
    assert bound_of(model, inputs, "") == pytest.approx(D**-0.5, rel=1e-3)
    aligned(model)
    with seen(monkeypatch) as logits, torch.no_grad():
        model(random_input())
    assert logits[0].max().item() == pytest.approx(D**-0.5, rel=1e-3)


def test_the_bound_counts_the_bias_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = PEERS["diffusers-layer"].build()
    gains = bound_of(model, inputs, "")
    model.norm_q.bias.data.fill_(1.0)
    model.norm_k.bias.data.fill_(1.0)
    aligned(model)
    with seen(monkeypatch) as logits, torch.no_grad():
        model(random_input())
    assert gains < logits[0].max().item() < bound_of(model, inputs, "")


def test_what_x_transformers_adds_to_its_logits_or_hides() -> None:
    x, other = random_input(), random_input() + 1
    module, model = module_of("x-transformers-alibi")
    position_bias = {"rel_pos": model.attn_layers.rel_pos}
    added = [
        logits_of(module, y, **position_bias) - by_hand("x-transformers-plain", module, y)
        for y in (x, other)
    ]
    torch.testing.assert_close(*added, rtol=1e-4, atol=1e-4)
    assert added[0].abs().max() > 1

    module, _ = module_of("x-transformers-sink")
    module.attend.head_attn_sink.data.copy_(torch.arange(1.0, 1 + Hq))
    logits = logits_of(module, x)
    assert logits.shape[-1] == TOKENS + 1
    assert torch.equal(logits[0, :, 0, 0], module.attend.head_attn_sink)
    torch.testing.assert_close(
        logits[..., 1:], by_hand("x-transformers-plain", module, x), rtol=1e-4, atol=1e-5
    )

    module, _ = module_of("x-transformers-window")
    _, inside = module(x, return_intermediates=True)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    assert torch.equal(inside.post_softmax_attn[0, 0] > 0, (distance >= 0) & (distance < 5))


# RoPE on a grid ------------------------------------------------------------------------------------


def test_positions_on_a_grid_are_relative() -> None:
    """No QK023 for Flux: moving text and image together moves nothing."""
    torch.manual_seed(0)
    model, inputs = flux()
    shift = torch.tensor([2.0, 3.0, 5.0])
    moved = inputs | {name: inputs[name] + shift for name in ("img_ids", "txt_ids")}
    with torch.no_grad():
        one, other = (model.eval()(**given).sample for given in (inputs, moved))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class OnlyQueries(transformer_flux.FluxAttnProcessor):
    """Forgets to turn k."""

    def __call__(
        self, attn: Any, x: Tensor, text: Any, mask: Any, image_rotary_emb: Any = None
    ) -> Tensor:
        from diffusers.models.embeddings import apply_rotary_emb

        q, k, v = (p(x).unflatten(-1, (Hq, D)) for p in (attn.to_q, attn.to_k, attn.to_v))
        q = apply_rotary_emb(attn.norm_q(q), image_rotary_emb, sequence_dim=1)
        q, k, v = (y.transpose(1, 2) for y in (q, attn.norm_k(k), v))
        return attn.to_out[0](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fault", ["none", "k is not turned", "angles in bf16", "places by chance"])
def test_rope_that_is_not_relative_is_found_on_a_grid_too(fault: str) -> None:
    torch.manual_seed(0)
    _, inputs = flux()
    attention = transformer_flux.FluxAttention(DIM, heads=Hq, dim_head=D, eps=1e-6).eval()
    places = 5 * inputs["img_ids"]
    if fault == "places by chance":
        places = places[:1] + 20 * torch.rand_like(places).cumsum(0)
        places[0] = 0
    cos, sin = transformer_flux.FluxPosEmbed(10_000, [4, 4, 8])(places)
    if fault == "angles in bf16":
        angles = torch.atan2(sin, cos) + 2 * math.pi * torch.arange(16)[:, None]
        angles = angles.bfloat16().float() - angles[0].bfloat16().float()
        cos, sin = angles.cos(), angles.sin()
    if fault == "k is not turned":
        attention.set_processor(OnlyQueries())
    report = audit(attention, {"hidden_states": random_input(16), "image_rotary_emb": (cos, sin)})
    assert len(report.formulas) == 1, report.not_probed
    assert ("QK023" in report.codes) == (fault != "none")


# What is not read back -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"attn_qk_norm": True, "attn_qk_norm_groups": 2},
            "is not the norm of a projection, followed by a gain and a rotation",
        ),
        ({"attn_num_mem_kv": 2}, "one row per token"),
    ],
)
def test_what_is_not_understood_is_said(options: dict[str, Any], reason: str) -> None:
    torch.manual_seed(0)
    report = audit(*decoder(**options)())
    assert not report.formulas
    assert len(report.not_probed) == 2
    assert all(reason in line for line in report.not_probed)


def test_a_clip_with_arguments_of_its_own_is_not_called_wrongly() -> None:
    torch.manual_seed(0)
    attention = x_transformers.x_transformers.Attention(DIM, dim_head=D, heads=Hq, causal=True)
    report = audit(attention, random_input())
    assert any(line.startswith("qk_clip_ raised") for line in report.not_probed)
    assert not report.codes

"""The mutants have the faults that they are labelled with and no others, shown without the auditor.

Every code has a witness, a property measured on the model with knowledge of its parts; it must hold for
the mutants labelled with the code and for nothing else.

Shapes: B batch, T tokens, H heads, D head width, C hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from base_parts import SIZES, VOCABULARY, Call, Faults, visibility
from bases import LanguageModel, build
from mutants import COMBINED, HEALTHY, MUTANTS, PADDED, B, Mutant, T, batch, is_gain

CODES = [f"QK{number:03}" for number in (*range(2, 6), *range(7, 21), 23)]
# Hidden / heads is the width of the head in the fused base.
ONE_BASE_ONLY = {"QK018"}
EXACT, FELT = 1e-9, 1e-3

TOKENS = batch(is_packed=False, is_padded=False)["tokens"]
HALF = T // 2


# The definition.


def dense(
    model: LanguageModel,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    key_padding: Tensor | None = None,
) -> Tensor:
    """Logits from the weights in float64: pairs as complex numbers, visibility pair by pair."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    is_split, sizes = "blocks.0.attention.q_proj.weight" in w, model.sizes
    D, R, G = sizes.head_dim, sizes.rotary_width, sizes.q_heads // sizes.kv_heads
    positions = torch.arange(T).expand(B, T) if positions is None else positions.expand(B, T)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def block_norm(x: Tensor, name: str) -> Tensor:
        eps = 1e-5 if "blocks" in name and not is_split else 1e-6
        if not is_split:
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def hat(x_BTHD: Tensor, gain_HD: Tensor) -> Tensor:
        x = x_BTHD / (x_BTHD.square().sum(-1, keepdim=True) / D + 1e-6).sqrt() * gain_HD
        angle = positions[..., None] * 1e4 ** (-torch.arange(R // 2).double() / (R // 2))
        turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
        if is_split:
            z = torch.complex(x[..., : R // 2], x[..., R // 2 : R]) * turn
            turned = torch.cat([z.real, z.imag], -1)
        else:
            z = torch.view_as_complex(x[..., :R].unflatten(-1, (-1, 2)).contiguous()) * turn
            turned = torch.view_as_real(z).flatten(-2)
        return torch.cat([turned, x[..., R:]], -1)

    visible = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        for i in range(T):
            for j in range(i + 1):
                same = documents is None or documents[b, i] == documents[b, j]
                visible[b, i, j] = same and (key_padding is None or key_padding[b, j] or i == j)
    x = w["embedding.weight"][tokens]
    for layer in range(2):
        block = f"blocks.{layer}"
        attention = f"{block}.attention"
        y = block_norm(x, f"{block}.attention_norm")
        if is_split:
            q, k, v = (linear(y, f"{attention}.{s}_proj").unflatten(-1, (-1, D)) for s in "qkv")
            gains = (w[f"{attention}.q_norm.gain"], w[f"{attention}.k_norm.gain"])
        else:
            q, k, v = (z.unflatten(-1, (-1, D)) for z in linear(y, f"{attention}.qkv").chunk(3, -1))
            gains = (w[f"{attention}.q_gain"], w[f"{attention}.k_gain"])
        q, k = hat(q, gains[0]), hat(k, gains[1])
        heads = []
        for h in range(sizes.q_heads):
            weight = (q[:, :, h] @ k[:, :, h // G].mT / D**0.5).exp() * visible
            total = weight.sum(-1, keepdim=True)
            if f"{attention}.sink" in w:
                total = total + w[f"{attention}.sink"][h].exp()
            heads.append(weight / total @ v[:, :, h // G])
        x = x + linear(torch.cat(heads, -1), f"{attention}.{'o_proj' if is_split else 'out'}")
        y = block_norm(x, f"{block}.mlp_norm")
        up = linear(y, f"{block}.mlp.up")
        up = up * F.silu(linear(y, f"{block}.mlp.gate")) if is_split else F.gelu(up)
        x = x + linear(up, f"{block}.mlp.down")
    return linear(block_norm(x, "norm"), "head")


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("base", SIZES)
def test_clean_base_is_the_definition(
    base: str, has_sink: bool, is_packed: bool, is_padded: bool
) -> None:
    model = build(base, has_sink=has_sink)
    inputs = batch(is_packed=is_packed, is_padded=is_padded)
    inputs["positions"] = torch.arange(T) * 2 + 3  # a position per token, wherever the path starts
    wanted = dense(model, **inputs)
    assert_close(model(**inputs).double(), wanted, atol=2e-4, rtol=0)
    model = model.double()
    for path in model.paths().values():
        assert_close(path(**inputs), wanted, atol=EXACT, rtol=0)
    del inputs["positions"]
    for path in model.paths().values():
        assert_close(path(**inputs), dense(model, **inputs), atol=EXACT, rtol=0)


@pytest.mark.parametrize("base", SIZES)
def test_definition_sees_every_part(base: str) -> None:
    model = build(base, has_sink=True).double()
    wanted = dense(model, TOKENS)
    packed = batch(is_packed=True, is_padded=False)
    assert felt(dense(model, **packed) - wanted)
    assert felt(dense(model, TOKENS, torch.arange(T) * 2) - wanted)
    padded = batch(is_packed=False, is_padded=True)
    assert felt((dense(model, **padded) - wanted)[0, PADDED:])
    assert all(moves(model, name) for name, _ in model.named_parameters())


@pytest.mark.parametrize("base", SIZES)
def test_scaling_q_or_k_of_a_clean_base_moves_nothing(base: str) -> None:
    model = build(base).double()
    for side in "qk":
        assert (scaled(model, side, 4.0)(TOKENS) - model(TOKENS)).abs().max() < 1e-4
    assert felt(scaled(model, "v", 4.0)(TOKENS) - model(TOKENS))


@pytest.mark.parametrize("base", SIZES)
def test_gains_are_unequal_inside_every_rotary_pair(base: str) -> None:
    R, half = SIZES[base].rotary_width, SIZES[base].rotary_width // 2
    for gain_HD in gains(build(base)).values():
        turned = gain_HD[:, :R]
        a, b = (
            (turned[:, :half], turned[:, half:])
            if base == "split"
            else turned.unflatten(-1, (-1, 2)).unbind(-1)
        )
        assert (a - b).abs().mean() > 0.3
        assert len(gain_HD.unique()) == gain_HD.numel()


# What witnesses are made of.


def felt(difference: Tensor) -> bool:
    return not bool(difference.abs().max() < FELT)  # NaN is felt


def gains(model: LanguageModel) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if is_gain(name)}


def scaled(model: LanguageModel, side: str, factor: float) -> LanguageModel:
    """A copy with the projection of one of q, k, v multiplied."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.weight_of(side).mul_(factor)
    return model


def with_gains(model: LanguageModel, change: Callable[[Tensor], Tensor]) -> LanguageModel:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for gain in gains(model).values():
            gain.copy_(change(gain))
    return model


def moves(model: LanguageModel, name: str) -> bool:
    """The parameter has a say in the logits."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        parameter = changed.get_parameter(name)
        parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return bool((changed(TOKENS) - model(TOKENS)).abs().max() > EXACT)


def call_of(model: LanguageModel, length: int) -> Call:
    own = model.sizes.implementation
    positions = torch.arange(length)[None]
    visible = visibility(length, length, None, None, own, Faults())
    return Call(positions, positions, visible, False, own, own, None)


def heads(model: LanguageModel, side: str) -> Tensor:
    """`[1, T, H, D]`, normal."""
    H = model.sizes.q_heads if side == "q" else model.sizes.kv_heads
    generator = torch.Generator().manual_seed(5)
    return torch.randn(1, T, H, model.sizes.head_dim, generator=generator, dtype=torch.float64)


def hat(model: LanguageModel, x_BTHD: Tensor, side: str) -> Tensor:
    return model.blocks[0].attention.hat(x_BTHD, side, call_of(model, T))


def is_normed(model: LanguageModel, side: str) -> bool:
    x = heads(model, side)
    return bool((hat(model, 4 * x, side) / hat(model, x, side) - 1).abs().median() < 0.01)


def attended(model: LanguageModel, q: float, k: float) -> Tensor:
    """Probabilities `[2]` of two keys with logits of scale * q * k and of scale * q * -k."""
    sizes = model.sizes
    q_BHTD, k_BHTD, v_BHTD = (
        torch.zeros(1, H, 2, sizes.head_dim, dtype=torch.float64)
        for H in (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)
    )
    q_BHTD[..., 0], k_BHTD[:, :, 0, 0], k_BHTD[:, :, 1, 0] = q, k, -k
    v_BHTD[:, :, 0, 0] = v_BHTD[:, :, 1, 1] = 1.0
    return model.blocks[0].attention.attend(q_BHTD, k_BHTD, v_BHTD, call_of(model, 2))[0, 0, 1, :2]


def scale_of(model: LanguageModel) -> float:
    p = attended(model, 1.0, 1.0)
    return float((p[0] / p[1]).log() / 2)


def shift_moves(model: LanguageModel) -> bool:
    shifted = model(TOKENS, torch.arange(T) + 300)
    return bool((shifted - model(TOKENS)).abs().max() > EXACT)


def leaks(path: Callable[..., Tensor]) -> set[str]:
    """What reaches visible outputs: tokens to come, another document, padding."""
    found = set()
    documents, real = (
        batch(is_packed=True, is_padded=True)[key] for key in ("documents", "key_padding")
    )
    first = documents == 0
    later = (torch.arange(T) >= HALF).expand(B, T)
    for kind, changed, unmoved, options in (
        ("future", later, ~later, {}),
        ("document", first, ~first, {"documents": documents}),
        ("padding", ~real, real, {"key_padding": real}),
    ):
        other = torch.where(changed, (TOKENS + 1) % VOCABULARY, TOKENS)
        moved = (path(other, **options) - path(TOKENS, **options))[unmoved]
        if moved.abs().max() > EXACT:
            found.add(kind)
    return found


# Witnesses: is this wrong with the model?


def gain_after_rope(mutant: Mutant, model: LanguageModel) -> bool:
    return shift_moves(model) and not shift_moves(with_gains(model, torch.ones_like))


def v_is_normed(mutant: Mutant, model: LanguageModel) -> bool:
    # Small, so that a clip is out of reach; differences, so that a bias is none of it.
    generator = torch.Generator().manual_seed(2)
    x_BTC = torch.randn(1, T, model.sizes.hidden, generator=generator, dtype=torch.float64)
    small, smaller, none = (
        scaled(model, "v", factor).blocks[0].attention(x_BTC, call_of(model, T))
        for factor in (0.05, 0.025, 0.0)
    )
    return not torch.allclose(small - smaller, smaller - none, rtol=1e-6, atol=EXACT)


def heads_share_a_statistic(mutant: Mutant, model: LanguageModel) -> bool:
    for side in "qk":
        x = heads(model, side)
        louder = x.clone()
        louder[:, :, 0] *= 10
        if felt((hat(model, louder, side) - hat(model, x, side))[:, :, 1:]):
            return True
    return False


def no_gain(mutant: Mutant, model: LanguageModel) -> bool:
    normed = any(is_normed(model, side) for side in "qk")
    return normed and not any(moves(model, name) for name in gains(model))


def eps_is_not_1e_6_inside(mutant: Mutant, model: LanguageModel) -> bool:
    for side in "qk":
        norm = model.blocks[0].attention.norm_of(side)
        if norm is not None:
            ones = heads(model, side).sign()  # of mean square 1 over any axes
            ratio = norm(1e-3 * ones, False).abs().mean() / norm(ones, False).abs().mean()
            if not 0.85 < ratio / 0.5**0.5 < 1.15:
                return True
    return False


def statistic_is_rounded(mutant: Mutant, model: LanguageModel) -> bool:
    attention = mutant.build().blocks[0].attention
    axes = {"head": -1, "all_heads": (-2, -1), "over_heads": -2, "over_tokens": 1}[
        mutant.faults.statistic
    ]
    for side in "qk":
        norm = attention.norm_of(side)
        if norm is not None:
            x = (300 * heads(model, side)).to(mutant.dtype)
            wanted = x.double() / x.double().square().mean(axes, keepdim=True).sqrt()
            if not ((norm(x, False) / wanted - 1).abs().max() < 5e-4):
                return True
    return False


def gain_is_unused(mutant: Mutant, model: LanguageModel) -> bool:
    return not all(moves(model, name) for name in gains(model))


def gain_is_treated_as_a_matrix(mutant: Mutant, model: LanguageModel) -> bool:
    optimizer = mutant.make_optimizer(model)
    if optimizer is None:
        return False
    ids = {id(gain) for gain in gains(model).values()}
    return any(
        group["weight_decay"] > 0 or group.get("use_muon") or isinstance(optimizer, torch.optim.Muon)
        for group in optimizer.param_groups
        if ids & {id(p) for p in group["params"]}
    )


def hard_limit(mutant: Mutant, model: LanguageModel) -> bool:
    louder = with_gains(model, lambda gain: 20 * gain)
    for side in "qk":
        x = heads(model, side)
        if not (F.cosine_similarity(hat(louder, 20 * x, side), hat(model, x, side), -1).min() > 0.999):
            return True
        if is_normed(model, side) and felt(scaled(model, side, 4.0)(TOKENS) - model(TOKENS)):
            return True
    return bool(attended(model, 10.0, 10.0)[0] < 0.999)


def clip_does_nothing(mutant: Mutant, model: LanguageModel) -> bool:
    if not hasattr(model, "qk_clip_"):
        return False
    before = model(TOKENS)
    clipped = copy.deepcopy(model)
    clipped.qk_clip_(0.5)
    for side in "qk":
        weights = (m.blocks[0].attention.weight_of(side) for m in (model, clipped))
        assert felt(torch.sub(*weights))
    return not felt(clipped(TOKENS) - before)


def sink_is_ignored(mutant: Mutant, model: LanguageModel) -> bool:
    if not mutant.has_sink:
        return False
    # In the last layer alone: the sinks of the others act on cached keys, and so on decoded tokens too.
    louder = copy.deepcopy(model)
    with torch.no_grad():
        louder.blocks[-1].attention.sink.add_(2.0)
    pairs = zip(louder.paths().values(), model.paths().values(), strict=True)
    return not all(felt((a(TOKENS) - b(TOKENS))[:, HALF:]) for a, b in pairs)


def paths_disagree(mutant: Mutant, model: LanguageModel) -> bool:
    eager, *others = (path(TOKENS) for path in model.paths().values())
    return any(bool((eager - other).abs().max() > EXACT) for other in others)


def mask_is_lost_elsewhere(mutant: Mutant, model: LanguageModel) -> bool:
    other = {"eager": "sdpa", "sdpa": "eager"}[model.sizes.implementation]
    return bool(leaks(model.paths()[other]) - leaks(model))


def gain_is_untrained(mutant: Mutant, model: LanguageModel) -> bool:
    return mutant.is_trained and any(bool((gain == 1).all()) for gain in gains(model).values())


WITNESSES: dict[str, Callable[[Mutant, LanguageModel], bool]] = {
    "QK002": gain_after_rope,
    "QK003": v_is_normed,
    "QK004": heads_share_a_statistic,
    "QK005": no_gain,
    "QK007": eps_is_not_1e_6_inside,
    "QK008": statistic_is_rounded,
    "QK009": gain_is_unused,
    "QK010": gain_is_treated_as_a_matrix,
    "QK011": hard_limit,
    "QK012": clip_does_nothing,
    "QK013": sink_is_ignored,
    "QK014": lambda mutant, model: bool(leaks(model)),
    "QK015": paths_disagree,
    "QK016": lambda mutant, model: is_normed(model, "q") != is_normed(model, "k"),
    "QK017": lambda mutant, model: abs(scale_of(model) * 16 - 1) < EXACT,
    "QK018": lambda mutant, model: abs(scale_of(model) * 12**0.5 - 1) < EXACT,
    "QK019": mask_is_lost_elsewhere,
    "QK020": gain_is_untrained,
    "QK023": lambda mutant, model: shift_moves(with_gains(model, torch.ones_like)),
}


@pytest.mark.parametrize("mutant", MUTANTS + HEALTHY, ids=lambda mutant: mutant.name)
def test_labels_are_what_is_wrong(mutant: Mutant) -> None:
    model = mutant.build().double()
    with torch.no_grad():
        found = {code for code, is_wrong in WITNESSES.items() if is_wrong(mutant, model)}
    assert mutant.expected <= found
    assert found <= mutant.expected | mutant.also


# Else what is wrong is done to the weights, not with them.
ACTING = [m for m in MUTANTS if replace(m.faults, qk_clip=False) != Faults()]


@pytest.mark.parametrize("mutant", ACTING, ids=lambda mutant: mutant.name)
@torch.no_grad()
def test_mutant_is_another_function(mutant: Mutant) -> None:
    inputs = mutant.inputs()

    def outputs(model: LanguageModel) -> list[Tensor]:
        tiny = scaled(scaled(model, "q", 1e-3), "k", 1e-3)
        far = model(**inputs, positions=torch.arange(T) + 300)
        return [path(**inputs) for path in model.paths().values()] + [tiny(**inputs), far]

    pairs = zip(outputs(mutant.build()), outputs(mutant.build_clean()), strict=True)
    assert any(felt(faulty - clean) for faulty, clean in pairs)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_trains(mutant: Mutant) -> None:
    """Nothing crashes and nothing is NaN: that is what makes these mistakes invisible."""
    model = mutant.build()
    optimizer = mutant.make_optimizer(model)
    inputs = mutant.inputs()
    logits = model(**inputs).float()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["tokens"][:, 1:].flatten()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if optimizer is not None:
        optimizer.step()
        assert model(**inputs).isfinite().all()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_has_the_weights_of_the_clean_model(mutant: Mutant) -> None:
    clean = dict(mutant.build_clean().named_parameters())
    is_untrained = bool(mutant.faults.untrained_gains)
    for name, p in mutant.build().named_parameters():
        assert (is_untrained and is_gain(name)) or torch.equal(p, clean[name])


def test_there_are_enough_mutants() -> None:
    names = [mutant.name for mutant in MUTANTS + HEALTHY]
    assert len(set(names)) == len(names)
    assert len(MUTANTS) >= 48
    assert len(COMBINED) >= 10
    assert all(2 <= len(mutant.expected) <= 3 for mutant in COMBINED)
    assert not any(mutant.expected for mutant in HEALTHY)
    assert list(WITNESSES) == CODES
    for code in CODES:
        bases = [mutant.base for mutant in MUTANTS if code in mutant.expected]
        assert len(bases) >= 2, code
        assert code in ONE_BASE_ONLY or set(bases) == set(SIZES), code


def test_every_fault_is_seeded() -> None:
    clean = Faults()
    for field in fields(Faults):
        values = {getattr(mutant.faults, field.name) for mutant in MUTANTS}
        assert values - {getattr(clean, field.name)}, field.name


def test_only_a_clipped_model_can_be_clipped() -> None:
    for mutant in MUTANTS + HEALTHY:
        assert hasattr(mutant.build(), "qk_clip_") == mutant.faults.qk_clip

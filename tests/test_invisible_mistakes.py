"""The mistakes that train, converge and are wrong: each promise of QK-norm asserted by name.

Everything here uses unequal gains: with equal ones most of these mistakes change nothing.
"""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, NormDialect, Rope, attention, logit_bound, qk_norm_rope
from qknorm.nn import Attention, AttentionConfig, QKNorm, RopeScaling, RotaryEmbedding

BACKENDS = ["auto", "stock", "reference"]


def exact_table(positions, R, layout):
    """Rotations in fp64, so that a shift of positions is exact to 1e-12."""
    angle = positions.double()[:, None] * 100.0 ** (-torch.arange(0, R, 2).double() / R)
    return Rope(angle.cos(), angle.sin(), layout)


def uneven(heads, width, seed, low=0.3, high=2.5):
    """Gains `[heads, width]` without two equal entries, some negative."""
    generator = torch.Generator().manual_seed(seed)
    gain = low + (high - low) * torch.rand(heads, width, generator=generator, dtype=torch.float64)
    return gain * torch.where(torch.rand(heads, width, generator=generator) < 0.2, -1.0, 1.0)


def double(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=grad)


# Order against RoPE.


def logits_of(order, start, layout, rotary_dim):
    norm = QKNorm(2, 2, 8, NormDialect(order=order)).double()
    with torch.no_grad():
        norm.q_gain.copy_(uneven(2, 8, 1))
        norm.k_gain.copy_(uneven(2, 8, 2))
    q, k = double(1, 2, 6, 8, seed=3), double(1, 2, 6, 8, seed=4)
    q_hat, k_hat = norm(q, k, exact_table(torch.arange(6) + start, rotary_dim, layout))
    return q_hat @ k_hat.mT


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_norm_comes_before_rope_so_a_shift_of_all_positions_changes_nothing(layout, rotary_dim):
    at_0, at_57 = (logits_of("before_rope", start, layout, rotary_dim) for start in (0, 57))
    assert_close(at_0, at_57, atol=1e-10, rtol=0)
    other, moved = (logits_of("after_rope", start, layout, rotary_dim) for start in (0, 57))
    assert (other - moved).abs().max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_operator_keeps_relative_positions_with_unequal_gains(backend, layout):
    q, k, v = (double(1, h, 7, 8, seed=h) for h in (4, 2, 3))
    v = v[:, :2]
    gains = {"q_gain": uneven(4, 8, 5), "k_gain": uneven(2, 8, 6)}
    outs = [
        attention(
            q, k, v, **gains, rope=exact_table(torch.arange(7) + start, 8, layout), backend=backend
        )
        for start in (0, 41)
    ]
    assert_close(*outs, atol=1e-10, rtol=0)
    still = exact_table(torch.zeros(7), 8, layout)
    assert (outs[0] - attention(q, k, v, **gains, rope=still, backend=backend)).abs().max() > 0.01


def test_the_two_layouts_are_two_functions():
    q, k = double(1, 2, 3, 8, seed=1), double(1, 2, 3, 8, seed=2)
    half, interleaved = (
        qk_norm_rope(q, k, rope=exact_table(torch.arange(3) + 2, 8, layout))
        for layout in ("half", "interleaved")
    )
    assert (half[0] - interleaved[0]).abs().max() > 0.1


# V.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_v_is_untouched_so_scaling_it_scales_the_output_exactly(backend, dtype):
    q, k, v = (double(2, 2, 9, 8, seed=s).to(dtype) for s in range(3))
    options = {
        "q_gain": uneven(2, 8, 1).float(),
        "k_gain": uneven(2, 8, 2).float(),
        "sink": torch.tensor([0.5, 3.0]),
        "backend": backend,
    }
    # A power of two, so that exactly means bit by bit.
    assert torch.equal(attention(q, k, v * 4, **options), attention(q, k, v, **options) * 4)


# The statistic.


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_statistic_is_over_the_heads_own_width_so_scaling_one_head_moves_no_other(backend):
    q, k, v = (double(1, 4, 6, 8, seed=s) for s in range(3))
    gains = {"q_gain": uneven(4, 8, 1), "k_gain": uneven(4, 8, 2)}
    before = attention(q, k, v, **gains, eps=1e-6, backend=backend)
    for head, x in itertools.product(range(4), (q, k)):
        scaled = x.clone()
        scaled[:, head] *= 0.01  # small, so that eps shows in the head itself
        after = attention(
            scaled if x is q else q, scaled if x is k else k, v, **gains, eps=1e-6, backend=backend
        )
        others = [h for h in range(4) if h != head]
        assert torch.equal(after[:, others], before[:, others])
        assert (after[:, head] - before[:, head]).abs().max() > 1e-6


def test_a_statistic_is_taken_per_token_and_per_sequence():
    q = double(2, 2, 5, 8)
    gain = uneven(2, 8, 1)
    scaled = q.clone()
    scaled[1, :, 3] *= 100
    before, after = (qk_norm_rope(x, x, q_gain=gain, k_gain=gain)[0] for x in (q, scaled))
    assert_close(before, after, atol=1e-4, rtol=0)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, :, :3], after[1, :, :3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_are_fp32_parameters_of_shape_heads_by_width(dtype):
    """Also where the rest of the model is built in bf16: 1 + 2^-9 must remain a gain."""
    torch.set_default_dtype(dtype)
    try:
        norm = QKNorm(6, 2, 16)
        layer = Attention(AttentionConfig(dim=24, num_heads=6, num_kv_heads=2, head_dim=16))
    finally:
        torch.set_default_dtype(torch.float32)
    for module in (norm, layer.norm):
        assert (tuple(module.q_gain.shape), tuple(module.k_gain.shape)) == ((6, 16), (2, 16))
        for gain in (module.q_gain, module.k_gain):
            assert isinstance(gain, torch.nn.Parameter)
            assert torch.equal(gain.detach().double(), torch.ones(gain.shape, dtype=torch.float64))
            assert gain.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_rope", [False, True])
def test_statistic_gain_and_rope_are_fp32_with_one_rounding(dtype, with_rope):
    """Within half an ulp of the exact value of the same inputs; low-precision steps are off by more."""
    D = 128
    x = double(2, 3, 50, D).to(dtype)
    gain = uneven(3, D, 1).float()
    rope = exact_table(torch.arange(50) + 9, D, "half") if with_rope else None
    float_rope = rope and Rope(rope.cos.float(), rope.sin.float(), "half")

    def by_definition(x, gain, rope):
        y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain[:, None]
        if rope is not None:
            a, b = y.chunk(2, -1)
            cos, sin = rope.cos.to(y.dtype), rope.sin.to(y.dtype)
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return y

    exact = by_definition(x.double(), gain.double(), rope)
    half_ulp = torch.finfo(dtype).eps / 2
    floor = 3e-6 + torch.finfo(dtype).smallest_normal * half_ulp
    ours, k_hat = qk_norm_rope(x, x, q_gain=gain, k_gain=gain, rope=float_rope)
    for y in (ours, k_hat):
        assert ((y.double() - exact).abs() <= exact.abs() * half_ulp + floor).all()
    naive = by_definition(x, gain.to(dtype), rope)
    assert (naive.double() - exact).norm() > 1.5 * (ours.double() - exact).norm()


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5, 0.0])
def test_eps_is_inside_the_mean_and_shows_in_small_inputs(size):
    x = double(1, 2, 4, 16) * size
    gain = uneven(2, 16, 1)
    exact = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain[:, None]
    for eps_given in ({}, {"eps": 1e-6}):
        q, k = qk_norm_rope(x, x, q_gain=gain, k_gain=gain, **eps_given)
        assert_close(q, exact, atol=1e-14, rtol=1e-12)
        assert_close(k, exact, atol=1e-14, rtol=1e-12)


# Gradients.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_the_gradient_of_the_norm_is_orthogonal_to_its_input(backend, rotary_dim):
    """The norm does not see the length of q, so no step along q can help: q.grad . q = 0."""
    q, k = double(2, 4, 6, 8, grad=True), double(2, 2, 6, 8, seed=1, grad=True)
    v = double(2, 2, 6, 8, seed=2)
    rope = exact_table(torch.arange(6) + 3, rotary_dim, "half") if rotary_dim else None
    out = attention(
        q, k, v, q_gain=uneven(4, 8, 1), k_gain=uneven(2, 8, 2), eps=1e-30, rope=rope, backend=backend
    )
    (out * double(2, 4, 6, 8, seed=4)).sum().backward()
    for x in (q, k):
        assert (x.grad * x).sum(-1).abs().max() < 1e-13
        assert x.grad.norm() > 0.1


def test_the_gradient_of_a_full_width_norm_is_orthogonal_over_all_heads_together():
    q, k = double(2, 4, 6, 8, grad=True), double(2, 2, 6, 8, seed=1, grad=True)
    norm = QKNorm(4, 2, 8, NormDialect(statistic="full", eps=1e-30)).double()
    q_hat, k_hat = norm(q, k)
    ((q_hat * double(2, 4, 6, 8, seed=2)).sum() + (k_hat * double(2, 2, 6, 8, seed=3)).sum()).backward()
    for x in (q, k):
        product = (x.grad * x).sum(-1)
        assert product.sum(1).abs().max() < 1e-13
        assert product.abs().max() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotary_dim", [0, 8])
def test_second_derivatives_are_exact_or_refused_never_wrong(backend, rotary_dim):
    """A gradient penalty: the derivative of |d loss / d q|^2, against finite differences."""
    k, v, weight = (double(1, 2, 5, 8, seed=s) for s in (1, 2, 3))
    gains = {"q_gain": uneven(2, 8, 1), "k_gain": uneven(2, 8, 2)}
    rope = exact_table(torch.arange(5) + 3, rotary_dim, "half") if rotary_dim else None

    def penalty(q):
        out = attention(q, k, v, **gains, rope=rope, backend=backend)
        (gradient,) = torch.autograd.grad((out * weight).sum(), q, create_graph=True)
        return gradient.square().sum()

    q, direction, step = double(1, 2, 5, 8, grad=True), double(1, 2, 5, 8, seed=4), 1e-5
    try:
        (second,) = torch.autograd.grad(penalty(q), q)
    except RuntimeError:
        return
    ahead, behind = (
        penalty((q + sign * step * direction).detach().requires_grad_()).item() for sign in (1, -1)
    )
    slope = (ahead - behind) / (2 * step)
    assert (second * direction).sum().item() == pytest.approx(slope, rel=1e-5)


# What the norm is for.


def layer_of(norm):
    torch.manual_seed(0)
    config = AttentionConfig(
        dim=24, num_heads=4, num_kv_heads=2, head_dim=8, norm=norm, sink="logit", gate=True
    )
    layer = Attention(config).double()
    if norm is not None:
        with torch.no_grad():
            layer.norm.q_gain.copy_(uneven(4, 8, 1))
            layer.norm.k_gain.copy_(uneven(2, 8, 2))
    return layer


@pytest.mark.parametrize("rows", [slice(0, 32), slice(32, 48), slice(0, 48)], ids=["W_q", "W_k", "both"])
def test_scaling_w_q_or_w_k_by_3_changes_nothing(rows):
    x = double(2, 7, 24)
    rope = RotaryEmbedding(4, layout="interleaved")(7, start=2)
    changes = {}
    for name, norm in (("normed", NormDialect(eps=1e-12)), ("bare", None)):
        layer = layer_of(norm)
        before, stats = layer(x, rope=rope, stats=True)
        with torch.no_grad():
            layer.qkv.weight[rows] *= 3
        after, scaled_stats = layer(x, rope=rope, stats=True)
        changes[name] = (after - before).abs().max()
        if norm is not None:
            assert_close(scaled_stats.max_logit, stats.max_logit, atol=1e-9, rtol=0)
            assert_close(scaled_stats.entropy_nats, stats.entropy_nats, atol=1e-9, rtol=0)
    assert changes["normed"] < 1e-9
    assert changes["bare"] > 1e-3


def adversarial_max(q_gain, k_gain, rope, scale, dtype=torch.float64, steps=150):
    """The largest |logit| per head that gradient ascent from one-hot pairs and noise can find."""
    Hq, D = q_gain.shape
    tokens = rope.cos.shape[-2] if rope is not None else 4
    # The last query meets every key, so all relative positions of the table occur in one call.
    starts = [torch.randn(D, Hq, tokens, D), torch.eye(D)[:, None, None].expand(-1, Hq, tokens, -1)]
    q, k = (
        (torch.cat([s + 0.3 * torch.randn_like(s) for s in starts]) * 1e3).double().requires_grad_()
        for _ in range(2)
    )
    k_gain = k_gain.repeat_interleave(Hq // len(k_gain), 0)
    best = torch.zeros(Hq, dtype=torch.float64)
    optimizer = torch.optim.Adam((q, k), lr=60.0)
    for step in range(steps):
        q_in, k_in = (x.to(dtype) if step % 10 == 9 else x for x in (q, k))
        q_hat, k_hat = qk_norm_rope(q_in, k_in, q_gain=q_gain, k_gain=k_gain, rope=rope)
        logits = scale * (q_hat.double() @ k_hat.double().mT)
        if step % 10 == 9 or dtype == torch.float64:
            best = torch.maximum(best, logits.detach().abs().amax((0, 2, 3)))
        optimizer.zero_grad()
        (-logits.abs().square().sum()).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_the_bound_is_never_exceeded_and_nearly_reached_by_an_adversary(layout, rotary_dim):
    torch.manual_seed(0)
    q_gain, k_gain = uneven(2, 8, 7), uneven(1, 8, 8)
    rope = exact_table(torch.arange(6), rotary_dim, layout) if rotary_dim else None
    found = adversarial_max(q_gain, k_gain, rope, 0.7)
    loose = logit_bound(q_gain, k_gain, scale=0.7)
    by_pair = logit_bound(q_gain, k_gain, scale=0.7, rotary_dim=rotary_dim, layout=layout)
    exact = by_pair if rope is None else logit_bound(q_gain, k_gain, scale=0.7, rope=rope)
    assert_close(loose, 0.7 * 8 * q_gain.abs().amax(-1) * k_gain.abs().amax(-1))
    assert (found <= exact * (1 + 1e-9)).all()
    assert (exact <= by_pair * (1 + 1e-9)).all()
    assert (by_pair <= loose * (1 + 1e-9)).all()
    assert (found >= exact * 0.98).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_covers_the_rounding_of_half_precision(dtype):
    torch.manual_seed(1)
    q_gain, k_gain = uneven(2, 8, 9), uneven(2, 8, 10)
    rope = exact_table(torch.arange(6), 4, "half")
    found = adversarial_max(q_gain, k_gain, rope, 1.0, dtype)
    assert (found <= logit_bound(q_gain, k_gain, scale=1.0, rope=rope, dtype=dtype)).all()
    assert (found >= 0.95 * logit_bound(q_gain, k_gain, scale=1.0, rope=rope)).all()


def test_the_bound_holds_for_a_table_that_yarn_amplifies():
    """YaRN multiplies cos and sin by 1.37 here, so rotated logits grow by 1.88: the table says so."""
    torch.manual_seed(2)
    q_gain, k_gain = uneven(2, 8, 11), uneven(2, 8, 12)
    scaling = RopeScaling(kind="yarn", factor=40.0, original_length=32)
    rope = RotaryEmbedding(8, layout="half", scaling=scaling)(6)
    found = adversarial_max(q_gain, k_gain, rope, 1.0)
    assert (found <= logit_bound(q_gain, k_gain, scale=1.0, rope=rope) * (1 + 1e-6)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_measured_maximum_stays_below_the_bound_whatever_the_weights(backend):
    torch.manual_seed(3)
    for factor in (1.0, 1e3, 1e6):
        q, k = torch.randn(1, 4, 33, 8) ** 3 * factor, torch.randn(1, 2, 33, 8) ** 3 * factor
        q_gain, k_gain = uneven(4, 8, 13).float(), uneven(2, 8, 14).float()
        rope = RotaryEmbedding(8, layout="half")(33)
        _, stats = attention(
            q, k, k, q_gain=q_gain, k_gain=k_gain, rope=rope, mask=Mask(), stats=True, backend=backend
        )
        bound = logit_bound(q_gain, k_gain, rope=rope)
        assert (stats.max_logit <= bound * (1 + 1e-6)).all()
        assert (stats.max_logit >= bound / math.sqrt(8) / 2).all()

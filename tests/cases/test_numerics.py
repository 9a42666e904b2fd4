"""Public failures (see README.md) about numbers: overflow, eps, scale, masked rows, statistic axes.

Expected values are those of the cases; the gains are unequal wherever an equal one would hide the fault.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from qknorm import (
    Mask,
    NormDialect,
    RowSink,
    SinkToken,
    attention,
    logit_bound,
    logit_stats,
    qk_norm_rope,
)
from qknorm.nn import Attention, AttentionConfig, QKNorm

BACKENDS = ["auto", "stock", "reference"]


def heads(*values, width=8, tokens=2):
    """`[1, H, T, width]` with one constant per head."""
    return torch.tensor(values).float()[None, :, None, None].expand(1, -1, tokens, width)


def per_entry(norm, x):
    """Normalise x as q and as k; both sides must agree, since the cases treat them alike."""
    q, k = norm(x, x)
    assert torch.equal(q, k)
    return q


def test_case_02_full_width_norm_uses_the_mean_over_all_heads():
    x = heads(1, 1, 3, 3)
    full = per_entry(QKNorm(4, 4, 8, NormDialect(statistic="full", gain="full")), x)
    assert_close(full, heads(0.4472, 0.4472, 1.3416, 1.3416), atol=5e-5, rtol=0)


def test_case_02_a_slice_of_the_heads_is_another_function_and_is_visible_as_such():
    x = heads(1, 1, 3, 3)
    part = per_entry(QKNorm(2, 2, 8, NormDialect(statistic="full", gain="full")), x[:, :2])
    assert_close(part, heads(1, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("gain", ["per_head", "none"])
def test_case_09_statistic_axis_is_the_declared_one_with_and_without_gains(gain):
    x = heads(1, 3)
    own = per_entry(QKNorm(2, 2, 8, NormDialect(gain=gain)), x)
    across = per_entry(QKNorm(2, 2, 8, NormDialect(gain=gain, statistic="full")), x)
    assert_close(own, heads(1, 1), atol=1e-5, rtol=0)
    assert_close(across, heads(0.4472, 1.3416), atol=5e-5, rtol=0)


def test_case_09_scaling_head_1_by_10_leaves_head_0_bit_equal():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    gains = {"q_gain": torch.rand(2, 8) + 0.5, "k_gain": torch.rand(2, 8) + 0.5}
    factor = torch.tensor([1.0, 10.0])[None, :, None, None]
    before = qk_norm_rope(q, k, **gains)
    after = qk_norm_rope(q * factor, k * factor, **gains)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, 0], b[:, 0])
    module = QKNorm(2, 2, 8, NormDialect(gain="none"))
    assert torch.equal(module(q, k)[0][:, 0], module(q * factor, k * factor)[0][:, 0])


@pytest.mark.parametrize(
    ("place", "eps", "value"),
    [
        ("mean", 1e-6, 0.7071),
        ("mean", 1e-5, 0.3015),
        ("sum", 1e-6, 0.9961),
        ("mean", torch.finfo(torch.float32).eps, 0.9452),
    ],
)
def test_case_10_eps_has_a_place_and_a_value(place, eps, value):
    x = torch.full((1, 2, 3, 128), 1e-3)
    q = per_entry(QKNorm(2, 2, 128, NormDialect(eps=eps, eps_place=place)), x)
    assert_close(q, torch.full_like(q, value), atol=5e-5, rtol=0)


def test_case_10_the_operator_puts_eps_inside_the_mean():
    x = torch.full((1, 1, 2, 128), 1e-3)
    one = torch.ones(1, 128)
    q, _ = qk_norm_rope(x, x, q_gain=one, k_gain=one, eps=1e-5)
    assert_close(q, torch.full_like(q, 0.3015), atol=5e-5, rtol=0)


def test_case_10_no_rescaling_by_the_maximum_inflates_eps():
    x = torch.full((1, 1, 1, 4096), 0.05)
    x[..., 7] = 60.0
    one = torch.ones(1, 4096)
    q, _ = qk_norm_rope(x, x, q_gain=one, k_gain=one, eps=1e-5)
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(q.double(), right, rtol=1e-6, atol=0)


def test_case_11_squares_do_not_overflow_in_fp16():
    x = torch.full((1, 2, 3, 128), 300.0, dtype=torch.float16)
    one = torch.ones(2, 128)
    for q in (qk_norm_rope(x, x, q_gain=one, k_gain=one)[0], QKNorm(2, 2, 128)(x, x)[0]):
        assert q.dtype == torch.float16
        assert torch.equal(q, torch.ones_like(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_11_the_product_of_q_and_k_does_not_overflow_in_fp16(backend):
    """40 * 40 * 128 is beyond fp16; the logit, 18 102, is what decides. The second key is opposite."""
    q = torch.full((1, 1, 1, 128), 40.0, dtype=torch.float16)
    k = torch.cat((q, -q), dim=2)
    v = torch.tensor([3.0, -5.0], dtype=torch.float16)[None, None, :, None].expand(1, 1, 2, 16)
    out, stats = attention(q, k, v, mask=Mask(), stats=True, backend=backend)
    assert torch.equal(out, torch.full_like(out, 3.0))
    assert stats.max_logit.item() == pytest.approx(18_102, rel=1e-4)
    assert logit_stats(q, k, mask=Mask()).max_logit.item() == pytest.approx(18_102, rel=1e-4)


def hidden_row_sinks():
    """Each kind of sink without a value, with the logit that a row without keys is left with."""
    learned = torch.tensor([1.5, -2.0], requires_grad=True)
    by_row = torch.randn(2, 2, 3, requires_grad=True)
    return {
        "none": (None, torch.full((2, 2, 3), -math.inf)),
        "off_by_one": ("off_by_one", torch.zeros(2, 2, 3)),
        "logit": (learned, learned.detach()[None, :, None].expand(2, 2, 3)),
        "by_row": (RowSink(by_row), by_row.detach()),
    }


def masks_that_hide_row_1():
    """Token 1 is padding between two documents; or token 1 is a document of padding, causally."""
    documents = torch.tensor([[0, -1, 0], [4, -1, 7]])
    return {"documents": Mask(documents=documents), "causal": Mask(causal=True, documents=documents)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["documents", "causal"])
@pytest.mark.parametrize("sink", ["none", "off_by_one", "logit", "by_row"])
@pytest.mark.parametrize("loss_rows", [[0, 2], [0, 1, 2]])
def test_case_12_a_fully_masked_row_gives_zero_and_finite_gradients(backend, mask, sink, loss_rows):
    torch.manual_seed(1)
    sink_value, row_lse = hidden_row_sinks()[sink]
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    gains = [torch.rand(2, 4, requires_grad=True) for _ in range(2)]
    out, stats = attention(
        q,
        k,
        v,
        q_gain=gains[0],
        k_gain=gains[1],
        mask=masks_that_hide_row_1()[mask],
        sink=sink_value,
        stats="rows",
        backend=backend,
    )
    out[:, :, loss_rows].square().sum().backward()
    assert torch.equal(out[:, :, 1], torch.zeros(2, 2, 4))
    assert out.isfinite().all()
    assert out[:, :, 0].abs().min() > 0
    assert_close(stats.rows.lse[:, :, 1], row_lse[:, :, 1].clone(), atol=1e-6, rtol=0)
    assert (stats.rows.max_logit[:, :, 1] == -math.inf).all()
    learned = [
        x for x in (sink_value, getattr(sink_value, "logit", None)) if isinstance(x, torch.Tensor)
    ]
    for x in (q, k, v, *gains, *learned):
        assert x.grad.isfinite().all()
    assert torch.equal(q.grad[:, :, 1], torch.zeros(2, 2, 4))
    assert torch.equal(k.grad[:, :, 1], torch.zeros(2, 2, 4))
    assert v.grad[:, :, 0].abs().max() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_12_masked_rows_take_part_in_no_statistic(backend):
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    mask = Mask(documents=torch.tensor([[0, -1, 0]]))
    _, with_hole = attention(q, k, v, mask=mask, stats=True, backend=backend)
    keep = [0, 2]
    _, without = attention(*(x[:, :, keep] for x in (q, k, v)), mask=Mask(), stats=True, backend=backend)
    assert with_hole.row_count == without.row_count == 2
    for name in ("max_logit", "entropy_nats", "entropy_ratio"):
        assert_close(getattr(with_hole, name), getattr(without, name), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_12_a_sink_token_stays_finite_where_no_key_is_visible(backend):
    """Every query sees a sink token, on top of the mask: the row gives its value, not NaN."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    key, value = (torch.randn(2, 4, requires_grad=True) for _ in range(2))
    mask = masks_that_hide_row_1()["causal"]
    out = attention(q, k, v, mask=mask, sink=SinkToken(key, value), backend=backend)
    assert_close(out[:, :, 1], value.detach().expand(2, 2, 4), atol=1e-6, rtol=0)
    out.square().sum().backward()
    for x in (q, k, v, key, value):
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("scale", "bound", "std", "entropy"), [(1 / 16, 16.0, 0.99, 4.38), (1.0, 256.0, 16.05, 0.31)]
)
def test_case_13_bound_spread_and_entropy_at_the_runtime_scale(scale, bound, std, entropy):
    """The scale is read, never repaired: 1 is legal, and shows in all three numbers."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 128, 256), torch.randn(1, 4, 128, 256)
    one = torch.ones(4, 256)
    # Above the supremum by the rounding of D + 6 steps in fp32, which it covers.
    room = logit_bound(one, one, scale=scale) / bound - 1
    assert (room > 0).all()
    assert (room <= 262 * 2.0**-24 + 1e-7).all()
    q_hat, k_hat = qk_norm_rope(q, k, q_gain=one, k_gain=one)
    assert (scale * q_hat @ k_hat.mT).std().item() == pytest.approx(std, rel=0.02)
    for backend in BACKENDS:
        _, stats = attention(
            q, k, k, q_gain=one, k_gain=one, mask=Mask(), scale=scale, stats=True, backend=backend
        )
        assert stats.entropy_nats.mean().item() == pytest.approx(entropy, abs=0.03)
        assert stats.entropy_ratio.mean().item() == pytest.approx(entropy / math.log(128), abs=0.01)
        assert (stats.max_logit <= bound).all()


def test_case_13_the_default_scale_is_one_over_root_d():
    one = torch.ones(1, 256)
    assert logit_bound(one, one).item() == pytest.approx(16.0, rel=2e-5)
    assert logit_bound(one.double(), one.double()).item() == pytest.approx(16.0, rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [None, 64**-0.5, 1.0, 10.0])
def test_case_14_every_backend_uses_the_scale_it_is_given(backend, scale):
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64)
    gains = {"q_gain": torch.rand(4, 64) + 0.1, "k_gain": torch.rand(2, 64) + 0.1}
    q_hat, k_hat = (x.double() for x in qk_norm_rope(q, k, **gains))
    logits = (scale or 1 / 8) * q_hat @ k_hat.repeat_interleave(2, 1).mT
    right = logits.softmax(-1) @ v.double().repeat_interleave(2, 1)
    out, stats = attention(q, k, v, **gains, mask=Mask(), scale=scale, stats=True, backend=backend)
    assert_close(out.double(), right, atol=2e-5, rtol=2e-5)
    assert_close(stats.max_logit.double(), logits.amax((0, 2, 3)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_14_an_l2_normalised_product_of_one_half_at_scale_10_is_a_logit_of_5(backend):
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 2, 64)
    k[..., 0, 0], k[..., 0, 1] = 0.5, math.sqrt(0.75)
    k[..., 1, 2] = 1.0
    out, stats = attention(q, k, k, mask=Mask(), scale=10.0, stats=True, backend=backend)
    assert stats.max_logit.item() == pytest.approx(5.0, rel=1e-6)
    assert out[0, 0, 0, 2].item() == pytest.approx(1 / (1 + math.exp(5.0)), rel=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["q_gain", "k_gain"])
def test_case_14_doubling_any_gain_changes_the_output(backend, which):
    torch.manual_seed(5)
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    gains = {"q_gain": torch.rand(2, 4) + 0.5, "k_gain": torch.rand(1, 4) + 0.5}
    before = attention(q, k, v, **gains, backend=backend)
    for index in range(gains[which].numel()):
        changed = gains[which].clone()
        changed.view(-1)[index] *= 2
        after = attention(q, k, v, **{**gains, which: changed}, backend=backend)
        moved = (after - before).abs().amax((0, 2, 3))
        owner = moved if which == "k_gain" else moved[index // 4 : index // 4 + 1]
        assert (owner > 1e-3).all()


def test_case_14_doubling_any_parameter_of_the_layer_changes_its_output():
    torch.manual_seed(6)
    layer = Attention(AttentionConfig(dim=12, num_heads=2, sink="logit", gate=True, bias=True)).double()
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            # A zero (the initial sink) cannot be doubled away from zero.
            parameter.add_(torch.rand_like(parameter) * 0.1 + 0.1)
        before = layer(x)
        for name, parameter in layer.named_parameters():
            parameter.mul_(2)
            assert (layer(x) - before).abs().max() > 1e-4, name
            parameter.div_(2)


def test_case_20_relative_logit_error_of_unit_shared_and_per_head_gains():
    """Gaussian q and k with std 1 and 4: what a norm inserted into a trained model costs in logits."""
    torch.manual_seed(0)
    std = torch.tensor([1.0, 4.0])
    q, k = (torch.randn(1, 2, 512, 64) * std[None, :, None, None] for _ in range(2))
    logits = q @ k.mT / 8
    assert_close(logits.std((0, 2, 3)), torch.tensor([1.0, 16.2]), rtol=0.03, atol=0)

    def error(gain):
        q_hat, k_hat = qk_norm_rope(q, k, q_gain=gain, k_gain=gain)
        off = q_hat @ k_hat.mT / 8 - logits
        return (off.square().sum((0, 2, 3)) / logits.square().sum((0, 2, 3))).sqrt()

    per_head = q.square().mean((0, 2, 3)).sqrt()[:, None].expand(2, 64)
    shared = q.square().mean().sqrt().expand(2, 64)
    assert_close(error(torch.ones(2, 64)), torch.tensor([0.12, 0.94]), atol=0.01, rtol=0)
    assert_close(error(shared), torch.tensor([7.6, 0.48]), atol=0.01, rtol=0.03)
    assert_close(error(per_head), torch.tensor([0.12, 0.13]), atol=0.01, rtol=0)


def test_case_21_unit_and_large_gains_bound_each_entry_of_the_key():
    """11.31 and 566 for D = 128; a one-hot key reaches them."""
    x = torch.zeros(1, 1, 1, 128)
    x[..., 5] = 1e4
    for gain, bound in ((1.0, 11.31), (50.0, 566.0)):
        g = torch.full((1, 128), gain)
        _, k_hat = qk_norm_rope(x, x, q_gain=g, k_gain=g)
        assert k_hat.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert k_hat.abs().max().item() <= gain * math.sqrt(128) * (1 + 1e-6)

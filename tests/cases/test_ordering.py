"""Public failures (see README.md) about order: norm against RoPE, which tensor is normalised."""

import math

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, NormDialect, Rope, attention, qk_norm_rope
from qknorm.nn import Attention, AttentionConfig, QKNorm, RotaryEmbedding

BACKENDS = ["auto", "stock", "reference"]


def quarter_turn(pairs, layout="half"):
    """One position, every pair turned by 90 degrees."""
    return Rope(torch.zeros(1, pairs), torch.ones(1, pairs), layout)


def both_orders(x, gain, rope):
    """x `[D]` as the only token of one head, normalised before and after the rotation."""
    results = []
    for order in ("before_rope", "after_rope"):
        norm = QKNorm(1, 1, len(x), NormDialect(order=order, eps=1e-12))
        with torch.no_grad():
            norm.q_gain.copy_(torch.tensor([gain]))
            norm.k_gain.copy_(torch.tensor([gain]))
        x_BHTD = torch.tensor(x)[None, None, None]
        q, k = norm(x_BHTD, x_BHTD, rope)
        assert torch.equal(q, k)
        results.append(q.flatten().detach())
    return results


def test_case_04_norm_first_and_rope_first_give_the_two_named_values():
    first, second = both_orders([3.0, 4.0], [2.0, 1.0], quarter_turn(1))
    assert_close(first, torch.tensor([-1.1314, 1.6971]), atol=1e-4, rtol=0)
    assert_close(second, torch.tensor([-2.2627, 0.8485]), atol=1e-4, rtol=0)


def test_case_04_the_operator_normalises_first():
    x, gain = torch.tensor([3.0, 4.0])[None, None, None], torch.tensor([[2.0, 1.0]])
    for y in qk_norm_rope(x, x, q_gain=gain, k_gain=gain, eps=1e-12, rope=quarter_turn(1)):
        assert_close(y.flatten(), torch.tensor([-1.1314, 1.6971]), atol=1e-4, rtol=0)


def test_case_04_orders_agree_for_a_gain_that_is_constant_in_the_pair():
    for result in both_orders([3.0, 4.0], [1.0, 1.0], quarter_turn(1)):
        assert_close(result, torch.tensor([-1.1314, 0.8485]), atol=1e-4, rtol=0)


def test_case_04_half_split_pairs_decide_which_gains_hide_the_order():
    x = [0.3, -1.2, 2.0, 0.7]
    same = both_orders(x, [2.0, 5.0, 2.0, 5.0], quarter_turn(2))
    assert_close(*same, atol=1e-6, rtol=1e-6)
    other = both_orders(x, [1.0, 2.0, 3.0, 4.0], quarter_turn(2))
    assert (other[0] - other[1]).abs().max() > 0.5
    # The same gain (2, 5, 2, 5) is not constant inside an interleaved pair.
    interleaved = both_orders(x, [2.0, 5.0, 2.0, 5.0], quarter_turn(2, "interleaved"))
    assert (interleaved[0] - interleaved[1]).abs().max() > 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_05_v_is_not_normalised_when_q_and_k_are(backend):
    zero, v = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2, 4), 10.0)
    one = torch.ones(1, 4)
    out = attention(zero, zero, v, q_gain=one, k_gain=one, mask=Mask(), backend=backend)
    assert torch.equal(out, v)


def layer_that_passes_v_through(value):
    """An Attention whose q and k are 0, whose V is the input and whose output is V."""
    layer = Attention(AttentionConfig(dim=4, num_heads=1, norm=NormDialect(value=value)))
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.weight[8:] = torch.eye(4)
        layer.out.weight.copy_(torch.eye(4))
    return layer(torch.full((1, 2, 4), 10.0), mask=Mask())


def test_case_05_the_layer_leaves_v_alone_unless_its_dialect_says_otherwise():
    assert_close(layer_that_passes_v_through(False), torch.full((1, 2, 4), 10.0))
    assert_close(layer_that_passes_v_through(True), torch.full((1, 2, 4), 1.0), atol=1e-6, rtol=0)


def test_case_05_scaling_a_projection_by_4_moves_the_output_for_v_alone():
    torch.manual_seed(0)
    config = AttentionConfig(dim=16, num_heads=4, num_kv_heads=2, norm=NormDialect(eps=1e-12))
    layer = Attention(config).double()
    x, rope = torch.randn(2, 5, 16, dtype=torch.float64), RotaryEmbedding(4, layout="half")(5, start=3)
    before = layer(x, rope=rope).detach()
    parts = {"q": (slice(0, 16), 1.0), "k": (slice(16, 24), 1.0), "v": (slice(24, 32), 4.0)}
    for rows, factor in parts.values():
        with torch.no_grad():
            layer.qkv.weight[rows] *= 4
            after = layer(x, rope=rope)
            layer.qkv.weight[rows] /= 4
        assert_close(after, before * factor, atol=1e-9, rtol=1e-9)


def test_case_21_rotation_moves_5_66_to_8_in_one_entry_and_no_further():
    """D = 64: two equal entries of one pair are 5.66 each, and 8 = sqrt(64) after 45 degrees."""
    x = torch.zeros(1, 1, 1, 64)
    x[..., 3] = x[..., 35] = 1.0
    one = torch.ones(1, 64)
    _, before = qk_norm_rope(x, x, q_gain=one, k_gain=one, eps=1e-12)
    angle = torch.full((1, 32), -math.pi / 4)
    _, after = qk_norm_rope(
        x, x, q_gain=one, k_gain=one, eps=1e-12, rope=Rope(angle.cos(), angle.sin(), "half")
    )
    assert before.abs().max().item() == pytest.approx(5.657, abs=1e-3)
    assert after.abs().max().item() == pytest.approx(8.0, abs=1e-5)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [0, 4, 16])
def test_case_21_no_entry_of_a_key_exceeds_its_gain_times_root_d(layout, rotary_dim):
    torch.manual_seed(1)
    gain = torch.rand(3, 16) * 5 - 1
    rope = RotaryEmbedding(rotary_dim, layout=layout)(50, start=7) if rotary_dim else None
    # Heavy tails: some keys are nearly one-hot, where the bound is tight.
    k = torch.randn(4, 3, 50, 16) ** 7
    q_hat, k_hat = qk_norm_rope(k, k, q_gain=gain, k_gain=gain, rope=rope)
    bound = gain.abs().amax(-1) * 4.0
    assert (k_hat.abs().amax((0, 2, 3)) <= bound * (1 + 1e-6)).all()
    assert (q_hat.abs().amax((0, 2, 3)) > bound * 0.7).all()

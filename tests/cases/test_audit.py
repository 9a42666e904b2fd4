"""Public failures of other projects that an auditor can meet, read from the formula of a layer. Each
faulty module is found with its code and its evidence; nothing of that code is said about its right twin.

Shapes: B batch, T tokens, H heads (Hk of k and v), D head width, R rotary width.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from audited import (
    Layer,
    causal,
    codes_of,
    eager,
    formula_of,
    model_of,
    normed,
    only,
    rms,
    sdpa,
    tokens,
    turn,
    uneven,
)
from qknorm.auditor import audit

# 2, 6, 9: over what the statistic is taken -----------------------------------------------------------


def in_shares(x, gain=None):
    """Two ranks, each with the mean square of its own half of the heads."""
    return rms(x.unflatten(2, (2, -1)), axes=(-2, -1)).flatten(2, 3) * (1.0 if gain is None else gain)


def in_full(x, gain=None):
    return rms(x, gain, axes=(-2, -1))


LOUD = torch.tensor([1.0, 1.0, 3.0, 3.0]).repeat_interleave(8).view(1, 1, 4, 8)  # half of the heads


def test_case_02_a_statistic_of_each_rank_alone_is_told_from_that_of_all_heads_and_of_one():
    assert_close(in_full(LOUD)[0, 0, ::3, 0], torch.tensor([0.4472, 1.3416]), atol=1e-4, rtol=0)
    assert_close(in_shares(LOUD)[0, 0, ::3, 0], torch.ones(2), atol=1e-4, rtol=0)

    def report_of(norm):
        return audit(model_of(lambda x, gain, side: norm(x, gain), heads=4), tokens())

    sharded, full, by_head = map(report_of, (in_shares, in_full, rms))
    (one,) = only(sharded, "QK004")
    assert one.evidence == {"statistic": "2 heads"}
    assert formula_of(sharded).statistic == "2 heads"
    assert math.isclose(formula_of(sharded).eps, 1e-6, rel_tol=0.05)
    assert only(full, "QK004")[0].evidence == {"statistic": "full"}
    assert "QK004" not in codes_of(by_head)
    assert formula_of(by_head).statistic == "head"


def test_case_06_one_flat_gain_and_two_statistics():
    def per_head(x, gain, side):
        return rms(x, gain.view(4, 8))

    def full(x, gain, side):
        return rms(x.flatten(2), gain).view_as(x)

    def after_the_split(x, gain, side):
        return rms(x, gain)

    gains = uneven(32), uneven(32)
    right, wrong = (audit(model_of(hat, heads=4, gains=gains), tokens()) for hat in (per_head, full))
    assert only(wrong, "QK004")[0].evidence == {"statistic": "full"}
    assert (formula_of(wrong).statistic, formula_of(wrong).gain) == ("full", "full")
    assert "QK004" not in codes_of(right)
    assert (formula_of(right).statistic, formula_of(right).gain) == ("head", "head")
    with pytest.raises(ValueError, match=r"Model raised RuntimeError when it was called: .*32"):
        audit(model_of(after_the_split, heads=4, gains=gains), tokens())


def test_case_09_the_axis_of_a_norm_without_a_gain_is_found_by_probing():
    x = torch.tensor([1.0, 3.0])[:, None].expand(2, 8)[None, None]
    assert_close(rms(x), torch.ones(1, 1, 2, 8), atol=1e-5, rtol=0)
    assert_close(in_full(x)[0, 0, :, 0], torch.tensor([0.4472, 1.3416]), atol=1e-4, rtol=0)
    right, wrong = (
        audit(model_of(lambda x, gain, side, norm=norm: norm(x), gains=(None, None)), tokens())
        for norm in (rms, in_full)
    )
    assert only(wrong, "QK004")[0].evidence == {"statistic": "full"}
    assert "QK004" not in codes_of(right)
    for report in (right, wrong):
        assert "q and k" in only(report, "QK005")[0].message


# 4, 5: order, and what is normed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "order"),
    [
        ((2.0, 1.0), "after"),
        ((1.0, 1.0), "not identifiable"),
        ((1.0, 2.0, 3.0, 4.0), "after"),
        ((2.0, 5.0, 2.0, 5.0), "not identifiable"),  # equal inside the pairs of a half split
    ],
)
def test_case_04_the_order_is_found_where_it_makes_a_difference(gain, order):
    gain, D = torch.tensor(gain), len(gain)
    angles = torch.tensor([math.pi / 2, 0.3])

    def norm_first(x, gain, side):
        return turn(rms(x, gain), angles)

    def rope_first(x, gain, side):
        return rms(turn(x, angles), gain)

    if D == 2 and order == "after":
        x = torch.tensor([[[[3.0, 4.0]], [[3.0, 4.0]]]])  # at position 1 turned by 90 degrees
        for hat, wanted in ((norm_first, (-1.1314, 1.6971)), (rope_first, (-2.2627, 0.8485))):
            assert_close(hat(x, gain, "q")[0, 1, 0], torch.tensor(wanted), atol=1e-4, rtol=0)
    right, wrong = (
        audit(model_of(hat, heads=1, D=D, gains=(gain, gain)), tokens())
        for hat in (norm_first, rope_first)
    )
    assert formula_of(wrong).order == order
    assert formula_of(right).order == ("before" if order == "after" else order)
    assert "QK002" not in codes_of(right)
    if order == "after":
        assert "after RoPE" in only(wrong, "QK002")[0].message
    else:
        assert "QK002" not in codes_of(wrong)


def test_case_05_a_norm_on_k_and_v_and_not_on_q():
    def k_alone(x, gain, side):
        return rms(x, gain) if side == "k" else x

    def made(hat, value):
        layer = Layer(1, 4, hat, gains=(uneven(1, 4), uneven(1, 4)), dim=4, value=value)
        with torch.no_grad():
            for projection, weight in ((layer.q, 0.0), (layer.k, 0.0), (layer.v, 2.5)):
                projection.weight.fill_(weight)
            layer.out.weight.copy_(torch.eye(4))
        return layer

    x = torch.ones(1, 2, 4)
    right, wrong = made(normed, None), made(k_alone, rms)
    assert_close(right(x), torch.full((1, 2, 4), 10.0))
    assert_close(wrong(x), torch.ones(1, 2, 4))
    found = audit(wrong, x)
    assert "does not grow" in only(found, "QK003")[0].message
    assert only(found, "QK016")[0].message == "k is normed and q is not"
    (formula,) = found.formulas.values()
    assert (formula.q_norm, formula.k_norm, formula.v_norm) == (None, "rms", True)
    sound = audit(right, x)
    assert not codes_of(sound) & {"QK003", "QK016"}
    # Who norms V by choice says so, and the finding stays beside the claim.
    claimed = audit(wrong, x, suppress={"QK003": "V is normed by choice"})
    assert "QK003" not in codes_of(claimed)
    assert [(one.code, why) for one, why in claimed.suppressed] == [("QK003", "V is normed by choice")]


# 10, 11: eps and precision ----------------------------------------------------------------------------


def rescaled(x, gain):
    """Divided by its largest entry first, which eps then is relative to."""
    return rms(x / x.abs().amax(-1, keepdim=True), gain, eps=1e-5)


def outside(x, gain):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * gain


EPS = {
    # name: (norm, of 1e-3 everywhere, eps that is read back, place, whether it is a finding)
    "mean, 1e-6": (rms, 0.7071, 1e-6, "inside", False),
    "mean, 1e-5": (partial(rms, eps=1e-5), 0.3015, 1e-5, "inside", False),
    "sum, 1e-6": (partial(rms, eps=1e-6 / 128), 0.9961, 1e-6 / 128, "inside", True),
    "default": (lambda x, gain: F.rms_norm(x, (128,)) * gain, 0.9452, 2**-23, "inside", True),
    "outside": (outside, 0.9990, 1e-6, "outside", True),
    "rescaled": (rescaled, 1.0, 0.0, "inside", True),
}


@pytest.mark.parametrize("name", EPS)
def test_case_10_the_same_eps_in_another_place(name):
    norm, value, eps, place, is_wrong = EPS[name]
    small = norm(torch.full((1, 1, 1, 128), 1e-3), torch.ones(128))
    assert_close(small, torch.full_like(small, value), atol=1e-4, rtol=0)
    report = audit(model_of(lambda x, gain, side: norm(x, gain), heads=1, D=128), tokens())
    formula = formula_of(report)
    assert formula.eps_place == place
    # What a configuration declares can be held against this, whether or not it is a finding.
    assert math.isclose(formula.eps, eps, rel_tol=0.05, abs_tol=1e-12)
    if is_wrong:
        (one,) = only(report, "QK007")
        assert one.evidence == {"eps": formula.eps, "place": place}
    else:
        assert "QK007" not in codes_of(report)


@pytest.mark.parametrize("is_cast", [False, True], ids=["not_upcast", "cast_down"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_case_11_squares_in_half_precision(dtype, is_cast):
    x = torch.full((1, 1, 1, 128), 300.0, dtype=dtype)
    low, high = (float(rms(x, dtype=d)[0, 0, 0, 0]) for d in (dtype, torch.float32))
    assert low == (0.0 if dtype == torch.float16 else pytest.approx(1.0, abs=1e-2))
    assert high == pytest.approx(1.0)

    def of_input(x, gain, side):
        return rms(x, dtype=x.dtype) * gain

    def cast_down(x, gain, side):
        return rms(x, dtype=dtype).to(x.dtype) * gain

    def in_fp32(x, gain, side):
        return rms(x, gain)

    def report_of(hat):
        model = model_of(hat, D=128)
        return audit(model if hat is cast_down else model.to(dtype), tokens())

    (one,) = only(report_of(cast_down if is_cast else of_input), "QK008")
    # In fp16 a vector of entries around 300 becomes 0, in bf16 its length is off by a rounding.
    least, most = (0.5, 1.0) if dtype == torch.float16 else (5e-4, 1e-2)
    assert least < one.evidence["error"] <= most
    assert is_cast or one.evidence["dtype"] == str(dtype)
    assert "QK008" not in codes_of(report_of(in_fp32))


def product_first(q, k, v, *, scale):
    s = (q @ k.mT) * scale
    return s.masked_fill(~causal(q.shape[2]), -torch.inf).float().softmax(-1).to(v.dtype) @ v


def scale_first(q, k, v, *, scale):
    return product_first(q * scale, k, v, scale=1.0)


def test_case_11_a_product_of_40_and_40_overflows_unless_q_is_scaled_first():
    q, s = torch.full((1, 1, 2, 128), 40.0, dtype=torch.float16), 128**-0.5
    assert (q @ q.mT * s).isinf().all()
    assert_close(((q * s) @ q.mT).float(), torch.full((1, 1, 2, 2), 18_102.0), atol=20, rtol=0)

    def report_of(attend):
        attends = {"sdpa": sdpa, "eager": partial(attend, scale=s)}
        gains = torch.full((1, 128), 40.0), torch.full((1, 128), 40.0)
        model = model_of(normed, heads=1, D=128, gains=gains, attends=attends)
        (layer,) = model.layers
        layer.k.weight = nn.Parameter(layer.q.weight.detach().clone())  # k of a token is its q
        return audit(model.half(), tokens())

    found = report_of(product_first)
    (one,) = only(found, "QK015")
    assert one.evidence == {"path": "eager"}
    assert one.message == "one of eager and sdpa is not finite"
    assert "leaks of eager: its outputs are not finite" in found.not_probed
    sound = report_of(scale_first)
    assert "QK015" not in codes_of(sound)
    assert not sound.not_probed


# 13, 14: the scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "bound"), [(1 / 16, 16.0), (1.0, 256.0)])
def test_case_13_the_scale_that_runs_is_stated_with_its_bound_and_never_repaired(scale, bound):
    gains = torch.ones(1, 256), torch.ones(1, 256)
    attends = {"eager": partial(eager, scale=scale)}
    report = audit(model_of(normed, heads=1, D=256, gains=gains, attends=attends), tokens())
    assert math.isclose(formula_of(report).scale, scale, rel_tol=1e-3)
    assert not codes_of(report) & {"QK015", "QK017", "QK018"}
    (one,) = only(report, "QK022")
    assert math.isclose(one.evidence["bound"], bound, rel_tol=1e-3)
    assert 0.9 * bound < one.evidence["measured"] * 256**0.5
    assert one.evidence["measured"] <= one.evidence["bound"]
    assert "QK022" not in report.codes  # a statement, not an accusation


def length_normed(x, gain, side):
    return F.normalize(x, dim=-1)


@pytest.mark.parametrize("scale", [64**-0.5, 1.0, 10.0])
def test_case_14_paths_that_scale_apart(scale):
    q = torch.zeros(1, 1, 2, 64)
    q[..., 0] = 1.0
    k, v = q.clone(), torch.tensor([1.0, 0.0])[None, None, :, None].expand(1, 1, 2, 64)
    k[..., 0], k[..., 1, 1] = torch.tensor([0.5, 0.0]), 1.0  # a logit of scale / 2 beside one of 0
    wanted = torch.sigmoid(torch.tensor(scale / 2))
    for attend in (eager, sdpa):
        assert_close(attend(q, k, v, scale=scale)[0, 0, 1, 0], wanted)

    def report_of(flash_scale):
        attends = {"eager": partial(eager, scale=scale), "flash": partial(sdpa, scale=flash_scale)}
        gains = None, None
        return audit(model_of(length_normed, D=64, gains=gains, attends=attends), tokens())

    # The built-in 1/sqrt(D) is undone with the wrong factor.
    wrong, right = report_of(1 / (scale * 64**0.5)), report_of(scale)
    (one,) = only(wrong, "QK015")
    assert one.evidence["path"] == "flash"
    assert "QK015" not in codes_of(right)
    for report in (wrong, right):
        assert (formula_of(report).q_norm, formula_of(report).k_norm) == ("l2", "l2")
        assert math.isclose(formula_of(report).scale, scale, rel_tol=1e-3)


def test_case_14_gains_that_are_created_and_never_used():
    def unused(x, gain, side):
        return rms(x, gain if side == "q" else None)

    right, wrong = (audit(model_of(hat), tokens()) for hat in (normed, unused))
    (one,) = only(wrong, "QK009")
    assert one.evidence["parameter"] == "layers.0.k_gain"
    assert formula_of(wrong).k_gain is None
    assert "QK009" not in codes_of(right)

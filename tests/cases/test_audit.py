"""Public failures (CASES.md) that an auditor can meet: each faulty module is found with its code and its
evidence, and of that code nothing is said about its right twin.

Shapes: B batch, T tokens, H heads (Hk of k and v), D head width, R rotary width.
"""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from audited import (
    Layer,
    Model,
    causal,
    eager,
    frequencies,
    grouped,
    only,
    rms,
    sdpa,
    tokens,
    turn,
    uneven,
)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from qknorm.audit import audit
from qknorm.audit.targets import load
from qknorm.audit.weights import audit_weights
from qknorm.nn import param_groups


def normed(x, gain, side):
    return rms(x, gain)


def model_of(hat, *, heads=2, D=8, gains="uneven", attends=None, layers=1, **options):
    """A model of layers with a gain `[H, D]` on each side."""
    kv_heads = options.get("kv_heads", heads)

    def made():
        pair = (uneven(heads, D), uneven(kv_heads, D)) if gains == "uneven" else gains
        return Layer(heads, D, hat, gains=pair, **options)

    return Model(made, attends, layers=layers)


def formula_of(report, layer=0):
    return report.formulas[f"layers.{layer}"]


def codes_of(report):
    return {one.code for one in report.findings}


# 2, 6, 9: over what the statistic is taken -----------------------------------------------------------


def in_shares(x, gain=None):
    """Two ranks, each with the mean square of its own half of the heads."""
    return rms(x.unflatten(2, (2, -1)), axes=(-2, -1)).flatten(2, 3) * (1.0 if gain is None else gain)


def in_full(x, gain=None):
    return rms(x, gain, axes=(-2, -1))


LOUD = torch.tensor([1.0, 1.0, 3.0, 3.0])[:, None].expand(4, 8)[
    None, None
]  # half of the heads is louder


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
    assert (formula_of_root(found).q_norm, formula_of_root(found).k_norm) == (None, "rms")
    assert formula_of_root(found).v_norm
    sound = audit(right, x)
    assert not codes_of(sound) & {"QK003", "QK016"}
    # Who norms V by choice says so, and the finding stays beside the claim.
    claimed = audit(wrong, x, suppress={"QK003": "V is normed by choice"})
    assert "QK003" not in codes_of(claimed)
    assert [(one.code, why) for one, why in claimed.suppressed] == [("QK003", "V is normed by choice")]


def formula_of_root(report):
    return report.formulas[""]


# 7, 8, 25: fast paths ---------------------------------------------------------------------------------


def fused(q, k, v, *, R, broken_above=math.inf):
    """Norm, RoPE and attention at once. Above so many tokens times heads, and only where a part of the
    head is rotated, every head but the first of a group is corrupted."""
    q, k = (turn(rms(x.transpose(1, 2)), frequencies(8), R=R).transpose(1, 2) for x in (q, k))
    if q.shape[0] * q.shape[1] * q.shape[2] > broken_above and q.shape[-1] > R:
        G = q.shape[1] // k.shape[1]
        is_first = torch.arange(q.shape[1]) % G == 0
        q = torch.where(is_first[:, None, None], q, q.flip(-1))
    return eager(q, k, v)


def as_projected(x, gain, side):
    return x


def test_case_07_a_fast_path_that_breaks_above_a_number_of_tokens():
    slow = partial(fused, R=4)

    def report_of(fast, batch):
        attends = {"slow": slow, "fast": fast}
        model = model_of(as_projected, heads=4, kv_heads=2, gains=(None, None), attends=attends)
        return audit(model, tokens(batch, 12))

    broken = partial(fused, R=4, broken_above=64)
    (one,) = only(report_of(broken, 2), "QK015")
    assert one.evidence["path"] == "fast"
    assert one.evidence["difference"] > 1e-2
    assert "QK015" not in codes_of(
        report_of(broken, 1)
    )  # 48 of 64: what is right for few is not for many
    assert "QK015" not in codes_of(report_of(slow, 2))
    # Where the whole head is rotated nothing breaks.
    attends = {"slow": partial(fused, R=8), "fast": partial(fused, R=8, broken_above=64)}
    model = model_of(as_projected, heads=4, kv_heads=2, gains=(None, None), attends=attends)
    assert "QK015" not in codes_of(audit(model, tokens(2, 12)))


def test_case_08_a_fused_pass_that_rotates_the_whole_head():
    x = torch.arange(1.0, 9.0)[None, None, None].expand(1, 2, 1, 8)
    unrotated = torch.tensor([0.9901, 1.1882, 1.3862, 1.5842])
    assert_close(turn(rms(x), frequencies(4), R=4)[0, 1, 0, 4:], unrotated, atol=1e-4, rtol=0)

    def report_of(R):
        attends = {"eager": partial(fused, R=4), "fused": partial(fused, R=R)}
        return audit(model_of(as_projected, gains=(None, None), attends=attends), tokens())

    wrong, right = report_of(8), report_of(4)
    (one,) = only(wrong, "QK015")
    assert one.evidence["path"] == "fused"
    assert one.evidence["difference"] > 1e-3
    for report in (wrong, right):
        assert formula_of(report).rotary_width == 4
    assert "QK015" not in codes_of(right)


class ThreeAxes(Model):
    """Time, height and width turn two pairs each; the path "fused" may take time for all three."""

    drops = True

    def forward(self, tokens, positions=None, path=None):
        if path == "fused" and self.drops:
            positions = positions[:1].expand(3, -1)
        return super().forward(tokens, path, positions=positions)


def test_case_08_a_fused_pass_that_drops_two_of_three_position_axes():
    def hat(x, gain, side, positions):
        parts = rms(x, gain).split(4, -1)
        turned = [turn(y, frequencies(4), positions=p) for y, p in zip(parts, positions, strict=True)]
        return torch.cat(turned, -1)

    def made():
        return Layer(2, 12, hat, gains=(uneven(2, 12), uneven(2, 12)))

    model = ThreeAxes(made, {"eager": eager, "fused": eager}, layers=1)
    T = torch.arange(12)
    inputs = {"tokens": tokens(2, 12), "positions": torch.stack((T, T // 4, T % 4))}
    assert only(audit(model, inputs), "QK015")[0].evidence["path"] == "fused"
    model.drops = False
    assert "QK015" not in codes_of(audit(model, inputs))
    # Of text, whose axes are equal, it is right.
    model.drops = True
    assert "QK015" not in codes_of(audit(model, inputs | {"positions": T.expand(3, 12)}))


def ignoring_strides(x):
    """Reads memory as if it were contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


@pytest.mark.parametrize(
    ("which", "shape"), [("qkv", (84, 3, 3, 64)), ("v", (1, 62, 2, 16))], ids=["all", "v alone"]
)
def test_case_25_a_kernel_that_ignores_strides(which, shape):
    B, T, H, D = shape

    def kernel(q, k, v):
        assert not v.is_contiguous(), "as heads-first views they are permuted"
        made = (
            ignoring_strides(x) if side in which else x for side, x in zip("qkv", (q, k, v), strict=True)
        )
        return eager(*made)

    def copying(q, k, v):
        return kernel(*(x.contiguous().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))

    def self_checked(q, k, v):
        return eager(q.contiguous(), k.contiguous(), v.contiguous())

    def report_of(attend):
        model = model_of(normed, heads=H, D=D, attends={"eager": eager, "kernel": attend})
        return audit(model, tokens(B, T))

    (one,) = only(report_of(kernel), "QK015")
    assert one.evidence["path"] == "kernel"
    assert one.evidence["difference"] > 1e-2
    assert "QK015" not in codes_of(report_of(self_checked))


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


# 12: a row that sees nothing --------------------------------------------------------------------------

BLIND = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])  # query 1


def naive(q, k, v):
    """Softmax of -inf alone is 0 / 0."""
    k, v = grouped(q, k, v)
    bias = torch.zeros(3, 3).masked_fill(~BLIND, -torch.inf)
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def lowest(q, k, v):
    """The lowest number instead of -inf: hidden keys share the row."""
    k, v = grouped(q, k, v)
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~BLIND, torch.finfo(q.dtype).min)
    return s.softmax(-1) @ v


def neutral(q, k, v):
    k, v = grouped(q, k, v)
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~BLIND, -torch.inf)
    s = torch.where(BLIND.any(-1, keepdim=True), s, 0.0)
    return (s.softmax(-1) * BLIND) @ v


def test_case_12_one_fully_masked_row():
    q = k = v = torch.randn(1, 1, 3, 4)
    assert naive(q, k, v)[0, 0, 1].isnan().all()
    assert_close(lowest(q, k, v)[0, 0, 1], v.mean(2)[0, 0])
    for attend in (neutral, partial(sdpa, visible=BLIND)):
        assert (attend(q, k, v)[0, 0, 1] == 0).all()

    def report_of(attend, layers):
        model = model_of(normed, D=4, layers=layers, attends={"eager": attend})
        return audit(model, tokens(2, 3))

    # In one layer the outputs of other rows are right, and gradients alone are spoilt.
    (one,) = only(report_of(naive, 1), "QK014")
    assert "gradient" in one.message
    assert one.evidence["parameter"] == "layers.0.q_gain"
    (one,) = [f for f in only(report_of(naive, 2), "QK014") if f.layer is None]
    assert one.message == "on eager, tokens that see no key make outputs of others NaN"
    (one,) = only(report_of(lowest, 1), "QK014")
    assert "a later token" in one.message
    assert one.evidence["moved"] > 1e-3
    for layers in (1, 2):
        for attend in (neutral, partial(sdpa, visible=BLIND)):
            assert "QK014" not in codes_of(report_of(attend, layers))


class Padded(Model):
    """Left padding, whose queries see nothing at all."""

    attend = staticmethod(eager)

    def forward(self, tokens, key_padding=None):
        T = tokens.shape[1]
        visible = causal(T) if key_padding is None else causal(T) & key_padding[:, None, None]
        self.attends = {"own": partial(self.attend, visible=visible)}
        return super().forward(tokens)

    paths = None


def test_case_12_padded_queries_that_see_nothing():
    def right(q, k, v, visible):
        seen = visible.any(-1, keepdim=True)
        return sdpa(q, k, v, visible=visible | ~seen) * seen

    def made(attend):
        model = Padded(lambda: Layer(2, 8, normed, gains=(uneven(2, 8), uneven(2, 8))))
        model.attend = attend
        return model

    inputs = {"tokens": tokens(2, 12), "key_padding": torch.ones(2, 12, dtype=torch.bool)}
    inputs["key_padding"][0, :4] = False
    assert any("NaN" in one.message for one in only(audit(made(eager), inputs), "QK014"))
    assert "QK014" not in codes_of(audit(made(right), inputs))
    # Without padding there is no such row, and nothing to find.
    full = inputs | {"key_padding": torch.ones(2, 12, dtype=torch.bool)}
    assert "QK014" not in codes_of(audit(made(eager), full))


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
    wrong, right = report_of(1 / (scale * 64**0.5) if scale != 1.0 else 64**-0.5), report_of(scale)
    if scale == 64**-0.5:
        wrong = report_of(scale * 64**-0.5)
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


# 15: what is not there takes part in no maximum -------------------------------------------------------


class Documents(nn.Module):
    """One layer over one-hot tokens, so that q and k of every token can be chosen."""

    def __init__(self, queries, keys, k_gain, *, hides_padding=True):
        super().__init__()
        T, D = queries.shape
        self.layer = Layer(1, D, normed, gains=(torch.ones(1, D), k_gain), dim=T)
        self.hides_padding = hides_padding
        with torch.no_grad():
            self.layer.q.weight.copy_(queries.mT)
            self.layer.k.weight.copy_(keys.mT)

    def visible(self, documents, key_padding):
        T = documents.shape[1]
        same = causal(T) & (documents[:, :, None] == documents[:, None])
        if self.hides_padding:
            # A padded query sees itself, else its row would be empty.
            same = same & key_padding[:, None] | torch.eye(T, dtype=torch.bool)
        return same[:, None]

    def forward(self, tokens, documents, key_padding):
        attend = partial(eager, scale=1.0, visible=self.visible(documents, key_padding))
        return self.layer(F.one_hot(tokens, self.layer.q.in_features).float(), attend)


def test_case_15_the_largest_logit_is_that_of_visible_pairs_of_real_tokens():
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])  # of 3 and 2 tokens, padded to 4 and 4
    real = torch.tensor([[False, True, True, True, False, False, True, True]])
    queries, keys = torch.randn(8, 4), torch.randn(8, 4)
    queries[:, 3] = keys[:, 3] = 0.0
    # The last entry is loud on padding, on the future pair (1, 3), on the pair (6, 2) across documents.
    queries[[0, 1, 4, 5, 6], 3] = keys[[0, 4, 5], 3] = 40.0
    keys[[2, 3], 3] = 0.3
    k_gain = torch.tensor([[0.4, 0.5, 0.6, 250.0]])
    inputs = {"tokens": torch.arange(8)[None], "documents": documents, "key_padding": real}
    right = Documents(queries, keys, k_gain)
    dots = rms(queries) @ (rms(keys) * k_gain).mT
    visible = right.visible(documents, real)[0, 0] & real[0][:, None]
    wanted = float(dots[visible].max())
    assert wanted < 2.5 < 50 < float(dots[~visible].max())
    assert float(dots[0, 0]) > 500  # a padded query that sees itself
    report = audit(right, inputs)
    (one,) = only(report, "QK022")
    assert math.isclose(one.evidence["measured"], wanted, rel_tol=1e-3)
    assert one.evidence["bound"] > 500
    assert "QK014" not in codes_of(report)
    leaky = audit(Documents(queries, keys, k_gain, hides_padding=False), inputs)
    assert "padding" in only(leaky, "QK014")[0].message


# 17: an audit keeps nothing alive ---------------------------------------------------------------------


def test_case_17_a_report_keeps_neither_the_model_nor_a_graph():
    model = model_of(normed, layers=2, attends={"eager": eager, "sdpa": sdpa})
    watched = [weakref.ref(x) for x in (model, *model.modules(), *model.parameters())]
    report = audit(model, tokens())
    assert len(report.formulas) == 2
    for formula in report.formulas.values():
        assert not formula.q_gain_values.requires_grad
    assert all(p.grad is None for p in model.parameters())
    del model
    gc.collect()
    assert not any(ref() is not None for ref in watched)


# 18, 19: sinks ----------------------------------------------------------------------------------------


class SinkLayer(Layer):
    """With a sink per head, which a careless path leaves out."""

    def __init__(self, sinks, *, forgets_when_packed=False):
        super().__init__(2, 8, normed, gains=(uneven(2, 8), uneven(2, 8)))
        self.sink = nn.Parameter(torch.tensor(sinks))
        self.forgets = forgets_when_packed

    def forward(self, x, attend=None, documents=None):
        T = x.shape[1]
        visible = causal(T)
        if documents is not None:
            visible = (visible & (documents[:, :, None] == documents[:, None]))[:, None]
        sink = None if self.forgets and documents is not None else self.sink
        return super().forward(x, partial(attend or eager, sink=sink, visible=visible))


class SinkModel(Model):
    def forward(self, tokens, documents=None, path=None):
        return super().forward(tokens, path, documents=documents)


def test_case_18_a_sink_that_packing_leaves_out():
    zeros, ones = torch.zeros(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    for sink, value in ((0.0, 0.75), (100.0, 0.0)):
        out = eager(zeros, zeros, ones, sink=torch.tensor([sink]))
        assert_close(out[0, 0, 2], torch.full((4,), value), atol=1e-6, rtol=0)

    def report_of(*, forgets, packed):
        model = SinkModel(lambda: SinkLayer((5.0, 7.0), forgets_when_packed=forgets))
        inputs = {"tokens": tokens(2, 12)}
        if packed:
            inputs["documents"] = (torch.arange(12) >= 5).long().expand(2, 12)
        return audit(model, inputs)

    wrong = only(report_of(forgets=True, packed=True), "QK013")
    assert [one.evidence["parameter"] for one in wrong] == ["layers.0.sink", "layers.1.sink"]
    right = report_of(forgets=False, packed=True)
    assert "QK013" not in codes_of(right)
    assert formula_of(right).sink
    # Unpacked the fault is not there: what is audited is the path that the inputs take.
    assert "QK013" not in codes_of(report_of(forgets=True, packed=False))


def ring(q, k, v, *, sink=None, visible, keeps_sink=True, parts=3):
    """Parts of the keys apart, merged by their log-sums; then the sink joins once."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -1e30)
    outs, sums = [], []
    for keys, values in zip(s.chunk(parts, -1), v.chunk(parts, 2), strict=True):
        outs.append(keys.softmax(-1) @ values)
        sums.append(keys.logsumexp(-1))
    everything = torch.stack(sums)
    if keeps_sink and sink is not None:
        everything = torch.cat((everything, sink[None, None, :, None].expand(1, *s.shape[:3])))
    weights = torch.stack(sums) - everything.logsumexp(0)
    return (weights.exp()[..., None] * torch.stack(outs)).sum(0)


def first_slice_on_every_rank(q, k, v, *, sink, visible):
    """Heads on two ranks, which both take the sinks of the first."""
    n = q.shape[1] // 2
    parts = [slice(0, n), slice(n, None)]
    outs = [eager(q[:, p], k[:, p], v[:, p], sink=sink[:n], visible=visible) for p in parts]
    return torch.cat(outs, 1)


def test_case_19_a_ring_that_drops_the_sink():
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    told = {"sink": torch.tensor([1.5]), "visible": torch.ones(1, 6, dtype=torch.bool)}
    assert_close(ring(q, k, v, **told), eager(q, k, v, **told), atol=1e-6, rtol=0)

    def report_of(path, sinks):
        return audit(SinkModel(lambda: SinkLayer(sinks), {"whole": eager, "ring": path}), tokens(2, 12))

    dropping = partial(ring, keeps_sink=False)
    large = report_of(dropping, (5.0, 7.0))
    assert only(large, "QK013")[0].evidence == {"parameter": "layers.0.sink", "path": "ring"}
    assert only(large, "QK015")[0].evidence["path"] == "ring"
    # A small sink is below any tolerance of outputs, not below that of its gradient.
    small = report_of(dropping, (-20.0, -19.0))
    assert "QK015" not in codes_of(small)
    assert {one.evidence["path"] for one in only(small, "QK013")} == {"ring"}
    for sinks in ((5.0, 7.0), (-20.0, -19.0)):
        assert not codes_of(report_of(ring, sinks)) & {"QK013", "QK015"}


def test_case_19_a_rank_that_takes_the_sinks_of_another():
    zeros, ones = torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4, 8)
    told = {"sink": torch.tensor([0.0, 100.0]), "visible": causal(4)}
    for attend, second in ((eager, 0.0), (first_slice_on_every_rank, 0.8)):
        out = attend(zeros, zeros, ones, **told)[0, :, 3, 0]
        assert_close(out, torch.tensor([0.8, second]), atol=1e-6, rtol=0)

    def report_of(path):
        made = SinkModel(lambda: SinkLayer((0.0, 100.0)), {"whole": eager, "ranks": path})
        return audit(made, tokens(2, 12))

    assert only(report_of(first_slice_on_every_rank), "QK015")[0].evidence["path"] == "ranks"
    assert "QK015" not in codes_of(report_of(ring))


# 20, 22, 23: gains that come from elsewhere -----------------------------------------------------------


def test_case_20_unit_and_shared_gains_in_a_trained_model():
    per_head = torch.tensor([1.0, 4.0])[:, None].expand(2, 64)  # the spread that each head had

    def report_of(gain):
        return audit(model_of(normed, D=64, gains=(gain, gain)), tokens(), trained=True)

    unit, shared, own = report_of(torch.ones(2, 64)), report_of(uneven(64)), report_of(per_head)
    (one,) = only(unit, "QK020")
    assert one.evidence["value"] == pytest.approx(1.0, abs=1e-4)
    assert "QK006" in codes_of(shared)
    assert formula_of(shared).gain == "shared"
    assert not codes_of(own) & {"QK006", "QK020"}
    assert_close(formula_of(own).q_gain_values, per_head.double(), atol=1e-3, rtol=0)


INITIAL = 7.0  # so that "left at its initial value" shows


def exported(drop):
    """A target at its initial values, after a load of what an export has written."""
    torch.manual_seed(0)
    source = model_of(normed, layers=2)
    written = {name: x for name, x in source.state_dict().items() if not drop(name)}
    target = model_of(normed, layers=2, gains=(torch.full((2, 8), INITIAL),) * 2)
    target.load_state_dict(written, strict=False)
    return source, target


@pytest.mark.parametrize(
    ("dropped", "found"),
    [
        ("_gain", {("layers.0", "q"), ("layers.1", "q")}),
        ("layers.1.k_gain", {("layers.1", "k")}),
    ],
)
def test_case_22_a_merged_export_without_gains(dropped, found):
    _, target = exported(lambda name: name.endswith(dropped))
    faults = only(audit(target, tokens(), trained=True), "QK020")
    assert {(one.layer, one.message.split()[3]) for one in faults} == found
    assert all(one.evidence["value"] == pytest.approx(INITIAL, rel=1e-4) for one in faults)
    source, whole = exported(lambda name: False)
    assert_close(whole(tokens()), source(tokens()), atol=0, rtol=0)
    report = audit(whole, tokens(), trained=True)
    assert "QK020" not in codes_of(report)
    assert_close(
        formula_of(report, 1).k_gain_values, source.layers[1].k_gain.double(), atol=1e-3, rtol=0
    )


def file_of(path, change):
    """Two layers under the names of released checkpoints."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs qknorm[transformers]")
    made = {}
    for layer in range(2):
        for side in "qk":
            name = f"model.layers.{layer}.self_attn.{side}"
            made[f"{name}_proj.weight"] = torch.randn(16, 8)
            made[f"{name}_norm.weight"] = uneven(8)
    change(made)
    safetensors.save_file(made, path)
    return audit_weights(path)


def test_case_22_a_file_without_a_gain_or_with_gains_at_their_initial_value(tmp_path):
    gain = "model.layers.1.self_attn.k_norm.weight"
    path = tmp_path / "merged.safetensors"
    (one,) = only(file_of(path, lambda made: made.pop(gain)), "QK016")
    assert (one.layer, one.message) == ("model.layers.1", "a norm of q and none of k")
    (one,) = only(file_of(path, lambda made: made[gain].fill_(INITIAL)), "QK020")
    assert (one.layer, one.evidence) == ("model.layers.1", {"value": INITIAL})
    assert not codes_of(file_of(path, lambda made: None)) & {"QK001", "QK016", "QK020"}


def test_case_22_a_checkpoint_whose_file_lacks_a_gain(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    safetensors = pytest.importorskip("safetensors.torch", reason="needs qknorm[transformers]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(uneven(8))
    model.save_pretrained(tmp_path)
    whole, inputs = load(str(tmp_path))
    assert "QK020" not in codes_of(audit(whole, inputs, trained=True))
    file = tmp_path / "model.safetensors"
    held = safetensors.load_file(file)
    del held["model.layers.1.self_attn.k_norm.weight"]
    safetensors.save_file(held, file, metadata={"format": "pt"})
    lacking, inputs = load(str(tmp_path))
    (one,) = only(audit(lacking, inputs, trained=True), "QK020")
    assert one.layer == "model.layers.1.self_attn"
    assert one.message.startswith("every gain of k is 1")


@pytest.mark.parametrize("stored", ["zero", "uneven"])
def test_case_23_gains_of_one_plus_w_are_read_back_as_what_they_do(stored):
    w = torch.zeros(2, 8) if stored == "zero" else uneven(2, 8) - 1.0

    def report_of(offset):
        made = model_of(lambda x, gain, side: rms(x, gain + offset), gains=(w, w))
        return audit(made, tokens(), trained=True)

    once, twice = report_of(1.0), report_of(2.0)
    for report, offset in ((once, 1.0), (twice, 2.0)):
        for values in (formula_of(report).q_gain_values, formula_of(report).k_gain_values):
            assert_close(values, (w + offset).double(), atol=1e-3, rtol=0)
    if stored == "zero":
        # Both sit at their initial value; what that is shows the second shift.
        values = [only(report, "QK020")[0].evidence["value"] for report in (once, twice)]
        assert values == [pytest.approx(1.0, rel=1e-4), pytest.approx(2.0, rel=1e-4)]
        bounds = [only(report, "QK022")[0].evidence["bound"] for report in (once, twice)]
        assert bounds[1] / bounds[0] == pytest.approx(4.0, rel=1e-3)
    else:
        assert not codes_of(once) & {"QK020"}


def test_case_23_zeros_read_as_plain_gains_leave_everything_without_effect():
    zeros = torch.zeros(2, 8)

    def report_of(offset):
        made = model_of(lambda x, gain, side: rms(x, gain + offset), gains=(zeros, zeros))
        return audit(made, tokens())

    plain, shifted = report_of(0.0), report_of(1.0)
    (one,) = only(plain, "QK009")  # q and k are 0: attention is uniform
    assert one.layer == "layers.0"
    assert not plain.formulas
    assert any("layers.0" in sentence for sentence in plain.not_probed)
    assert "QK009" not in codes_of(shifted)
    assert_close(formula_of(shifted).q_gain_values, torch.ones(2, 8).double(), atol=1e-3, rtol=0)


def test_case_23_a_file_that_stores_zeros(tmp_path):
    def as_offsets(made):
        for name, x in made.items():
            if "norm" in name:
                x.zero_()

    found = only(file_of(tmp_path / "offsets.safetensors", as_offsets), "QK020")
    assert {one.evidence["value"] for one in found} == {0.0}
    assert len(found) == 4


# 24: compiled models ----------------------------------------------------------------------------------


def test_case_24_a_model_compiled_and_called_before_shows_both_layers():
    torch._dynamo.reset()
    model = model_of(normed, layers=2)
    compiled = torch.compile(model, backend="eager")
    compiled(tokens())
    calls = []
    handle = model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    report = audit(compiled, tokens())
    assert list(report.formulas) == ["_orig_mod.layers.0", "_orig_mod.layers.1"]
    assert len(calls) > 0
    assert not report.codes
    assert "paths: eager, plain" in report.exercised
    handle.remove()
    for layer in model.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    plain = audit(model, tokens())
    for name, formula in plain.formulas.items():
        other = report.formulas[f"_orig_mod.{name}"]
        assert_close(formula.q_gain_values, other.q_gain_values)


def test_case_24_compiled_code_that_is_another_function_is_a_path_that_disagrees():
    def lossy(graph, inputs):
        """A compiler with a bug."""

        def call(*args):
            return tuple(x * 1.01 if torch.is_floating_point(x) else x for x in graph(*args))

        return call

    torch._dynamo.reset()
    model = model_of(normed, layers=2)
    report = audit(torch.compile(model, backend=lossy), tokens())
    found = only(report, "QK015")
    assert {one.evidence["path"] for one in found} == {"eager", "plain"}  # neither is compiled
    assert all(one.evidence["difference"] == pytest.approx(0.01, rel=0.1) for one in found)
    torch._dynamo.reset()


# 26: weight decay -------------------------------------------------------------------------------------

NAMES = {
    # The gains of q and k, and a filter of names that spares others.
    "q_norm": ("k_norm", "layernorm"),
    "query_layernorm": ("key_layernorm", "q_norm"),
    "ln_q": ("ln_k", "norm"),
    "norms.0": ("norms.1", "_norm"),
}


class NamedNorms(Layer):
    """A layer whose norms are called as its author liked."""

    def __init__(self, q_name, k_name):
        super().__init__(2, 8, None)
        self.names = q_name, k_name
        norms = [nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)]
        for norm in norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        if "." in q_name:
            self.norms = nn.ModuleList(norms)
        else:
            self.add_module(q_name, norms[0])
            self.add_module(k_name, norms[1])

    def hat(self, x, gain, side):
        return self.get_submodule(self.names[side == "k"])(x)


@pytest.mark.parametrize("name", NAMES)
def test_case_26_gains_that_decay_are_found_under_any_name(name):
    other, spared = NAMES[name]
    model = Model(lambda: NamedNorms(name, other), layers=1)
    by_name = [
        {"params": [p for n, p in model.named_parameters() if spared not in n], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if spared in n], "weight_decay": 0.0},
    ]
    wrong = torch.optim.AdamW([group for group in by_name if group["params"]], lr=1e-3)
    right = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    (one,) = only(audit(model, tokens(), optimizer=wrong), "QK010")
    assert one.evidence == {"weight_decay": 0.1}
    assert one.message == "gains of k and q decay by 0.1"
    assert "QK010" not in codes_of(audit(model, tokens(), optimizer=right))


def test_case_26_a_gain_with_two_axes_is_no_matrix():
    model = model_of(normed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    weights = [p for n, p in model.named_parameters() if p.ndim == 2 and "gain" not in n]
    (one,) = only(audit(model, tokens(), optimizer=torch.optim.Muon(matrices)), "QK010")
    assert "matrix optimizer" in one.message
    assert "QK010" not in codes_of(audit(model, tokens(), optimizer=torch.optim.Muon(weights)))

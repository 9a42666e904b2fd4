"""QKNorm in every dialect against the formulas written out in float64, and what a gain's shape says."""

import copy
import itertools

import pytest
import torch
from torch.testing import assert_close

from qknorm import NormDialect, Rope, qk_norm_rope
from qknorm.nn import QKNorm

HQ, HK, D, T = 4, 2, 8, 5


def by_definition(x, stored, dialect, rope):
    """One tensor `[B, H, T, D]` in fp64, token by token from the docstring of NormDialect."""
    x = x.double()
    B, H, T, D = x.shape
    gain = torch.ones(H, D).double() if stored is None else dialect.offset + stored.double()
    gain = gain.expand(H, D) if gain.shape == (D,) else gain.reshape(H, D)
    out = torch.empty_like(x)

    def turn(y, t, b):
        R = rope.width
        table = (rope.cos, rope.sin) if rope.cos.dim() == 2 else (rope.cos[b], rope.sin[b])
        cos, sin = (a[t].double() for a in table)
        y = y.clone()
        for i in range(R // 2):
            m, n = (i, i + R // 2) if rope.layout == "half" else (2 * i, 2 * i + 1)
            y[:, m], y[:, n] = y[:, m] * cos[i] - y[:, n] * sin[i], y[:, n] * cos[i] + y[:, m] * sin[i]
        return y

    for b, t in itertools.product(range(B), range(T)):
        token = x[b, :, t]
        if rope is not None and dialect.order == "after_rope":
            token = turn(token, t, b)
        squares = token**2 if dialect.statistic == "head" else (token**2).reshape(1, -1)
        n = squares.shape[-1]
        total = squares.sum(-1, keepdim=True)
        root = {
            "mean": (total / n + dialect.eps) ** 0.5,
            "sum": ((total + dialect.eps) / n) ** 0.5,
            "outside": (total / n) ** 0.5 + dialect.eps,
        }[dialect.eps_place]
        token = token / root * gain
        if rope is not None and dialect.order == "before_rope":
            token = turn(token, t, b)
        out[b, :, t] = token
    return out


def inputs(dtype=torch.float64, small=False):
    generator = torch.Generator().manual_seed(0)
    size = 1e-3 if small else 1.0  # small inputs show eps; unbalanced heads show the axis
    balance = torch.tensor([1.0, 3.0, 0.5, 2.0])[None, :, None, None]
    q = torch.randn(2, T, HQ, D, generator=generator, dtype=torch.float64).transpose(1, 2)
    k = torch.randn(2, T, HK, D, generator=generator, dtype=torch.float64).transpose(1, 2)
    return (q * balance * size).to(dtype), (k * balance[:, :HK] * size).to(dtype)


def table(layout, R=4, batched=False):
    positions = torch.arange(3, 3 + T).double()
    positions = torch.stack((positions, positions * 2 + 1)) if batched else positions
    angle = positions[..., None] * torch.tensor([1.0, 0.3]).double()[: R // 2]
    return Rope(angle.cos(), angle.sin(), layout)


def uneven(norm):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) * 2 - 0.5)
    return norm


DIALECTS = [
    NormDialect(statistic=s, gain=g, eps_place=p, order=o, offset=f, eps=1e-5)
    for s, g, p, o, f in itertools.product(
        ("head", "full"),
        ("per_head", "shared", "full", "none"),
        ("mean", "sum", "outside"),
        ("before_rope", "after_rope"),
        (0.0, 1.0),
    )
]


@pytest.mark.parametrize(
    "dialect",
    DIALECTS,
    ids=lambda d: f"{d.statistic}-{d.gain}-{d.eps_place}-{d.order}-{d.offset:.0f}",
)
def test_every_dialect_is_its_formula(dialect):
    norm = uneven(QKNorm(HQ, HK, D, dialect).double())
    for small, rope in ((False, table("half")), (True, table("interleaved")), (True, None)):
        q, k = inputs(small=small)
        q_hat, k_hat = norm(q, k, rope)
        assert_close(q_hat, by_definition(q, norm.q_gain, dialect, rope), atol=1e-12, rtol=1e-12)
        assert_close(k_hat, by_definition(k, norm.k_gain, dialect, rope), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.offset == 0 and d.eps_place != "sum"])
def test_gradients_of_every_dialect_pass_gradcheck(dialect):
    norm = uneven(QKNorm(HQ, HK, D, dialect).double())
    q, k = (x[:1, :, :2].clone().requires_grad_() for x in inputs())
    rope = Rope(table("half").cos[:2], table("half").sin[:2], "half")
    parameters = [p.detach().clone().requires_grad_() for p in norm.parameters()]
    names = [name for name, _ in norm.named_parameters()]

    def run(q, k, *gains):
        return torch.func.functional_call(norm, dict(zip(names, gains, strict=True)), (q, k, rope))

    assert torch.autograd.gradcheck(run, (q, k, *parameters), fast_mode=True)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_positions_may_differ_by_row_of_the_batch(layout):
    norm, rope = uneven(QKNorm(HQ, HK, D).double()), table(layout, batched=True)
    q, k = inputs()
    q_hat, k_hat = norm(q, k, rope)
    assert_close(q_hat, by_definition(q, norm.q_gain, norm.dialect, rope), atol=1e-12, rtol=1e-12)
    assert_close(k_hat, by_definition(k, norm.k_gain, norm.dialect, rope), atol=1e-12, rtol=1e-12)


def test_queries_are_the_last_tokens_of_the_table():
    norm, rope = uneven(QKNorm(HQ, HK, D).double()), table("half")
    q, k = inputs()
    whole, _ = norm(q, k, rope)
    last, _ = norm(q[:, :, -2:], k, rope)
    assert_close(last, whole[:, :, -2:], atol=1e-14, rtol=0)


def test_the_default_is_what_the_operator_does():
    norm = uneven(QKNorm(HQ, HK, D))
    rope = table("half")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k = inputs(dtype)
        ours = norm(q, k, rope)
        op = qk_norm_rope(q, k, q_gain=norm.q_gain, k_gain=norm.k_gain, rope=rope)
        for a, b in zip(ours, op, strict=True):
            assert a.dtype == dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("statistic", ["head", "full"])
def test_half_precision_input_is_normalised_in_fp32_and_rounded_once(statistic):
    dialect = NormDialect(statistic=statistic)
    norm = uneven(QKNorm(HQ, HK, D, dialect))
    q, k = inputs(torch.bfloat16)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            q_hat, _ = norm(q, k, table("half"))
        exact = by_definition(q, norm.q_gain, dialect, table("half"))
        assert ((q_hat.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("gain", ["per_head", "shared", "full"])
def test_gains_start_at_an_effective_one_and_reset_to_it(offset, gain):
    dialect = NormDialect(gain=gain, offset=offset)
    norm = QKNorm(HQ, HK, D, dialect)
    shapes = {"per_head": (HQ, D), "shared": (D,), "full": (HQ * D,)}
    assert tuple(norm.q_gain.shape) == shapes[gain] == dialect.gain_size(HQ, D)
    for _ in range(2):
        assert {p.dtype for p in norm.parameters()} == {torch.float32}
        assert torch.equal(norm.effective_gains()[0], torch.ones(HQ, D))
        assert torch.equal(norm.effective_gains()[1], torch.ones(HK, D))
        assert torch.equal(norm.q_gain.detach(), torch.full(shapes[gain], 1 - offset))
        uneven(norm)
        assert not torch.equal(norm.effective_gains()[0], torch.ones(HQ, D))
        norm.reset_parameters()


def test_a_dialect_without_gains_has_no_parameters():
    norm = QKNorm(HQ, HK, D, NormDialect(gain="none"))
    assert not list(norm.parameters())
    assert norm.q_gain is None
    assert norm.k_gain is None
    assert not norm.state_dict()
    assert torch.equal(norm.effective_gains()[1], torch.ones(HK, D))


def test_state_dict_holds_the_two_gains_and_loads_strictly():
    norm = uneven(QKNorm(HQ, HK, D))
    assert list(norm.state_dict()) == ["q_gain", "k_gain", "gain_offset"]
    other = QKNorm(HQ, HK, D)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other.k_gain, norm.k_gain)
    assert torch.equal(copy.deepcopy(norm).q_gain, norm.q_gain)
    with pytest.raises(RuntimeError, match="k_gain"):
        other.load_state_dict({"q_gain": norm.q_gain})


def test_effective_gains_reach_the_stored_ones():
    norm = QKNorm(HQ, HK, D, NormDialect(gain="shared", offset=1.0))
    sum(g.sum() for g in norm.effective_gains()).backward()
    assert torch.equal(norm.q_gain.grad, torch.full((D,), float(HQ)))
    assert torch.equal(norm.k_gain.grad, torch.full((D,), float(HK)))


@pytest.mark.parametrize(
    ("shape", "declared", "gain", "statistic"),
    [
        ((4, 8), None, "per_head", "head"),
        ((4, 8), "full", "per_head", "full"),
        ((8,), None, "shared", "head"),
        ((32,), "head", "full", "head"),
        ((32,), "full", "full", "full"),
    ],
)
def test_of_gain_reads_the_dialect_from_the_shape(shape, declared, gain, statistic):
    dialect = NormDialect.of_gain(shape, heads=4, head_dim=8, statistic=declared)
    assert (dialect.gain, dialect.statistic) == (gain, statistic)
    assert dialect.gain_size(4, 8) == shape
    assert NormDialect.of_gain(torch.Size(shape), heads=4, head_dim=8, statistic=declared) == dialect


def test_of_gain_needs_no_declared_axis_where_there_is_one_head():
    dialect = NormDialect.of_gain((8,), heads=1, head_dim=8)
    assert dialect.statistic == "head"
    assert dialect.gain_size(1, 8) == (8,)


@pytest.mark.parametrize("shape", [(), (7,), (16,), (8, 4), (1, 4, 8), (2, 8), (64,)])
def test_of_gain_refuses_every_other_shape(shape):
    with pytest.raises(ValueError, match="no dialect has a gain of shape"):
        NormDialect.of_gain(shape, heads=4, head_dim=8)


def test_is_fused_names_what_the_operator_can_apply():
    assert NormDialect().is_fused
    assert NormDialect(gain="shared", offset=1.0).is_fused
    for changed in ({"statistic": "full"}, {"eps_place": "sum"}, {"order": "after_rope"}):
        assert not NormDialect(**changed).is_fused

"""F17: near 0 the norm is x * gain / r, where r is what eps leaves, so that its gradient is gain / r."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from qknorm import NormDialect, Rope, attention
from qknorm.nn import Attention, AttentionConfig, QKNorm, RotaryEmbedding

HQ, HK, D, T = 4, 2, 8, 3
GAIN = torch.linspace(-1.5, 2.0, 11)


def dialects(**options):
    return [
        NormDialect(statistic=s, gain=g, eps_place=p, order=o, offset=f, **options)
        for s, g, p, o, f in itertools.product(
            ("head", "full"),
            ("per_head", "shared", "full", "none"),
            ("mean", "sum", "outside"),
            ("before_rope", "after_rope"),
            (0.0, 1.0),
        )
    ]


def uneven(norm):
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(GAIN.to(p.dtype).repeat(9)[: p.numel()].view(p.shape))
    return norm


def root_of_nothing(dialect, heads):
    width = D * (heads if dialect.statistic == "full" else 1)
    return {
        "mean": dialect.eps**0.5,
        "sum": (dialect.eps / width) ** 0.5,
        "outside": dialect.eps,
    }[dialect.eps_place]


def zero_token(heads, dtype):
    """A batch in which token 1 of row 0 is zero in every head, and head 1 of row 1 in one more."""
    x = torch.randn(2, heads, T, D, dtype=torch.float64).to(dtype)
    x[0, :, 1] = 0
    x[1, 1, 2] = 0
    return x.requires_grad_()


def half_turn():
    """cos = 0 and sin = 1, exact in every dtype: (a, b) becomes (-b, a)."""
    return Rope(torch.zeros(T, D // 2), torch.ones(T, D // 2), "half")


def turned_back(x):
    a, b = x.chunk(2, -1)
    return torch.cat((b, -a), -1)


CASES = [
    *((torch.float32, eps) for eps in (1e-6, 1e-2, 1e-12, 1e-30)),
    (torch.bfloat16, 1e-6),
    (torch.float16, 1e-3),  # 1/eps must be a number in fp16
    (torch.float64, 1e-6),
]


@pytest.mark.parametrize(("dtype", "eps"), CASES, ids=str)
def test_f17_the_gradient_of_every_dialect_at_a_zero_vector(dtype, eps):
    relative = 4 * torch.finfo(dtype).eps
    for dialect in dialects(eps=eps):
        norm = uneven(QKNorm(HQ, HK, D, dialect))
        q, k = zero_token(HQ, dtype), zero_token(HK, dtype)
        for rope in (None, half_turn()):
            outs = norm(q, k, rope)
            upstream = [torch.randn_like(x) for x in outs]
            grads = torch.autograd.grad(outs, (q, k), upstream, retain_graph=True)
            both = ((HQ, *norm.effective_gains()[:1]), (HK, *norm.effective_gains()[1:]))
            for out, up, grad, (heads, gain) in zip(outs, upstream, grads, both, strict=True):
                assert out.isfinite().all()
                assert grad.isfinite().all(), dialect
                assert (out[0, :, 1] == 0).all()
                up = up.double()
                if rope is not None and dialect.order == "before_rope":
                    up = turned_back(up)
                right = up * gain.double()[:, None] / root_of_nothing(dialect, heads)
                if rope is not None and dialect.order == "after_rope":
                    right = turned_back(right)
                assert_close(grad[0, :, 1].double(), right[0, :, 1].detach(), rtol=relative, atol=0)
                if dialect.statistic == "head":
                    assert_close(grad[1, 1, 2].double(), right[1, 1, 2].detach(), rtol=relative, atol=0)
            gains = list(norm.parameters())
            if gains:
                assert all(g.isfinite().all() for g in torch.autograd.grad(outs, gains, upstream))


def test_f17_second_derivatives_at_a_zero_vector_are_finite():
    for dialect in dialects(eps=1e-3):
        norm = uneven(QKNorm(HQ, HK, D, dialect)).double()
        q, k = zero_token(HQ, torch.float64), zero_token(HK, torch.float64)
        loss = sum(x.square().sum() for x in norm(q, k))
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k))
        assert all(x.isfinite().all() for x in second), dialect


def test_f17_nan_stays_nan():
    """A mistake elsewhere must not come back as a number."""
    x = torch.ones(1, 1, 1, D)
    x[..., 3] = torch.nan
    for place in ("mean", "sum", "outside"):
        norm = QKNorm(1, 1, D, NormDialect(eps_place=place))
        assert norm(x, x)[0].isnan().all()


@pytest.mark.parametrize("statistic", ["head", "full"])
@pytest.mark.parametrize("place", ["mean", "sum", "outside"])
@pytest.mark.parametrize("value", [False, True])
def test_f17_a_layer_with_one_zero_token_trains(place, statistic, value):
    torch.manual_seed(0)
    norm = NormDialect(eps_place=place, statistic=statistic, value=value)
    layer = Attention(AttentionConfig(dim=16, num_heads=2, norm=norm, sink="token"))
    x = torch.randn(1, 5, 16)
    x[0, 2] = 0
    layer(x, rope=RotaryEmbedding(4, layout="half")).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("backend", ["reference", "stock"])
def test_f17_a_small_eps_and_a_zero_query_through_the_operator(backend):
    """In fp32 the cube of 1/sqrt(eps) overflows below an eps of 1e-25."""
    for eps in (1e-12, 1e-30):
        q, k, v = (torch.randn(1, 2, 4, D) for _ in range(3))
        q[0, :, 1] = 0
        q.requires_grad_()
        one = torch.ones(2, D)
        out = attention(q, k, v, q_gain=one, k_gain=one, eps=eps, backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), q)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = attention(*wide, q_gain=one.double(), k_gain=one.double(), eps=eps, backend="reference")
        (right,) = torch.autograd.grad(exact.square().sum(), wide[0])
        assert_close(grad[0, :, 1].double(), right[0, :, 1], rtol=1e-4, atol=1e-5 / eps**0.5)

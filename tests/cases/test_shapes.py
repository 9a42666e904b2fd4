"""Public failures (see README.md) about shapes: axes, batches, rotary widths, strides."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, NormDialect, Rope, attention, qk_norm_rope
from qknorm.nn import QKNorm, RotaryEmbedding

BACKENDS = ["auto", "stock", "reference"]


def test_case_06_the_gain_shape_decides_between_the_axes():
    x = torch.tensor([1.0, 1, 3, 3])[None, :, None, None].expand(1, 4, 2, 8)
    full = NormDialect.of_gain((32,), heads=4, head_dim=8, statistic="full")
    flat = NormDialect.of_gain((32,), heads=4, head_dim=8, statistic="head")
    own = NormDialect.of_gain((4, 8), heads=4, head_dim=8)
    shared = NormDialect.of_gain((8,), heads=4, head_dim=8)
    across = torch.tensor([0.4472, 0.4472, 1.3416, 1.3416])[None, :, None, None].expand(x.shape)
    assert_close(QKNorm(4, 4, 8, full)(x, x)[0], across, atol=5e-5, rtol=0)
    for dialect in (flat, own, shared):
        assert_close(QKNorm(4, 4, 8, dialect)(x, x)[0], torch.ones_like(x), atol=1e-5, rtol=0)


def test_case_06_a_flat_gain_without_a_declared_axis_is_refused():
    with pytest.raises(ValueError, match=r"32.*statistic"):
        NormDialect.of_gain((32,), heads=4, head_dim=8)


def test_case_06_any_other_shape_is_refused_with_the_three_shapes_named():
    with pytest.raises(ValueError, match=r"\[4096\].*\[128\].*\[4, 128\].*\[512\]"):
        NormDialect.of_gain((4096,), heads=4, head_dim=128)


@pytest.fixture(scope="module")
def many_tokens():
    """bf16 q and k of 4096 tokens with 32 and 8 heads of 128, and unequal gains."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "q": draw(1, 4096, 32, 128).bfloat16().transpose(1, 2),
        "k": draw(1, 4096, 8, 128).bfloat16().transpose(1, 2),
        "q_gain": draw(32, 128).abs() + 0.5,
        "k_gain": draw(8, 128).abs() + 0.5,
    }


def exact_first_row(x, gain, rope):
    """Row 0 in fp32, by the definition and pair by pair."""
    wide = x[:, :, 0].float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
    R = rope.width
    order = torch.arange(R).view(2, -1) if rope.layout == "half" else torch.arange(R).view(-1, 2).T
    first, second = wide[..., order[0]], wide[..., order[1]]
    cos, sin = rope.cos[0], rope.sin[0]
    out = wide.clone()
    out[..., order[0]], out[..., order[1]] = first * cos - second * sin, second * cos + first * sin
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [128, 64, 32])
def test_case_07_a_row_does_not_depend_on_the_number_of_tokens(many_tokens, rotary_dim, layout):
    data = dict(many_tokens)
    q, k = data.pop("q"), data.pop("k")
    # Position 0 would make RoPE the identity.
    rope = RotaryEmbedding(rotary_dim, layout=layout)(4096, start=5)
    first = None
    for tokens in (1, 255, 256, 4096):
        table = Rope(rope.cos[:tokens], rope.sin[:tokens], layout)
        rows = [y[:, :, 0] for y in qk_norm_rope(q[:, :, :tokens], k[:, :, :tokens], **data, rope=table)]
        first = first or rows
        assert torch.equal(rows[0], first[0])
        assert torch.equal(rows[1], first[1])
    for row, x, gain in zip(first, (q, k), (data["q_gain"], data["k_gain"]), strict=True):
        exact = exact_first_row(x, gain, rope)
        assert ((row.float() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_case_07_the_compiled_path_keeps_the_row_bit_equal_too(many_tokens):
    data = dict(many_tokens)
    q, k = data.pop("q"), data.pop("k")
    rope = RotaryEmbedding(64, layout="half")(4096, start=5)
    torch._dynamo.reset()
    compiled = torch.compile(qk_norm_rope)
    first = None
    for tokens in (2, 255, 256, 4096):
        # One path for all counts, or a difference could be that of two graphs.
        sliced = [q[:, :, :tokens], k[:, :, :tokens], rope.cos[:tokens], rope.sin[:tokens]]
        for x in sliced:
            torch._dynamo.mark_dynamic(x, x.dim() - 2)
        q_part, k_part, cos, sin = sliced
        rows = [y[:, :, 0] for y in compiled(q_part, k_part, **data, rope=Rope(cos, sin, "half"))]
        first = first or rows
        assert torch.equal(rows[0], first[0])
        assert torch.equal(rows[1], first[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_07_attention_of_a_sequence_does_not_depend_on_its_batch(many_tokens, backend):
    """The tokens of the case, as 8 tokens of ever more sequences."""
    gains = {name: many_tokens[name] for name in ("q_gain", "k_gain")}
    q, k = (
        many_tokens[name][:, :, :2048].unflatten(2, (256, 8)).squeeze(0).transpose(0, 1)
        for name in ("q", "k")
    )
    rope = RotaryEmbedding(64, layout="half")(8, start=5)
    alone = attention(q[:1], k[:1], k[:1], **gains, rope=rope, backend=backend)
    for batch in (2, 33, 256):
        out = attention(q[:batch], k[:batch], k[:batch], **gains, rope=rope, backend=backend)
        assert torch.equal(out[:1], alone)


def test_case_08_entries_beyond_r_are_normalised_and_not_rotated():
    x = torch.arange(1.0, 9)[None, None, None]
    one = torch.ones(1, 8)
    rope = RotaryEmbedding(4, layout="half")(1, start=1)
    for y in qk_norm_rope(x, x, q_gain=one, k_gain=one, rope=rope):
        right = torch.tensor([0.9901, 1.1882, 1.3862, 1.5842])
        assert_close(y.flatten()[4:], right, atol=1e-4, rtol=0)
        assert (y.flatten()[:4] - x.flatten()[:4] / 5.0498).abs().min() > 1e-3


def test_case_08_no_default_means_the_whole_head():
    with pytest.raises(TypeError):
        RotaryEmbedding(layout="half")
    with pytest.raises(TypeError):
        RotaryEmbedding(8)
    with pytest.raises(TypeError):
        Rope(torch.ones(3, 4), torch.zeros(3, 4))


@pytest.mark.parametrize("batch", [1, 2])
def test_case_08_positions_of_three_axes_are_refused(batch):
    """Three rows of positions (time, height, width) for a batch that has not three rows."""
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1]])
    x, one = torch.randn(batch, 1, 4, 8), torch.ones(1, 8)
    with pytest.raises(ValueError, match="batch of 3"):
        qk_norm_rope(x, x, q_gain=one, k_gain=one, rope=RotaryEmbedding(8, layout="half")(positions))


def test_case_08_multi_axis_positions_with_a_batch_axis_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 2, 4\]"):
        RotaryEmbedding(8, layout="half")(torch.zeros(3, 2, 4, dtype=torch.long))


def forward_and_gradients(q, k, v, backend):
    """Output and the three gradients for a fixed, uneven upstream gradient."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    gain = torch.linspace(0.5, 1.5, q.shape[1] * q.shape[3]).view(q.shape[1], q.shape[3])
    out = attention(q, k, v, q_gain=gain, k_gain=gain.flip(0), mask=Mask(causal=True), backend=backend)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad(out, (q, k, v), upstream)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_25_permuted_inputs_equal_contiguous_ones(backend):
    torch.manual_seed(8)
    q, k, v = (torch.randn(84, 3, 3, 64).permute(0, 2, 1, 3) for _ in range(3))
    assert not q.is_contiguous()
    permuted = forward_and_gradients(q, k, v, backend)
    plain = forward_and_gradients(q.contiguous(), k.contiguous(), v.contiguous(), backend)
    for a, b in zip(permuted, plain, strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_25_one_strided_tensor_among_contiguous_ones(backend):
    torch.manual_seed(9)
    strided = [torch.randn(1, 62, 16, 128).transpose(1, 2) for _ in range(3)]
    plain = forward_and_gradients(*(x.contiguous() for x in strided), backend)
    for which in range(3):
        mixed = [x if i == which else x.contiguous() for i, x in enumerate(strided)]
        for a, b in zip(forward_and_gradients(*mixed, backend), plain, strict=True):
            assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_25_views_of_one_packed_projection_equal_copies(backend):
    """The layout of a fused qkv projection, with the head width not the innermost stride for one."""
    torch.manual_seed(10)
    packed = torch.randn(2, 7, 3, 4, 16)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    views[1] = views[1].mT.contiguous().mT
    plain = forward_and_gradients(*(x.contiguous() for x in views), backend)
    for a, b in itertools.zip_longest(forward_and_gradients(*views, backend), plain):
        assert_close(a, b, atol=1e-5, rtol=1e-5)

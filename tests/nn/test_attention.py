"""The attention layer against a dense forward written out in float64, and how it behaves in training."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from qknorm import Mask, NormDialect, Rope, Stats
from qknorm.nn import Attention, AttentionConfig, RopeScaling, RotaryEmbedding

T, C = 9, 24


def norm_and_turn(x, stored, dialect, rope):
    """One of q and k, `[B, T, H, D]` in fp64."""

    def turn(y):
        R = rope.width
        cos, sin = rope.cos.double()[:, None], rope.sin.double()[:, None]
        a, b = (
            (y[..., : R // 2], y[..., R // 2 : R])
            if rope.layout == "half"
            else (y[..., 0:R:2], y[..., 1:R:2])
        )
        a, b = a * cos - b * sin, b * cos + a * sin
        pair = torch.cat((a, b), -1) if rope.layout == "half" else torch.stack((a, b), -1).flatten(-2)
        return torch.cat((pair, y[..., R:]), -1)

    if rope is not None and (dialect is None or dialect.order == "after_rope"):
        x = turn(x)
    if dialect is None:
        return x
    axes = (-1,) if dialect.statistic == "head" else (-2, -1)
    mean = x.square().mean(axes, keepdim=True)
    x = (
        x
        / {
            "mean": (mean + dialect.eps).sqrt(),
            "sum": (mean + dialect.eps / (x.shape[-1] * (1 if len(axes) == 1 else x.shape[-2]))).sqrt(),
            "outside": mean.sqrt() + dialect.eps,
        }[dialect.eps_place]
    )
    if stored is not None:
        gain = dialect.offset + stored.double()
        x = x * (gain if gain.shape == x.shape[-1:] else gain.reshape(x.shape[-2:]))
    return turn(x) if rope is not None and dialect.order == "before_rope" else x


def dense(layer, x, rope, visible):
    """The forward pass by the definition. `visible` is bool `[B or 1, T, T]`. Returns out, logits."""
    c, state = layer.config, {name: p.double() for name, p in layer.state_dict().items()}
    B, T = x.shape[:2]
    Hq, Hk, D = c.num_heads, c.num_kv_heads or c.num_heads, c.head_dim or c.dim // c.num_heads
    x = x.double()

    def linear(name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    q, k, v = linear("qkv").split((Hq * D, Hk * D, Hk * D), -1)
    q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
    if c.norm is not None and c.norm.value:
        v = v * (v.square().mean(-1, keepdim=True) + c.norm.eps).rsqrt()
    q_gain, k_gain = state.get("norm.q_gain"), state.get("norm.k_gain")
    q_hat, k_hat = norm_and_turn(q, q_gain, c.norm, rope), norm_and_turn(k, k_gain, c.norm, rope)
    group = [h * Hk // Hq for h in range(Hq)]  # the key head of each query head
    scale = D**-0.5 if c.scale is None else c.scale
    logits = scale * torch.einsum("bqhd,bkhd->bhqk", q_hat, k_hat[:, :, group])
    near = torch.ones(T, T, dtype=torch.bool)
    if c.window is not None:
        near = near.triu(1 - c.window).tril(c.window - 1)
    logits = logits.masked_fill(~(visible & near)[:, None], -torch.inf)
    values = v[:, :, group]
    everything = logits
    if c.sink != "none":
        sink = torch.zeros(B, Hq, T, 1).double()
        if c.sink == "logit":
            sink = sink + state["sink_logit"][:, None, None]
        if c.sink == "token":
            plain_q = norm_and_turn(q, q_gain, c.norm, None)
            key = norm_and_turn(state["sink_key"][None, None], k_gain, c.norm, None)[0, 0]
            sink = scale * torch.einsum("bqhd,hd->bhq", plain_q, key[group])[..., None]
        everything = torch.cat((logits, sink), -1)
    p = everything.softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", p[..., :T], values)
    if c.sink == "token":
        out = out + p[..., T].transpose(1, 2)[..., None] * state["sink_value"][group]
    out = out.flatten(2)
    if c.gate:
        out = out * linear("gate").sigmoid()
    return out @ state["out.weight"].T + state.get("out.bias", 0.0), logits, p


def built(seed=0, **options):
    """A layer in fp64 whose gains, sinks and biases are all unequal."""
    torch.manual_seed(seed)
    layer = Attention(AttentionConfig(**{"dim": C, "num_heads": 4, **options})).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "gain" in name or "sink" in name or "bias" in name:
                p.copy_(torch.randn_like(p) * 0.7 + 1.0)
    return layer, torch.randn(2, T, C, dtype=torch.float64)


def turns(R=4, layout="half"):
    """Rotations from position 3 on, in fp64: a table in fp32 would hide errors below 1e-6."""
    angle = torch.arange(3, 3 + T).double()[:, None] * torch.tensor([1.0, 0.4, 0.2, 0.05])[: R // 2]
    return Rope(angle.cos(), angle.sin(), layout)


CAUSAL = torch.ones(1, T, T, dtype=torch.bool).tril()

VARIANTS = {
    "default": {},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 10, "num_kv_heads": 2},
    "odd_head_dim": {"head_dim": 7, "num_kv_heads": 2},
    "window": {"window": 3},
    "window_1": {"window": 1},
    "gate": {"gate": True},
    "bias": {"bias": True, "gate": True, "num_kv_heads": 2},
    "scale": {"scale": 1.0},
    "no_norm": {"norm": None, "num_kv_heads": 2},
    "off_by_one": {"sink": "off_by_one"},
    "logit": {"sink": "logit", "num_kv_heads": 2},
    "token": {"sink": "token", "num_kv_heads": 2},
    "token_no_norm": {"sink": "token", "norm": None, "num_kv_heads": 2},
    "token_window": {"sink": "token", "window": 2, "gate": True, "num_kv_heads": 2, "scale": 0.3},
    "value": {"norm": NormDialect(value=True, eps=1e-3), "num_kv_heads": 2},
    "value_sink": {"norm": NormDialect(value=True, eps=1e-3), "sink": "token"},
    "shared": {"norm": NormDialect(gain="shared", offset=1.0), "num_kv_heads": 2},
    "no_gain": {"norm": NormDialect(gain="none")},
    "full": {"norm": NormDialect(statistic="full", gain="full"), "num_kv_heads": 2},
    "full_sink": {"norm": NormDialect(statistic="full"), "sink": "logit", "num_kv_heads": 2},
    "sum": {"norm": NormDialect(eps_place="sum", eps=0.5)},
    "outside": {"norm": NormDialect(eps_place="outside", eps=0.1), "sink": "token"},
    "after_rope": {"norm": NormDialect(order="after_rope"), "num_kv_heads": 2},
}


@pytest.mark.parametrize("backend", ["auto", "stock", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_equals_the_dense_forward(variant, backend):
    layer, x = built(**VARIANTS[variant], backend=backend)
    layout = "interleaved" if len(variant) % 2 else "half"
    for rope in (turns(layout=layout), None):
        out, stats = layer(x, rope=rope, stats=True)
        right, logits, p = dense(layer, x, rope, CAUSAL)
        assert_close(out, right, atol=1e-10, rtol=1e-10)
        assert_close(stats.max_logit, logits.amax((0, 2, 3)), atol=1e-10, rtol=1e-10)
        keys = logits.softmax(-1)
        entropy = -torch.special.xlogy(keys, keys).sum(-1).mean((0, 2))
        assert_close(stats.entropy_nats, entropy, atol=1e-10, rtol=1e-9)
        assert_close(stats.sink_mass, (1 - p[..., :T].sum(-1)).mean((0, 2)), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "variant", ["gqa", "token_window", "logit", "full", "value", "after_rope", "bias"]
)
def test_every_gradient_equals_that_of_the_dense_forward(variant):
    layer, x = built(**VARIANTS[variant])
    x.requires_grad_()
    upstream = torch.linspace(-1, 1, x.numel()).double().view(x.shape)
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(layer(x, rope=turns()), [x, *parameters.values()], upstream)

    class Live:
        """`dense` reads a state dict, which is detached: hand it the parameters instead."""

        config = layer.config

        @staticmethod
        def state_dict():
            return parameters

    right, _, _ = dense(Live, x, turns(), CAUSAL)
    expected = torch.autograd.grad(right, [x, *parameters.values()], upstream)
    for name, a, b in zip(["x", *parameters], found, expected, strict=True):
        assert b.abs().max() > 1e-6, name
        assert_close(a, b, atol=1e-10, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", ["gqa", "token_window", "logit", "window"])
def test_masks_of_the_caller_combine_with_the_window_of_the_layer(variant):
    layer, x = built(**VARIANTS[variant])
    documents = torch.tensor([[0] * 4 + [1] * 5, [5] * 8 + [-1]])
    padding = torch.ones(2, T, dtype=torch.bool)
    padding[0, :2] = False
    ids = documents[:, :, None]
    same = (ids == ids.mT) & (ids >= 0)
    cases = [
        (Mask(), torch.ones(1, T, T, dtype=torch.bool)),
        (Mask(causal=True, window=2), CAUSAL & ~CAUSAL.tril(-2)),
        (Mask(causal=True, documents=documents), CAUSAL & same),
        (Mask(causal=True, key_padding=padding), CAUSAL & padding[:, None]),
        (Mask(documents=documents, key_padding=padding), same & padding[:, None]),
    ]
    for mask, visible in cases:
        out = layer(x, rope=turns(), mask=mask)
        right, logits, _ = dense(layer, x, turns(), visible)
        empty = (logits == -torch.inf).all(-1)[:, 0]
        # Rows without keys are NaN in the naive softmax, unless a sink holds them.
        expected = right.where(~right.isnan(), layer_of_nothing(layer, x))
        assert_close(out, expected, atol=1e-10, rtol=1e-10)
        assert bool(empty.any()) == (mask.documents is not None or mask.key_padding is not None)


def layer_of_nothing(layer, x):
    """What a row that sees no key gives: attention output 0, then gate and projection."""
    zero = torch.zeros(*x.shape[:2], layer.out.in_features).double()
    return layer.out(zero)


def test_an_fp32_layer_is_near_the_dense_forward_and_keeps_its_dtype():
    layer, x = built(num_kv_heads=2, sink="token", gate=True)
    layer, x = layer.float(), x.float()
    out, stats = layer(x, rope=turns(), stats="rows")
    assert out.dtype == stats.max_logit.dtype == torch.float32
    assert_close(out.double(), dense(layer, x, turns(), CAUSAL)[0], atol=1e-5, rtol=1e-5)
    assert tuple(stats.rows.max_logit.shape) == (2, 4, T)


def test_statistics_come_only_when_asked_for_and_change_no_bit():
    """F85: without them the layer returns a tensor, and not a tuple."""
    for kind in ("none", "off_by_one", "logit", "token"):
        layer, x = built(sink=kind, num_kv_heads=2)
        results = []
        for request in (False, True, "rows"):
            layer.zero_grad()
            out = layer(x, rope=turns(), stats=request)
            if request:
                out, stats = out
                assert isinstance(stats, Stats)
                assert (stats.rows is not None) == (request == "rows")
            assert isinstance(out, torch.Tensor)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"qkv.weight", "out.weight", "norm.q_gain", "norm.k_gain", "norm.gain_offset"}),
        ({"norm": None}, {"qkv.weight", "out.weight"}),
        ({"norm": NormDialect(gain="none")}, {"qkv.weight", "out.weight"}),
        ({"norm": None, "sink": "off_by_one", "window": 4}, {"qkv.weight", "out.weight"}),
        ({"norm": None, "sink": "logit"}, {"qkv.weight", "out.weight", "sink_logit"}),
        ({"norm": None, "sink": "token"}, {"qkv.weight", "out.weight", "sink_key", "sink_value"}),
        (
            {"norm": None, "gate": True, "bias": True},
            {f"{name}.{kind}" for name in ("qkv", "out", "gate") for kind in ("weight", "bias")},
        ),
    ],
)
def test_state_dict_holds_the_parameters_and_what_the_gains_mean_and_round_trips(options, keys):
    layer, x = built(**options)
    assert set(layer.state_dict()) == keys
    assert keys - {"norm.gain_offset"} == {name for name, _ in layer.named_parameters()}
    other, _ = built(seed=1, **options)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("variant", ["default", "no_norm", "token", "full", "after_rope", "value"])
def test_a_rotary_embedding_is_its_table_of_all_tokens(variant):
    """Build 6, with the result a tensor unless statistics are asked for."""
    layer, x = built(**VARIANTS[variant])
    rotary = RotaryEmbedding(4, layout="interleaved")
    out = layer(x, rope=rotary)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, layer(x, rope=rotary(T)))
    with_stats = layer(x, rope=rotary, stats=True)
    assert isinstance(with_stats, tuple)
    assert torch.equal(with_stats[0], out)
    assert not torch.equal(out, layer(x))
    with pytest.raises(ValueError, match="8 positions for 9 keys, of which 0 are cached"):
        layer(x, rope=rotary(T - 1))
    with pytest.raises(ValueError, match="RotaryEmbedding or a Rope; got tuple"):
        layer(x, rope=(rotary(T).cos, rotary(T).sin))


def test_state_dict_shapes_follow_the_heads():
    layer, _ = built(num_kv_heads=2, head_dim=10, sink="token")
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    assert shapes == {
        "qkv.weight": (80, C),
        "out.weight": (C, 40),
        "norm.q_gain": (4, 10),
        "norm.k_gain": (2, 10),
        "norm.gain_offset": (),
        "sink_key": (2, 10),
        "sink_value": (2, 10),
    }


@pytest.mark.parametrize("kind", ["none", "off_by_one", "logit", "token"])
@pytest.mark.parametrize("norm", [NormDialect(), None])
def test_a_shift_of_all_positions_leaves_the_output_unchanged(kind, norm):
    """Also with a sink token: it stands outside RoPE, so no query has a distance to it."""
    layer, x = built(sink=kind, norm=norm, num_kv_heads=2)
    rope = turns()
    shift = torch.tensor([1.0, 0.4]).double() * 91
    angle = torch.atan2(rope.sin, rope.cos) + shift
    shifted = Rope(angle.cos(), angle.sin(), "half")
    out = layer(x, rope=rope)
    assert_close(layer(x, rope=shifted), out, atol=1e-10, rtol=0)
    assert (layer(x) - out).abs().max() > 1e-3


def test_the_sink_token_is_seen_through_every_mask():
    layer, x = built(sink="token", num_kv_heads=2)
    nothing = Mask(key_padding=torch.zeros(2, T, dtype=torch.bool))
    out, stats = layer(x, rope=turns(), mask=nothing, stats=True)
    only_sink = layer.sink_value.repeat_interleave(2, 0).flatten() @ layer.out.weight.T
    assert_close(out, only_sink.expand(2, T, C), atol=1e-10, rtol=0)
    assert stats.row_count == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_returns_the_statistics_once(reentrant):
    """The recomputation must neither double a count nor change a value or a gradient."""
    layer, x = built(num_kv_heads=2, sink="logit")
    x.requires_grad_()
    seen = []

    def block(x):
        out, stats = layer(x, rope=turns(), stats=True)
        return out, stats

    def train(run):
        layer.zero_grad()
        out, stats = run(x)
        seen.append(stats)
        out.square().sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]

    plain = train(block)
    x.grad = None
    again = train(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    assert len(seen) == 2
    for stats in seen:
        assert stats.row_count == 2 * T
        assert torch.equal(stats.max_logit, seen[0].max_logit)
        assert torch.equal(stats.entropy_sum, seen[0].entropy_sum)
        assert not stats.max_logit.requires_grad


@pytest.mark.parametrize("kind", ["none", "logit", "token"])
@pytest.mark.parametrize("dialect", [NormDialect(), NormDialect(statistic="full")])
def test_autocast_to_bf16_keeps_fp32_gains_statistics_and_gradients(kind, dialect):
    layer, x = built(sink=kind, norm=dialect, num_kv_heads=2)
    layer, x = layer.float(), x.float()
    exact, logits, _ = dense(layer, x, turns(), CAUSAL)
    with torch.autocast("cpu", torch.bfloat16):
        out, stats = layer(x, rope=turns(), stats=True)
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), exact, atol=0.03, rtol=0.03)
    assert stats.max_logit.dtype == stats.entropy_sum.dtype == torch.float32
    assert_close(stats.max_logit.double(), logits.amax((0, 2, 3)), atol=0.1, rtol=0.03)
    out.float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.dtype == p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all()
        assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", ["none", "off_by_one", "logit", "token"])
def test_a_bf16_layer_runs_and_is_near_the_fp64_one(kind):
    layer, x = built(sink=kind, num_kv_heads=2)
    low = Attention(layer.config).to(torch.bfloat16)
    low.load_state_dict(layer.state_dict())
    out = low(x.bfloat16(), rope=turns())
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), dense(low, x.bfloat16(), turns(), CAUSAL)[0], atol=0.05, rtol=0.05)
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.parametrize(("kind", "dynamic"), [("none", None), ("none", True), ("token", True)])
def test_one_full_graph_serves_every_length(kind, dynamic):
    torch._dynamo.reset()
    layer, x = built(sink=kind, num_kv_heads=2, window=4, gate=True)
    layer, x = layer.float(), torch.randn(2, 40, C)
    rotary = RotaryEmbedding(4, layout="half")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for index, length in enumerate((16, 23, 40, 9)):
        part = x[:, :length].clone()
        # From the third length on nothing may be left to specialise.
        with torch._dynamo.config.patch(error_on_recompile=index >= 2):
            out, stats = compiled(part, rope=rotary, stats=True)
        expected, expected_stats = layer(part, rope=rotary, stats=True)
        assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert_close(stats.max_logit, expected_stats.max_logit, atol=1e-5, rtol=1e-5)
        assert_close(stats.entropy_nats, expected_stats.entropy_nats, atol=1e-5, rtol=1e-5)
        layer.zero_grad()
        out.square().sum().backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        expected.square().sum().backward()
        for a, p in zip(grads, layer.parameters(), strict=True):
            assert_close(a, p.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["default", "gqa", "full", "after_rope", "shared"])
@pytest.mark.parametrize("rotary_dim", [0, 4])
def test_the_bound_of_the_layer_is_never_exceeded(variant, rotary_dim):
    layer, x = built(**VARIANTS[variant])
    rope = turns(rotary_dim) if rotary_dim else None
    torch.manual_seed(5)
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.randn_like(layer.qkv.weight) ** 5 * 100)
    bound = layer.logit_bound(rope, rotary_dim=None if rope else 0)
    assert tuple(bound.shape) == (4,)
    for _ in range(20):
        _, stats = layer(torch.randn_like(x) ** 3, rope=rope, mask=Mask(), stats=True)
        assert (stats.max_logit <= bound * (1 + 1e-6)).all()


def test_f12_without_a_table_the_bound_holds_for_any_rotation():
    """Gains of 3 at entry 0 of q and 32 of k, which RoPE brings together, else 0.1: 3 * 3 * 64 / 8."""
    layer = Attention(AttentionConfig(dim=64, num_heads=1, head_dim=64))
    with torch.no_grad():
        layer.norm.q_gain.fill_(0.1)[0, 0] = 3.0
        layer.norm.k_gain.fill_(0.1)[0, 32] = 3.0
        layer.qkv.weight.zero_()
        layer.qkv.weight[0, 0] = layer.qkv.weight[64 + 32, 0] = 1e3  # one-hot in those entries
    rotary, mask = RotaryEmbedding(64, layout="half"), Mask(causal=False)
    x = torch.zeros(1, 40, 64)
    x[..., 0] = torch.tensor([1.0, -1.0]).repeat(20)
    found = float(layer(x, rope=rotary, mask=mask, stats=True)[1].max_logit)
    assert 71.3 < found <= 72
    assert float(layer.logit_bound()) == pytest.approx(72, rel=1e-5)
    assert found <= float(layer.logit_bound(rotary(40))) * (1 + 1e-6) <= 72.001
    assert float(layer.logit_bound(rotary_dim=64, layout="half")) == pytest.approx(72, rel=1e-5)
    still = float(layer(x, mask=mask, stats=True)[1].max_logit)
    assert still <= float(layer.logit_bound(rotary_dim=0)) == pytest.approx(2.4, rel=1e-5)
    assert float(layer.logit_bound(dtype=torch.bfloat16)) == pytest.approx(
        72 * (1 + 2**-8) ** 3, rel=1e-5
    )
    after = Attention(
        AttentionConfig(dim=64, num_heads=1, head_dim=64, norm=NormDialect(order="after_rope"))
    )
    after.load_state_dict(layer.state_dict())
    # Entry 0 of q only ever meets entry 0 of k.
    for known in ({}, {"rope": rotary(40)}, {"rotary_dim": 0}):
        assert float(after.logit_bound(**known)) == pytest.approx(2.4, rel=1e-5)


def test_a_layer_without_a_norm_has_no_bound():
    assert built(norm=None)[0].logit_bound() is None


def test_the_bound_of_the_layer_covers_the_amplitude_of_a_yarn_table():
    layer, x = built()
    scaling = RopeScaling(kind="yarn", factor=32.0, original_length=16)
    rope = RotaryEmbedding(6, layout="half", scaling=scaling)(T)
    with torch.no_grad():
        # All mass in one rotated entry, the same for q and k: the logit of a token with itself is
        # largest possible.
        layer.qkv.weight.zero_()
        layer.qkv.weight[0::6] = 100.0
        layer.norm.q_gain.fill_(1.0)
        layer.norm.k_gain.fill_(1.0)
    _, stats = layer(x, rope=rope, mask=Mask(), stats=True)
    assert (stats.max_logit <= layer.logit_bound(rope) * (1 + 1e-6)).all()


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 63, 100, 257])
def test_odd_lengths_and_single_tokens(length, B):
    layer, _ = built(num_kv_heads=2, sink="logit", window=40)
    x = torch.randn(B, length, C, dtype=torch.float64)
    rope = RotaryEmbedding(4, layout="half")(length, start=2)
    visible = torch.ones(1, length, length, dtype=torch.bool).tril()

    out, stats = layer(x, rope=rope, stats=True)
    right, _, _ = dense(layer, x, rope, visible)
    assert_close(out, right, atol=1e-9, rtol=1e-9)
    assert stats.row_count == B * length

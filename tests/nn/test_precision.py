"""F7: gains, sinks and frequencies stay exact, however a model is built, cast, moved or loaded."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.testing import assert_close

from qknorm import Mask, NormDialect
from qknorm.nn import Attention, AttentionConfig, KVCache, QKNorm, RotaryEmbedding

C = 24
EXACT = 1 + 2.0**-20  # neither bf16 nor fp16 has it


class Model(nn.Module):
    """Layers with every kind of gain and sink, inside other modules."""

    def __init__(self, backend="auto"):
        super().__init__()
        common = {"dim": C, "num_heads": 4, "num_kv_heads": 2, "backend": backend}
        self.layers = nn.ModuleList(
            Attention(AttentionConfig(**common, sink=sink, norm=norm))
            for sink, norm in (
                ("logit", NormDialect()),
                ("token", NormDialect(gain="shared", offset=1.0)),
                ("off_by_one", NormDialect(gain="none")),
                ("none", None),
            )
        )
        self.rotary = RotaryEmbedding(4, layout="half")
        self.head = nn.Linear(C, C)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, rope=self.rotary)
        return x


def own(model):
    """Gains, sinks, marks and frequencies."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: x for n, x in tensors.items() if "weight" not in n and "bias" not in n}


def exact_model():
    model = Model()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "gain" in name or "sink" in name:
                x.fill_(EXACT)
                x.grad = torch.full_like(x, EXACT)
    return model


CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.bfloat16),
    "to_device": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.bfloat16),
    "like": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "apply": lambda m: m.apply(lambda one: one.to(torch.bfloat16)),
    "twice": lambda m: m.half().bfloat16(),
    "copy": lambda m: copy.deepcopy(m.bfloat16()),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_f07_a_cast_to_half_precision_leaves_gains_sinks_and_frequencies_alone(cast):
    model = exact_model()
    before = {name: x.detach().clone() for name, x in own(model).items()}
    model = cast(model)
    assert model.head.weight.dtype in (torch.bfloat16, torch.float16)
    assert {layer.qkv.weight.dtype for layer in model.layers} == {model.head.weight.dtype}
    assert len(before) == 11
    for name, x in own(model).items():
        assert x.dtype == torch.float32, name
        assert torch.equal(x, before[name]), name
    gain = model.layers[0].norm.q_gain
    assert torch.equal(gain.grad if gain.grad is not None else before["layers.0.norm.q_gain"], gain)
    out = model(torch.randn(1, 5, C, dtype=model.head.weight.dtype))
    assert out.dtype == model.head.weight.dtype
    out.float().sum().backward()


def test_f07_swapped_and_overwritten_parameters_too():
    """torch's other two ways to convert a module."""
    for name in ("swap_module_params", "overwrite_module_params"):
        switch = getattr(torch.__future__, f"set_{name}_on_conversion")
        model = Model()
        switch(True)
        try:
            model.bfloat16()
        finally:
            switch(False)
        assert {x.dtype for x in own(model).values()} == {torch.float32}
        assert model.head.weight.dtype == torch.bfloat16


def test_f07_double_is_fp64_and_the_way_back_is_fp32():
    """fp64 input is computed in fp64, so that a gain of fp32 would be the only rounding left."""
    model = exact_model().double()
    names = [name for name in own(model) if "rotary" not in name]
    assert {own(model)[name].dtype for name in names} == {torch.float64}
    assert {x.dtype for x in own(model.bfloat16()).values()} == {torch.float32}
    assert {x.dtype for x in own(model.double().float()).values()} == {torch.float32}
    assert float(model.layers[0].norm.q_gain[0, 0]) == EXACT


def test_f07_a_move_is_still_a_move():
    model = exact_model().to("meta", torch.bfloat16)
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"meta"}
    assert {x.dtype for x in own(model).values()} == {torch.float32}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_f07_a_state_dict_in_half_precision_leaves_parameters_in_fp32(dtype, assign):
    state = {name: x.to(dtype) for name, x in exact_model().state_dict().items()}
    model = Model()
    model.load_state_dict(state, assign=assign)
    assert {x.dtype for x in own(model).values()} == {torch.float32}
    assert model.head.weight.dtype == (dtype if assign else torch.float32)
    assert torch.equal(model.layers[0].norm.q_gain, torch.ones(4, 6))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_f07_fsdp1_casts_buffers_past_the_module_and_frequencies_stay(one_rank):
    model, exact = Model(), RotaryEmbedding(4, layout="half")(300)
    wrapped = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    wrapped(torch.randn(1, 5, C))
    assert model.rotary.inverse_frequency.dtype == torch.bfloat16
    assert torch.equal(model.rotary(300).cos, exact.cos)
    assert torch.equal(model.layers[1].norm.effective_gains()[0], torch.ones(4, 6))


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_f01_f07_everything_of_nn_under_another_default_dtype(default):
    torch.manual_seed(0)
    model = Model("stock")
    assert {x.dtype for x in own(model).values()} == {torch.float32}
    assert model.layers[0].qkv.weight.dtype == default
    assert {g.dtype for layer in model.layers[:3] for g in layer.norm.effective_gains()} == {
        torch.float32
    }
    x = torch.randn(2, 7, C, requires_grad=True)
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.layers.parameters())

    twin = Model("stock")
    torch.set_default_dtype(torch.float32)
    exact = Model("stock")
    exact.load_state_dict(model.state_dict())
    tolerance = (
        {"atol": 0.05, "rtol": 0.05} if default != torch.float64 else {"atol": 1e-4, "rtol": 1e-4}
    )
    assert_close(model(x).float(), exact(x.detach().float()), **tolerance)
    torch.set_default_dtype(default)

    for layer in twin.layers:
        cache = layer.new_cache(2, 7)
        assert cache.keys.dtype == default
        parts = [layer(x[:, a:b], rope=twin.rotary, cache=cache) for a, b in ((0, 4), (4, 7))]
        assert_close(torch.cat(parts, 1), layer(x, rope=twin.rotary), **tolerance)
        _, stats = layer(x, rope=twin.rotary, mask=Mask(causal=True, window=3), stats=True)
        assert stats.max_logit.dtype == (torch.float64 if default == torch.float64 else torch.float32)
        bound = layer.logit_bound()
        assert bound is None or bound.dtype == torch.float32
    assert KVCache(1, 2, 3, 4).keys.dtype == default
    rope = RotaryEmbedding(4, layout="half")(300)
    assert rope.cos.dtype == torch.float32
    norm = QKNorm(4, 2, 6, NormDialect(gain="none", value=True))
    assert norm(x.new_ones(1, 4, 3, 6), x.new_ones(1, 2, 3, 6))[0].dtype == default


def test_f16_a_new_cache_under_autocast_fits_the_keys_of_its_layer():
    layer = Model().layers[1]
    x = torch.randn(2, 3, C)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            cache = layer.new_cache(2, 6)
            parts = [layer(x, cache=cache), layer(x, cache=cache)]
        assert cache.keys.dtype == parts[0].dtype == dtype
        assert cache.length == 6
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.new_cache(2, 6, dtype=torch.float32).keys.dtype == torch.float32
        double = Model().double().layers[1]
        cache = double.new_cache(2, 3)  # autocast leaves fp64 alone
        with torch.no_grad():
            double(x.double(), cache=cache)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert layer.new_cache(2, 6).keys.dtype == torch.float32

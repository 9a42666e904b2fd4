"""F6: a model that is built without memory gets every first value from `reset_parameters`."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from qknorm import NormDialect
from qknorm.lab import LanguageModel, ModelConfig
from qknorm.nn import Attention, AttentionConfig, QKNorm, RopeScaling, RotaryEmbedding

NO_MEMORY = 7e33  # what `emptied` leaves in every float
YARN = RopeScaling(kind="yarn", factor=4.0, original_length=64)
WIDTH = 64


class Layers(nn.Module):
    """Every module of qknorm.nn, in every form that has first values of its own."""

    def __init__(self, **where):
        super().__init__()
        common = {"dim": WIDTH, "num_heads": 4, "num_kv_heads": 2}
        self.logit = Attention(AttentionConfig(**common, sink="logit", gate=True), **where)
        shifted = NormDialect(offset=1.0, gain="shared")
        self.token = Attention(AttentionConfig(**common, sink="token", norm=shifted), **where)
        self.full = QKNorm(4, 2, 16, NormDialect(gain="full", statistic="full"), **where)
        self.none = QKNorm(4, 2, 16, NormDialect(gain="none"), **where)
        self.rotary = RotaryEmbedding(16, layout="half", scaling=YARN, **where)

    def forward(self, x):
        for layer in (self.logit, self.token):
            x = x + layer(x, rope=self.rotary)
        return x


def emptied(model):
    """`to_empty`, with memory that shows in every result."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(NO_MEMORY)
    return model


def reset_each(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def assert_first_values(model):
    """As the constructor gives them: constants exactly, draws by their deviation."""
    made = Layers()
    tensors = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert found.keys() == tensors.keys()
    for name, x in found.items():
        x = x.full_tensor() if isinstance(x, DTensor) else x
        assert (x.dtype, x.device, x.shape) == (torch.float32, torch.device("cpu"), tensors[name].shape)
        if name == "token.sink_key":
            assert 0.5 < float(x.std()) < 1.5
        elif name.endswith("weight"):
            assert float(x.abs().max()) <= WIDTH**-0.5
            assert float(x.std()) > 0.01
        else:
            assert torch.equal(x, tensors[name]), name
    assert torch.equal(made.logit.sink_logit, torch.zeros(4))
    assert torch.equal(made.token.sink_value, torch.zeros(2, 16))
    assert torch.equal(made.token.norm.q_gain, torch.zeros(16))


def by_context():
    with torch.device("meta"):
        return Layers()


def by_argument():
    return Layers(device="meta")


def by_default_device():
    torch.set_default_device("meta")
    try:
        return Layers()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("build", [by_context, by_argument, by_default_device, Layers])
def test_f06_each_reset_gives_every_parameter_and_buffer_its_first_value(build):
    model = build()
    if build is not Layers:
        assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"meta"}
    model = emptied(copy.deepcopy(model))
    reset_each(model)
    assert_first_values(model)
    assert model(torch.randn(1, 5, WIDTH)).isfinite().all()


def test_f06_a_state_dict_alone_makes_an_empty_model_whole():
    """What it does not hold, the frequencies, no `reset_parameters` needs to be called for."""
    made = Layers()
    for assign in (False, True):
        model = by_context()
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(made.state_dict(), assign=assign)
        if assign:  # non-persistent buffers are still on meta
            model.none.to_empty(device="cpu").reset_parameters()
            model.rotary.to_empty(device="cpu")
        x = torch.randn(1, 5, WIDTH)
        assert torch.equal(model(x), made(x))


def test_f06_fsdp2_shards_before_there_is_memory(one_rank):
    model = by_context()
    for layer in (model.logit, model.token, model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    reset_each(model)
    assert isinstance(model.token.sink_key, DTensor)
    assert_first_values(model)
    model(torch.randn(1, 5, WIDTH)).sum().backward()
    assert model.token.sink_key.grad is not None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("own", [False, True])
def test_f06_fsdp1_initialises_late(one_rank, own):
    def init(module):
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    model = by_context()
    wrapped = FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        param_init_fn=init if own else None,
    )
    assert_first_values(model)
    assert wrapped(torch.randn(1, 5, WIDTH)).isfinite().all()


def test_f06_the_language_model_of_the_lab_resets_as_a_whole():
    config = ModelConfig(layers=2, dim=WIDTH, heads=4, sink="token", norm=NormDialect(offset=1.0))
    with torch.device("meta"):
        model = LanguageModel(config)
    emptied(model).reset_parameters()
    torch.manual_seed(0)
    made = LanguageModel(config)
    for (name, x), y in zip(model.named_parameters(), made.parameters(), strict=True):
        if float(y.std()) > 0:
            assert 0.85 < float(x.std() / y.std()) < 1.15, name
        else:
            assert torch.equal(x, y), name
    assert torch.equal(model.rotary.inverse_frequency, made.rotary.inverse_frequency)
    tokens = torch.arange(12)[None]
    assert model(tokens)[0].isfinite().all()

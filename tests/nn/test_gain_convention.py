"""F57: a state dict says what its gains mean, and one that means something else is refused."""

import io
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from qknorm import NormDialect
from qknorm.nn import Attention, AttentionConfig, QKNorm

BOTH = (0.0, 1.0)


def built(offset, gain="per_head"):
    config = AttentionConfig(dim=16, num_heads=2, norm=NormDialect(offset=offset, gain=gain))
    return torch.nn.Sequential(Attention(config))


def effective(model):
    return [g.detach().clone() for g in model[0].norm.effective_gains()]


def trained(offset, **options):
    model = built(offset, **options)
    with torch.no_grad():
        for gain in (model[0].norm.q_gain, model[0].norm.k_gain):
            gain += torch.linspace(-0.4, 0.6, gain.numel()).view(gain.shape)
    return model


def by_state_dict(source, target, path):
    target.load_state_dict(source.state_dict())


def by_assignment(source, target, path):
    target.load_state_dict(source.state_dict(), assign=True)


def by_lenient_loading(source, target, path):
    target.load_state_dict(source.state_dict(), strict=False)


def by_torch_save(source, target, path):
    torch.save(source.state_dict(), path / "model.pt")
    target.load_state_dict(torch.load(path / "model.pt", weights_only=True))


def by_safetensors(source, target, path):
    save_file(source.state_dict(), path / "model.safetensors")
    target.load_state_dict(load_file(path / "model.safetensors"))


def by_distributed_checkpoint(source, target, path):
    """Reads into the tensors of the target itself, before anything is compared."""
    dcp.save(get_model_state_dict(source), checkpoint_id=path / "checkpoint")
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=path / "checkpoint")
    set_model_state_dict(target, state)


def by_whole_state_of_shards(source, target, path):
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_model_state_dict(
        target,
        get_model_state_dict(source, options=whole),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )


WAYS = [
    by_state_dict,
    by_assignment,
    by_lenient_loading,
    by_torch_save,
    by_safetensors,
    by_distributed_checkpoint,
]


def check(way, path, prepare=lambda model: model):
    for gain, stored, own in itertools.product(("per_head", "shared", "full"), BOTH, BOTH):
        source, target = prepare(trained(stored, gain=gain)), prepare(built(own, gain=gain))
        folder = path / f"{gain}-{stored}-{own}"
        folder.mkdir()
        if stored == own:
            way(source, target, folder)
            assert all(map(torch.equal, effective(target), effective(source)))
            continue
        with pytest.raises(RuntimeError, match=r"0\.norm\.gain_offset of the state dict says") as caught:
            way(source, target, folder)
        (sentence,) = str(caught.value).strip().splitlines()[1:]
        assert f"build the module with NormDialect(offset={stored:g})" in sentence


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_f57_a_state_dict_of_the_other_convention_is_refused(way, tmp_path):
    check(way, tmp_path)


@pytest.mark.parametrize(
    "way", [by_distributed_checkpoint, by_whole_state_of_shards], ids=lambda f: f.__name__
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_f57_sharded_models_too(way, tmp_path, one_rank):
    def shard(model):
        for layer in (model[0].norm, model):
            fully_shard(layer)
        return model

    check(way, tmp_path, shard)


def test_f57_a_refused_state_dict_leaves_the_gains_as_they_are():
    target = trained(1.0)
    before = effective(target)
    with pytest.raises(RuntimeError):
        target.load_state_dict(trained(0.0).state_dict(), strict=False)
    assert all(map(torch.equal, effective(target), before))


@pytest.mark.parametrize("strict", [True, False])
def test_f57_a_state_dict_that_does_not_say_it_holds_gains_of_w(strict):
    """Such as those of other projects: read where w is stored, refused where 1 + w is."""
    plain = trained(0.0)
    state = {name: x for name, x in plain.state_dict().items() if "gain_offset" not in name}
    target = built(0.0)
    target.load_state_dict(state, strict=strict)
    assert torch.equal(effective(target)[0], effective(plain)[0])
    shifted = built(1.0)
    with pytest.raises(RuntimeError, match=r"no 0\.norm\.gain_offset, so that its gains mean w"):
        shifted.load_state_dict(state, strict=strict)
    # What the sentence says to do.
    for name in state:
        if "gain" in name:
            state[name] = state[name] - 1
    shifted.load_state_dict(state | {"0.norm.gain_offset": torch.tensor(1.0)}, strict=strict)
    torch.testing.assert_close(effective(shifted)[0], effective(plain)[0])


def test_f57_on_meta_and_in_parts():
    state = trained(0.0).state_dict()
    unsaid = {name: x for name, x in state.items() if "gain_offset" not in name}
    for given in (state, unsaid):
        with torch.device("meta"):
            model = built(0.0)
        model.load_state_dict(given, assign=True)
        assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"cpu"}
        assert float(model[0].norm.gain_offset) == 0.0
    shifted = built(1.0)
    shifted.load_state_dict({"0.qkv.weight": state["0.qkv.weight"]}, strict=False)
    assert float(shifted[0].norm.gain_offset) == 1.0
    with pytest.raises(RuntimeError, match="gain_offset"):
        shifted.load_state_dict({"0.norm.k_gain": state["0.norm.k_gain"]}, strict=False)
    with pytest.raises(RuntimeError, match=r"Missing key.*k_gain"):
        QKNorm(2, 2, 8).load_state_dict({"q_gain": torch.ones(2, 8)})
    bare = QKNorm(2, 2, 8, NormDialect(gain="none"))
    assert not bare.state_dict()
    bare.load_state_dict({})


def test_f57_the_mark_is_a_number_that_no_cast_changes():
    buffer = io.BytesIO()
    torch.save(trained(1.0).bfloat16().state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert torch.equal(state["0.norm.gain_offset"], torch.tensor(1.0))
    built(1.0).half().load_state_dict({name: x.half() for name, x in state.items()})

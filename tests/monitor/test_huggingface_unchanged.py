"""The monitor changes nothing: not the numbers, not the kernels, not the model once it has gone."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import FAMILIES, PAIRS, Family, arguments, layout, transformers
from qknorm.monitor import Monitor

# Dropout of the attention weights, under the names it has.
DROPOUT = {
    "gpt2": "attn_pdrop",
    "gpt2_inverse": "attn_pdrop",
    "bert": "attention_probs_dropout_prob",
    "vit": "attention_probs_dropout_prob",
    "t5_encoder": "dropout_rate",
}


def run(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor | None]:
    """The output and the gradient of every parameter of one training step."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    out = model(**inputs).last_hidden_state
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)))
    return [out.detach().clone(), *(p.grad for p in model.parameters())]


def assert_same_bits(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


@pytest.mark.parametrize("kind", ["plain", "right"])
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_outputs_and_gradients_keep_their_bits(name: str, how: str, p: float, kind: str) -> None:
    family = FAMILIES[name]
    if kind not in family.layouts:
        kind = "long"
    model = family.make(how, **{DROPOUT.get(name, "attention_dropout"): p})
    inputs = arguments(name, layout(kind))
    wanted = run(model, inputs)
    with Monitor.attach(model, every=1) as monitor:
        assert model.config._attn_implementation == how
        assert_same_bits(run(model, inputs), wanted)
        (record,) = monitor.step()
        assert record.phase == "train"
        assert list(record.layers) == family.layers
        assert_same_bits(run(model, inputs), wanted)
    assert_same_bits(run(model, inputs), wanted)
    assert model.config._attn_implementation == how


class Operators(TorchDispatchMode):
    """Counts what runs, save the monitor's own operators and what runs inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("attention", "softmax", "mm", "dropout", "bernoulli")):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["plain", "right"])
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(
    ("name", "how"), [pair for pair in PAIRS if pair[0] in ("llama", "gpt_oss", "bert")]
)
def test_the_same_kernels_run(name: str, how: str, p: float, kind: str) -> None:
    model = FAMILIES[name].make(how, **{DROPOUT.get(name, "attention_dropout"): p})
    inputs = arguments(name, layout(kind))
    with Operators() as without:
        run(model, inputs)
    with Monitor.attach(model, every=1), Operators() as attached:
        run(model, inputs)
    assert attached.seen == without.seen
    if how == "eager":
        assert without.seen["aten._softmax.default"] >= 2  # routers have one too
        assert not any("attention" in operator for operator in without.seen)
    elif p == 0:
        assert sum(n for operator, n in without.seen.items() if "flash_attention" in operator) == 4


class Items(list[Any]):
    """The entries of a dict at one time."""


def everything(model: nn.Module) -> dict[str, Any]:
    """What a tap might have touched, one level of dicts copied, for comparison by identity."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def shallow(namespace: Any) -> dict[str, Any]:
        return {
            key: Items(value.items()) if isinstance(value, dict) else value
            for key, value in dict(namespace).items()
            if key not in ("__warningregistry__", "__builtins__")
        }

    state = {
        "interface": shallow(vars(AttentionInterface)),
        "global": shallow(ALL_ATTENTION_FUNCTIONS),
        "instance": shallow(vars(ALL_ATTENTION_FUNCTIONS)),
        "functional": shallow(vars(nn.functional)),
    }
    for path, module in model.named_modules():
        state["module " + path] = shallow(vars(module))
        state["class " + path] = shallow(vars(type(module)))
        state["file " + path] = shallow(vars(sys.modules[type(module).__module__]))
    return state


def assert_same_objects(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for place, names in wanted.items():
        assert found[place].keys() == names.keys(), place
        for name, value in names.items():
            other = found[place][name]
            if isinstance(value, Items):
                assert len(other) == len(value), (place, name)
                assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(other, value, strict=True)), (
                    place,
                    name,
                )
            else:
                # Fresh values only where they are equal: ints, strings, flags.
                assert other is value or other == value, (place, name)


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_detach_leaves_nothing_and_attach_works_again(name: str, how: str) -> None:
    family = FAMILIES[name]
    model = family.make(how).eval()
    inputs = arguments(name, layout("plain"))
    with torch.no_grad():
        model(**inputs)
    before, keys = everything(model), list(model.state_dict())
    records = []
    for _ in range(2):
        monitor = Monitor.attach(model, every=1)
        assert list(model.state_dict()) == keys
        assert model.config._attn_implementation == how
        with torch.no_grad():
            model(**inputs)
        records += monitor.step()
        monitor.detach()
        assert_same_objects(everything(model), before)
    assert len(records) == 2
    assert records[0].layers == records[1].layers


def test_an_error_inside_leaves_nothing_either() -> None:
    family = FAMILIES["llama"]
    model = family.make("sdpa")
    model(**arguments("llama", layout("plain")))
    before = everything(model)

    def fail() -> None:
        with Monitor.attach(model, every=1):
            model(input_ids=torch.full((1, 3), 10**6))

    with pytest.raises(IndexError):
        fail()
    assert_same_objects(everything(model), before)


def test_attaching_twice_is_refused() -> None:
    family = FAMILIES["llama"]
    model, inputs = family.make("sdpa"), arguments("llama", layout("plain"))
    with Monitor.attach(model, every=1) as monitor:
        with pytest.raises(ValueError, match=r"\w"):
            Monitor.attach(model, every=1)
        model(**inputs)
        (record,) = monitor.step()  # the first one goes on
        assert list(record.layers) == family.layers
    with Monitor.attach(model, every=1) as monitor:
        model(**inputs)
        assert len(monitor.step()) == 1


def test_a_model_without_attention_is_refused_by_name() -> None:
    class PlainNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

    with pytest.raises(ValueError, match="PlainNetwork"):
        Monitor.attach(PlainNetwork(), every=1)
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=11, state_size=4, use_mambapy=False
    )
    with pytest.raises(ValueError, match="MambaModel"):
        Monitor.attach(transformers.MambaModel(config), every=1)


def _observed(family: Family, monitor: Monitor) -> list[int]:
    (record,) = monitor.step()
    assert list(record.layers) == family.layers
    return [layer.rows for layer in record.layers.values()]


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_two_models_of_one_class_keep_apart(how: str) -> None:
    family = FAMILIES["llama"]
    one, other, alone = (family.make(how).eval() for _ in range(3))
    short = {"input_ids": torch.arange(6, 11)[None]}
    inputs = arguments("llama", layout("plain"))
    with (
        Monitor.attach(one, every=1) as first,
        Monitor.attach(other, every=1) as second,
        torch.no_grad(),
    ):
        one(**short)
        alone(**inputs)
        other(**inputs)
        assert _observed(family, first) == [5, 5]
        rows = inputs["input_ids"].numel()
        assert _observed(family, second) == [rows, rows]
        # Undone in the order in which they came, which is not that of a stack.
        first.detach()
        other(**short)
        assert _observed(family, second) == [5, 5]
        one(**short)

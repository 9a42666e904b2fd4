"""Compiled models: right numbers in observed and unobserved steps, one variant for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from dense import captured, check, truth
from models import FAMILIES, Layout, arguments, layout
from qknorm.monitor import Monitor, Record

CASES = [
    # Name, attention function, layout, whether the compiled model ran before the monitor came.
    ("llama", "sdpa", "plain", True),
    ("llama", "eager", "right", False),
    ("qwen3", "sdpa", "right", True),
    ("gemma2", "eager", "plain", True),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def model_of(name: str, how: str, **options: Any) -> nn.Module:
    return FAMILIES[name].make(how, attention_dropout=0.0, **options)


def passes(model: Any, parameters: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    parameters.zero_grad(set_to_none=True)
    out = model(**inputs).last_hidden_state
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in parameters.parameters() if p.grad is not None)]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """To what another order of fp32 operations changes, relative to the largest entry."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().amax()) + 1e-9)


def assert_right(record: Record, name: str, calls: dict[str, Any], batch: Layout) -> None:
    family = FAMILIES[name]
    assert list(record.layers) == family.layers
    assert record.silent == {}
    for i, path in enumerate(family.layers):
        check(record.layers[path], truth(calls[path], family, i, [batch]))


@pytest.mark.parametrize(("name", "how", "kind", "called_before"), CASES)
def test_one_graph_for_each_kind_of_step(name: str, how: str, kind: str, called_before: bool) -> None:
    batch = layout(kind)
    model, inputs = model_of(name, how), arguments(name, batch)
    with captured(model) as calls:
        wanted = passes(model, model, inputs)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if called_before:
        assert_close(passes(compiled, model, inputs), wanted)
        assert counter.frame_count == 1
    before = counter.frame_count
    with Monitor.attach(model, every=2) as monitor:
        for step in range(6):
            assert_close(passes(compiled, model, inputs), wanted)
            records = monitor.step()
            if step % 2:
                assert records == []
            else:
                assert [record.step for record in records] == [step]
                assert_right(records[0], name, calls, batch)
        assert counter.frame_count - before <= 2
    assert_close(passes(compiled, model, inputs), wanted)


def test_attached_to_the_compiled_module() -> None:
    """What `torch.compile` returns, as the trainers hold it; the names are still the model's."""
    batch = layout("plain")
    model, inputs = model_of("llama", "sdpa"), arguments("llama", batch)
    with captured(model) as calls:
        wanted = passes(model, model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    passes(compiled, model, inputs)
    with Monitor.attach(compiled, every=1) as monitor:
        assert_close(passes(compiled, model, inputs), wanted)
        (record,) = monitor.step()
    layers = {path.removeprefix("_orig_mod."): layer for path, layer in record.layers.items()}
    assert list(layers) == FAMILIES["llama"].layers
    for i, (path, layer) in enumerate(layers.items()):
        check(layer, truth(calls[path], FAMILIES["llama"], i, [batch]))


@pytest.mark.parametrize("where", ["model", "layers"])
def test_compiled_in_place(where: str) -> None:
    batch = layout("plain")
    model, inputs = model_of("llama", "sdpa"), arguments("llama", batch)
    with captured(model) as calls:
        wanted = passes(model, model, inputs)
    for module in [model] if where == "model" else model.layers:
        module.compile(backend="aot_eager", fullgraph=True)
    passes(model, model, inputs)
    with Monitor.attach(model, every=2) as monitor:
        for step in range(4):
            assert_close(passes(model, model, inputs), wanted)
            records = monitor.step()
            assert len(records) == 1 - step % 2
            for record in records:
                assert_right(record, "llama", calls, batch)
    assert_close(passes(model, model, inputs), wanted)


@pytest.mark.parametrize(
    ("name", "how", "use_reentrant"), [("llama", "eager", True), ("qwen3", "sdpa", False)]
)
def test_with_checkpointing(name: str, how: str, use_reentrant: bool) -> None:
    batch = layout("plain")
    model, inputs = model_of(name, how), arguments(name, batch)
    with captured(model) as calls:
        wanted = passes(model, model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(passes(compiled, model, inputs), wanted)  # torch can do it without the monitor
    with Monitor.attach(model, every=2) as monitor:
        for step in range(4):
            assert_close(passes(compiled, model, inputs), wanted)
            records = monitor.step()
            assert len(records) == 1 - step % 2
            for record in records:
                assert_right(record, name, calls, batch)


def test_inductor() -> None:
    """The default compiler, which fuses and reorders. One layer, no gradients: it is slow."""
    batch = layout("plain")
    model, inputs = model_of("qwen3", "sdpa", num_hidden_layers=1).eval(), arguments("qwen3", batch)
    with captured(model) as calls, torch.no_grad():
        wanted = model(**inputs).last_hidden_state
    compiled = torch.compile(model, fullgraph=True)
    with Monitor.attach(model, every=1) as monitor, torch.no_grad():
        assert_close([compiled(**inputs).last_hidden_state], [wanted])
        (record,) = monitor.step()
    ((path, layer),) = record.layers.items()
    check(layer, truth(calls[path], FAMILIES["qwen3"], 0, [batch]))


def test_accumulation_and_evaluation() -> None:
    family, model = FAMILIES["llama"], model_of("llama", "sdpa")
    batches = [layout("plain")] * 3
    parts = [arguments("llama", batch, seed) for seed, batch in enumerate(batches)]
    with captured(model) as calls:
        for part in parts:
            passes(model, model, part)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with Monitor.attach(model, every=1) as monitor:
        for part in parts[:2]:
            passes(compiled, model, part)
        model.eval()
        with torch.no_grad():
            compiled(**parts[2])
        model.train()
        records = {record.phase: record for record in monitor.step()}
    assert sorted(records) == ["eval", "train"]
    for i, path in enumerate(family.layers):
        check(records["train"].layers[path], truth(calls[path][:2], family, i, batches[:2]))
        check(records["eval"].layers[path], truth(calls[path][2:], family, i, batches[2:]))

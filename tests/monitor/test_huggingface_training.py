"""Records of training loops: checkpointing, accumulation, evaluation, autocast, many steps."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

from dense import captured, check, truth
from models import FAMILIES, PAIRS, B, T, arguments, layout
from qknorm.monitor import Monitor
from test_huggingface_unchanged import assert_same_bits, run

LOOPS = [pair for pair in PAIRS if pair[0] in ("llama", "gemma3", "gpt_oss", "gpt2")]


def make(name: str, how: str) -> nn.Module:
    """In training mode but without dropout."""
    off = (
        {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        if name == "gpt2"
        else {"attention_dropout": 0.0}
    )
    return FAMILIES[name].make(how, **off)


def train(model: nn.Module, inputs: dict[str, Any]) -> None:
    model(**inputs).last_hidden_state.square().mean().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("name", "how"), LOOPS)
def test_checkpointed_layers_count_once(name: str, how: str, use_reentrant: bool) -> None:
    """With dropout, so that the second pass must repeat the first one's."""
    family, inputs = FAMILIES[name], arguments(name, layout("right"))
    model = family.make(how)
    with Monitor.attach(model, every=1) as monitor:
        run(model, inputs)
        (wanted,) = monitor.step()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    bits = run(model, inputs)
    with Monitor.attach(model, every=1) as monitor:
        for step in range(2):
            assert_same_bits(run(model, inputs), bits)
            (record,) = monitor.step()
            assert record.layers == wanted.layers, step
            assert record.silent == {}
        # Two passes forward before the first backward one.
        outputs = [model(**inputs).last_hidden_state for _ in range(2)]
        for out in outputs:
            out.sum().backward()
        (record,) = monitor.step()
        for path in family.layers:
            assert record.layers[path].rows == 2 * wanted.layers[path].rows


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}])
@pytest.mark.parametrize(("name", "how"), LOOPS)
def test_accumulated_passes_are_one_record(
    name: str, how: str, checkpointing: dict[str, bool] | None
) -> None:
    family = FAMILIES[name]
    model = make(name, how)
    batches = [layout("plain")] * 2
    parts = [arguments(name, batch, seed) for seed, batch in enumerate(batches)]
    with captured(model) as calls:
        for part in parts:
            train(model, part)
    whole = {"input_ids": torch.cat([part["input_ids"] for part in parts])}
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
    with Monitor.attach(model, every=1) as monitor:
        for part in parts:
            train(model, part)
        (pieces,) = monitor.step()
        train(model, whole)
        (together,) = monitor.step()
    for i, path in enumerate(family.layers):
        wanted = truth(calls[path], family, i, batches)
        assert wanted.rows == 2 * B * T
        check(pieces.layers[path], wanted)
        check(together.layers[path], wanted)


def test_unequal_batches_accumulate_by_their_rows() -> None:
    family, model = FAMILIES["llama"], make("llama", "sdpa")
    batches = [layout(kind) for kind in ("right", "packed", "left", "long")]
    parts = [arguments("llama", batch, seed) for seed, batch in enumerate(batches)]
    with captured(model) as calls:
        for part in parts:
            train(model, part)
    with Monitor.attach(model, every=1) as monitor:
        for part in parts:
            train(model, part)
        (record,) = monitor.step()
    for i, path in enumerate(family.layers):
        check(record.layers[path], truth(calls[path], family, i, batches))


@pytest.mark.parametrize(("name", "how"), LOOPS)
def test_evaluation_makes_a_record_of_its_own(name: str, how: str) -> None:
    family, model = FAMILIES[name], make(name, how)
    batches = {"train": layout("plain"), "eval": layout("left")}
    parts = {phase: arguments(name, batch, len(phase)) for phase, batch in batches.items()}

    def both() -> None:
        train(model, parts["train"])
        model.eval()
        with torch.no_grad():
            model(**parts["eval"])
        model.train()

    with captured(model) as calls:
        both()
    with Monitor.attach(model, every=1) as monitor:
        both()
        records = monitor.step()
        train(model, parts["train"])
        (later,) = monitor.step()
    assert sorted(record.phase for record in records) == ["eval", "train"]
    assert [record.step for record in records] == [0, 0]
    assert (later.phase, later.step) == ("train", 1)
    for record in [*records, later]:
        for i, path in enumerate(family.layers):
            call = calls[path][record.phase == "eval"]
            check(record.layers[path], truth([call], family, i, [batches[record.phase]]))


def test_every_other_step() -> None:
    model, inputs = make("llama", "sdpa"), arguments("llama", layout("plain"))
    with Monitor.attach(model, every=3) as monitor:
        steps = []
        for step in range(7):
            assert monitor.is_observing == (step % 3 == 0)
            train(model, inputs)
            steps += [record.step for record in monitor.step()]
    assert steps == [0, 3, 6]


@pytest.mark.parametrize("kind", ["plain", "right"])
@pytest.mark.parametrize(("name", "how"), [*LOOPS, ("bert", "sdpa"), ("gemma2", "eager")])
def test_autocast(name: str, how: str, kind: str) -> None:
    family, batch = FAMILIES[name], layout(kind)
    model, inputs = family.make(how).eval(), arguments(name, batch)
    with captured(model) as calls, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(**inputs)
    with (
        Monitor.attach(model, every=1) as monitor,
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
    ):
        model(**inputs)
        (record,) = monitor.step()
    for i, path in enumerate(family.layers):
        assert calls[path][0].q.dtype is torch.bfloat16
        check(record.layers[path], truth(calls[path], family, i, [batch]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "how"), LOOPS)
def test_parameters_of_half_width(name: str, how: str, dtype: torch.dtype) -> None:
    """Records are as exact as fp32 allows: only q and k are rounded, before they are multiplied."""
    family, batch = FAMILIES[name], layout("left")
    model, inputs = make(name, how).to(dtype), arguments(name, batch)
    with captured(model) as calls:
        train(model, inputs)
    with Monitor.attach(model, every=1) as monitor:
        train(model, inputs)
        (record,) = monitor.step()
    for i, path in enumerate(family.layers):
        assert calls[path][0].q.dtype is dtype
        check(record.layers[path], truth(calls[path], family, i, [batch]))


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_a_hundred_steps_leave_no_memory_behind(how: str) -> None:
    model, inputs = make("llama", how), {"input_ids": torch.arange(6, 14)[None]}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def steps(n: int) -> None:
        for _ in range(n):
            optimizer.zero_grad(set_to_none=False)
            train(model, inputs)
            optimizer.step()
            monitor.step()

    def tensors() -> set[int]:
        gc.collect()
        kinds = torch.Tensor, nn.Parameter  # no fake tensors, which have no memory
        return {x.data_ptr() for x in gc.get_objects() if type(x) in kinds and x.numel()}

    def allocated() -> int:
        """Objects alive that the monitor made; torch and Python keep caches that grow by themselves."""
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/qknorm/*")])
        return sum(line.count for line in traces.statistics("lineno"))

    with Monitor.attach(model, every=2) as monitor:
        steps(20)
        before, objects = tensors(), len(gc.get_objects())
        tracemalloc.start()
        steps(150)  # until Python's free lists of small objects are full of ones that are counted
        start = allocated()
        steps(100)
        grown = allocated() - start
        tracemalloc.stop()
        assert tensors() == before
        assert len(gc.get_objects()) - objects < 50
        assert grown < 100  # less than one object for each step

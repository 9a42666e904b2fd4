"""Every kind of layer, run in every way, in every wrapper: the monitor changes no graph and no bit, and
its numbers are those of one process without a compiler."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import matrix

WORLD = 2
# What differs most. Every other cell is run by `make test-wide`, in three minutes more.
ALONE = [
    *((kind, "eager") for kind in matrix.KINDS),
    *((kind, way) for kind in ("sdpa", "own") for way in ("checkpoint", "blocks")),
    ("sdpa", "compile"),
    ("multihead", "checkpoint"),
    ("llama", "checkpoint"),
    ("qwen3", "blocks"),
]
CELLS = [(kind, "eager", wrapper) for kind in matrix.KINDS for wrapper in matrix.WRAPPERS] + [
    ("sdpa", "checkpoint", "ddp"),
    ("own", "blocks", "ddp"),
    ("multihead", "blocks", "fsdp1_orig"),
    ("sdpa", "checkpoint", "fsdp2"),
    ("own", "blocks", "fsdp2"),
]


def and_the_rest(some: list[Any], every: Iterable[Any]) -> list[Any]:
    """Those, and all others as wide tests."""
    rest = [pytest.param(*one, marks=pytest.mark.wide) for one in every if one not in some]
    return [*some, *rest]


EVERY_ALONE = list(itertools.product(matrix.KINDS, matrix.WAYS))
EVERY_CELL = list(itertools.product(matrix.KINDS, matrix.WAYS, matrix.WRAPPERS))


@functools.cache
def alone(kind: str, way: str) -> dict[str, Any]:
    # Of the models of Hugging Face the first half of a compiler is enough: the second takes longest.
    backend = "eager" if kind in ("llama", "qwen3") else "aot_eager"
    return matrix.cell(kind, way, "alone", backend=backend)


@functools.cache
def on_two_ranks(wide: bool) -> list[dict[tuple[str, str, str], Any]]:
    """The processes are started once for the few cells, and once for all others."""
    cells = [cell for cell in EVERY_CELL if cell not in CELLS] if wide else CELLS
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(matrix.run_cells, (WORLD, cells, folder), nprocs=WORLD)
        return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(WORLD)]


def assert_unchanged(cell: dict[str, Any], more: int = 0) -> None:
    assert "refused" not in cell, cell["refused"]
    plain, watched = cell["graphs"]
    assert watched == plain + more, "another number of graphs than without the monitor"
    assert cell["is_equal"], "another bit than without the monitor"


def assert_right(records: list[Any], kind: str) -> None:
    """Against one process without a compiler; rounding has one step of training to grow."""
    wanted = alone(kind, "eager")["records"]
    assert len(records) == len(wanted) == matrix.STEPS
    for record, right in zip(records, wanted, strict=True):
        assert len(record["layers"]) == 2
        assert record["silent"] == {}
        for (name, layer), (other, truth) in zip(
            record["layers"].items(), right["layers"].items(), strict=True
        ):
            assert name == other
            assert layer["note"] is None
            assert layer["rows"] == matrix.B * matrix.T
            assert layer["rank"] in (None, *range(WORLD))  # which of them saw the largest logit
            for field, value in (truth | {"rank": layer["rank"]}).items():
                assert layer[field] == (
                    pytest.approx(value, rel=1e-4, abs=1e-5)
                    if isinstance(value, list | tuple | float)
                    else value
                ), field
        if kind in ("sdpa", "own", "qwen3"):  # they are normed, with gains of 0.5 to 2
            for layer in record["layers"].values():
                assert 1.0 < min(layer["gain_max"]) <= max(layer["gain_max"]) < 2.1
                assert max(layer["max_logit"]) <= layer["bound"] < 4.5 * math.sqrt(matrix.D)


@pytest.mark.parametrize(("kind", "way"), and_the_rest(ALONE, EVERY_ALONE))
def test_f33_in_one_process(kind: str, way: str) -> None:
    cell = alone(kind, way)
    assert_unchanged(cell)
    assert_right(cell["records"], kind)
    assert (cell["graphs"][1] == 0) == (way == "eager")


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("kind", "way", "wrapper"), and_the_rest(CELLS, EVERY_CELL))
def test_f20_f33_on_two_ranks(kind: str, way: str, wrapper: str) -> None:
    cell = (kind, way, wrapper)
    for found in on_two_ranks(cell not in CELLS):
        if wrapper == "fsdp1" and way in ("checkpoint", "blocks"):
            # Dynamo supports FSDP1 with `use_orig_params=True` only, and here no fullgraph without it.
            assert "use_orig_params" in found[cell]["refused"]
            continue
        # The same holds for the whole model: all its frames are left to Python. That of the function
        # which stands for SDPA is one more that the compiler meets, and it makes a graph of it.
        assert_unchanged(found[cell], more=int(wrapper == "fsdp1" and way == "compile"))
        assert_right(found[cell]["records"], kind)


@pytest.mark.parametrize("kind", ["sdpa", "multihead", "own"])
def test_f34_twelve_layers_compiled_one_by_one_are_one_compilation(kind: str) -> None:
    """Of each of the two kinds of steps; twelve would be more than torch compiles."""
    counts = [
        matrix.train(kind, "blocks", "alone", every=every, depth=12, backend="eager")["graphs"]
        for every in (None, 1, 2)
    ]
    assert counts == [1, 1, 2]


def test_f33_in_the_default_compiler() -> None:
    """Which fuses and reorders: a layer is still announced before it is called."""
    found = matrix.train("sdpa", "blocks", "alone", every=1, backend="inductor")
    assert found["graphs"] == 1
    assert_right(found["records"], "sdpa")

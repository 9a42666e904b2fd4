"""The same numbers on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import ranks
from qknorm.monitor import Monitor

FIRST = "layers.first"


def _whole(extreme_head: int) -> dict[str, Any]:
    model, x = ranks.whole(extreme_head)
    with Monitor.attach(model, every=1) as monitor:
        model(x)
        return monitor.step()[0].to_json()["layers"]


def _close(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            _close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            _close(a, b)
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-7), (found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("extreme_head", [0, 3])
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("data", 2),
        ("data", 4),
        ("tensor", 2),
        ("tensor", 4),
        ("both", 4),
        ("pipeline", 2),
        ("pipeline", 4),
    ],
)
def test_every_rank_gets_the_numbers_of_one_process(
    kind: str, world: int, extreme_head: int, tmp_path: Path
) -> None:
    mp.spawn(ranks.run, (world, kind, extreme_head, str(tmp_path)), nprocs=world)
    wanted = _whole(extreme_head)
    for rank in range(world):
        records = torch.load(tmp_path / f"rank{rank}.pt")
        assert len(records) == 3
        for step, (record,) in enumerate(records):
            if kind == "data" and step == 1:  # rank 0 saw nothing; the others are still merged
                assert record["layers"][FIRST]["rows"] < wanted[FIRST]["rows"]
                continue
            _close(record["layers"], wanted)


def test_the_extreme_head_is_found_where_it_lives() -> None:
    for head in (0, 3):
        tops = _whole(head)[FIRST]["max_logit"]
        assert max(tops) == tops[head] > 5 * sorted(tops)[-2]


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_wrapped_training_gives_the_numbers_of_one_process(
    kind: str, attach_first: bool, tmp_path: Path
) -> None:
    world = 2
    mp.spawn(ranks.run_wrapped, (world, kind, attach_first, str(tmp_path)), nprocs=world)
    wanted = ranks.train_blocks("alone", 0, 1, attach_first=True)
    for rank in range(world):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert [len(step["records"]) for step in found] == [1, 0, 1, 0]
        for mine, whole in zip(found, wanted, strict=True):
            assert math.isclose(mine["loss"], whole["loss"], rel_tol=1e-5)
            for a, b in zip(mine["records"], whole["records"], strict=True):
                layers = a["layers"]
                for layer in (*layers.values(), *b["layers"].values()):  # rounding has time to grow
                    for name, value in layer.items():
                        if isinstance(value, list):
                            layer[name] = [round(v, 4) for v in value]
                        elif isinstance(value, float):
                            layer[name] = round(value, 4)
                _close(layers, b["layers"])
                assert a["silent"] == b["silent"]

"""The same numbers on any number of ranks, and no rank that waits for another in vain."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import ranks
from qknorm.monitor import Monitor
from qknorm.monitor.alerts import Alerts
from qknorm.monitor.reduce import FACTS, HOLDER, Part, Place, _tagged
from qknorm.monitor.to.jsonl import to_record

FIRST = "layers.first"
LEVELS = ("QM001", "QM010")


@functools.cache
def results(world: int) -> list[dict[str, Any]]:
    """What each rank found in every scenario: the processes are started once."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(ranks.run, (world, folder), nprocs=world)
        return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(world)]


def of(world: int, scenario: str) -> list[Any]:
    """What each rank found in one."""
    found = [result[scenario] for result in results(world)]
    for one in found:
        assert not isinstance(one, str) or one == "left", one
    return found


def _whole(extreme_head: int) -> dict[str, Any]:
    model, x = ranks.whole(extreme_head)
    with Monitor.attach(model, every=1) as monitor:
        model(x)
        layers: dict[str, Any] = monitor.step()[0].to_json()["layers"]
    assert set(_ranks(layers).values()) == {None}
    return layers


def _ranks(layers: dict[str, Any]) -> dict[str, int | None]:
    """Takes out the only number in which several ranks differ from one process."""
    return {name: layer.pop("rank", None) for name, layer in layers.items()}


def _holder(kind: str, world: int, head: int) -> int:
    """The rank that has the extreme head, or the loudest sequence, which is the last."""
    if kind == "both":
        return 2 + head // 2
    return {"data": world - 1, "tensor": head * world // ranks.HEADS, "pipeline": 0}[kind]


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
    ("kind", "world"), [(kind, world) for world, kinds in ranks.SHARED.items() for kind in kinds]
)
def test_every_rank_gets_the_numbers_of_one_process(kind: str, world: int, extreme_head: int) -> None:
    wanted = _whole(extreme_head)
    for records in of(world, f"{kind} {extreme_head}"):
        assert len(records) == 3
        for step, (record,) in enumerate(records):
            if kind == "data" and step == 1:  # rank 0 saw nothing; the others are still merged
                assert record["layers"][FIRST]["rows"] < wanted[FIRST]["rows"]
                continue
            assert record["layers"][FIRST]["rank"] == _holder(kind, world, extreme_head)
            (level,) = [a for a in Alerts()(to_record(record)) if a.layer == FIRST and a.code in LEVELS]
            assert f" on rank {_holder(kind, world, extreme_head)}" in level.message
            _ranks(record["layers"])
            _close(record["layers"], wanted)


def test_the_extreme_head_is_found_where_it_lives() -> None:
    for head in (0, 3):
        tops = _whole(head)[FIRST]["max_logit"]
        assert max(tops) == tops[head] > 5 * sorted(tops)[-2]


@pytest.mark.parametrize(
    ("tops", "holder"),
    [
        ([3.0, 5.0, 4.0], 1),
        ([-3.0, -math.inf, -5.0], 0),
        ([0.0, -1.0, -math.inf], 0),
        ([5.0, math.inf, 7.0], 1),
        ([math.nan, 3.0, -math.inf], 0),
        ([3.0, 3.0 + 2.0**-22, 3.0], 1),  # neighbours in fp32
        ([-math.inf] * 3, None),
    ],
)
def test_the_rank_of_the_largest_logit(tops: list[float], holder: int | None) -> None:
    tags = [_tagged(torch.tensor(top, dtype=torch.float64), rank) for rank, top in enumerate(tops)]
    facts = torch.full((FACTS,), -torch.inf, dtype=torch.float64)
    facts[HOLDER] = torch.stack(tags).amax()
    assert Part(buffer=facts, facts=facts, place=Place(0, 1, 0, 1, False)).rank == holder


@pytest.mark.parametrize(("kind", "attach_first"), ranks.WRAPPED)
def test_wrapped_training_gives_the_numbers_of_one_process(kind: str, attach_first: bool) -> None:
    wanted = ranks.train_blocks("alone", 0, 1, attach_first=True)
    for found in of(2, f"{kind} {attach_first}"):
        assert [len(step["records"]) for step in found] == [1, 0, 1, 0]
        for mine, one in zip(found, wanted, strict=True):
            assert math.isclose(mine["loss"], one["loss"], rel_tol=1e-5)
            for a, b in zip(mine["records"], one["records"], strict=True):
                layers = a["layers"]
                assert set(_ranks(layers).values()) <= {0, 1}
                _ranks(b["layers"])
                for layer in (*layers.values(), *b["layers"].values()):  # rounding has time to grow
                    for name, value in layer.items():
                        if isinstance(value, list):
                            layer[name] = [round(v, 4) for v in value]
                        elif isinstance(value, float):
                            layer[name] = round(value, 4)
                _close(layers, b["layers"])
                assert a["silent"] == b["silent"]


def test_f35_what_comes_with_a_new_layout_counts_in_the_same_step() -> None:
    assert of(3, "late") == [[120.0, 400.0, 9.0]] * 3


def test_f21_layers_that_run_on_one_rank_only_or_late_are_merged() -> None:
    wanted = ranks.branches(0, 1)
    for found in of(2, "branches"):
        assert [sorted(record["layers"]) for record in found] == [
            ["parts.image", "parts.text"],
            ["parts.image", "parts.late", "parts.text"],
            ["parts.image", "parts.text"],
        ]
        for mine, one in zip(found, wanted, strict=True):
            owners = _ranks(mine["layers"])
            assert (owners["parts.image"], owners["parts.text"]) == (0, 1)
            assert owners.get("parts.late", 1) == 1  # it runs on the last rank alone
            _ranks(one["layers"])
            _close(mine["layers"], one["layers"])


def test_f63_no_way_out_waits_for_another_rank() -> None:
    assert of(2, "leaving") == ["left", "left"]


def test_f20_a_layer_that_fails_on_one_rank_stops_no_other_rank() -> None:
    for rank, (first, second, third) in enumerate(of(2, "broken_on_one_rank")):
        assert first["layers"]["other"]["max_logit"] == [21.0]
        assert first["layers"]["one"]["max_logit"] == [10.0]
        assert bool(first["layers"]["one"]["note"]) == (rank == 1)
        assert second["layers"]["one"]["max_logit"] == [11.0]
        assert second["layers"]["one"]["note"] is None
        assert third["layers"]["one"]["max_logit"] == [10.0]
        assert [layer["rank"] for layer in first["layers"].values()] == [0, 1]
        assert [layer["rank"] for layer in second["layers"].values()] == [1, 1]
        assert [layer["rank"] for layer in third["layers"].values()] == [0, 1]
        assert third["layers"]["other"]["max_logit"] == [21.0]


def test_f20_a_bound_from_freed_gains_is_refused() -> None:
    for found in of(2, "norm_alone"):
        said, before, whole = found["freed"]
        assert "summon_full_params" in said
        torch.testing.assert_close(before, whole)


@pytest.mark.parametrize("case", ["reference", "stock", "cpu", "token"])
def test_f36_a_norm_that_is_sharded_by_itself(case: str) -> None:
    for found in of(2, "norm_alone"):
        plain, one, two = found[case]
        for sharded in (one, two):
            assert sharded["note"] is None
            for a, b in zip(sharded["tensors"], plain["tensors"], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            for a, b in zip(sharded["bounds"], plain["bounds"], strict=True):
                torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-6, atol=0.0)

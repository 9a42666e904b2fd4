"""What the rules say of the committed corpus of short runs, of which the pages quote the figures."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "early_warning.py"


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(PROGRAM), run_name="early_warning")


@pytest.fixture(scope="module")
def runs(program: dict[str, Any]) -> list[Any]:
    return program["read"]()


@pytest.mark.parametrize("name", ["tune", "report"])
def test_f72_forecasts_come_true_and_healthy_layers_are_seldom_warned(
    program: dict[str, Any], runs: list[Any], name: str
) -> None:
    found = program["growth"](program["half"](runs, name))
    assert found["forecasts_due"] >= 25
    assert 0.85 <= found["came_true"] / found["forecasts_due"] <= 0.95
    assert found["healthy_layers"] >= 120
    assert found["healthy_layers_warned_in_vain"] <= 0.02 * found["healthy_layers"]


def test_alarms_come_in_bad_runs_and_in_no_other(program: dict[str, Any], runs: list[Any]) -> None:
    found = program["measure"](program["half"](runs, "report"), program["monitor"])
    assert (found["flagged"], found["bad"]) == (13, 16)
    assert (found["false_alarms"], found["healthy"]) == (0, 30)

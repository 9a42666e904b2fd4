"""The Triton kernels compiled ahead of time for sm_80, sm_90 and sm_100: no spill, no growth.

A smaller set than benchmarks/triton_budgets.py compiles, chosen so that every kernel, width and
architecture occurs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton backend needs the package triton")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/triton_budgets.py"
BUDGETS = json.loads((ROOT / "benchmarks/triton_budgets.json").read_text())
CONFIGURATIONS = {key: figure for key, figure in BUDGETS.items() if key != "triton"}
ALWAYS = [
    "sm_90 forward norm, statistics",
    "sm_90 dq",
    "sm_90 dkdv",
    "sm_100 forward all",
    "sm_80 dkdv all",
]


def test_no_committed_budget_spills() -> None:
    for key, figure in CONFIGURATIONS.items():
        assert figure["spill_instructions"] == figure["stack_bytes"] == figure["spill_bytes"] == 0, key
        assert figure["registers"] <= 255, key


def test_products_of_half_precision_run_on_tensor_cores() -> None:
    others = ("prep", "decode merge", "delta and sink")  # these multiply no matrices
    products = [k for k in CONFIGURATIONS if "bf16" in k and not any(name in k for name in others)]
    assert len(products) > 100
    assert all(CONFIGURATIONS[key]["tensor_core"] > 0 for key in products)


def test_the_entropy_adds_no_spill_and_the_same_products() -> None:
    pairs = [
        (k, k.replace("norm ", "norm, statistics ")) for k in CONFIGURATIONS if "forward norm D" in k
    ]
    assert len(pairs) == 18
    for without, with_statistics in pairs:
        a, b = CONFIGURATIONS[without], CONFIGURATIONS[with_statistics]
        assert a["tensor_core"] == b["tensor_core"]
        assert a["shared_bytes"] == b["shared_bytes"]


@pytest.mark.parametrize("only", ALWAYS)
def test_what_is_compiled_now_keeps_to_the_budget(only: str) -> None:
    target = only.split()[0].removeprefix("sm_")
    command = [sys.executable, str(SCRIPT), "--target", target, "--only", only, "--json"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) >= 4

"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_shows_layer_operator_and_monitor():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["layer", "operator", "monitor"])
def test_a_block_of_the_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {})

"""What the tests of the trainer share: commands, logs without clocks, runs compared to the bit."""

import json
import os
import signal
import sys
from dataclasses import replace

import torch

from qknorm.lab import checkpoint
from qknorm.lab.arms import get_arm
from qknorm.lab.files import CHECKPOINT_FILE

CLOCKS = ("step_ms", "tokens_per_s")
# The same numbers in a child process need the same number of threads.
CHILD_ENV = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "COLUMNS": "200"}
QKNORM = (sys.executable, "-c", "from qknorm.cli import main; main()")


def arm(config, name, **options):
    chosen = get_arm(name)
    return replace(
        config, arm=name, model=chosen.apply(config.model), gain_decay=chosen.gain_decay, **options
    )


def strict_lines(folder, *kinds):
    """Lines of some kinds, or all, as a strict reader sees them: NaN and Infinity are no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    return [line for line in found if not kinds or line["kind"] in kinds]


def final(folder):
    """The line that says how the run came out."""
    (line,) = strict_lines(folder, "final")
    return line


def without_clocks(folder):
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in strict_lines(folder)]


def at_step(number, action):
    """An `on_item` that acts when a step has been logged."""

    def on_item(item):
        if isinstance(item, dict) and item["kind"] == "step" and item["step"] == number:
            action()

    return on_item


def stop(number=signal.SIGTERM):
    return lambda: signal.raise_signal(number)


def assert_same_bits(a, b, path="checkpoint"):
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same_bits(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def assert_same_run(folder, whole):
    assert without_clocks(folder) == without_clocks(whole)
    states = [checkpoint.load(f / CHECKPOINT_FILE) for f in (folder, whole)]
    for part in ("model", "optimizers", "losses", "step"):
        assert_same_bits(states[0][part], states[1][part], part)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(error):
    sentence = str(getattr(error, "value", error)).strip()
    assert sentence
    assert "\n" not in sentence
    return sentence


def train_command(folder, text, *more):
    options = {
        "data": text, "layers": 2, "dim": 64, "heads": 2, "context": 64, "batch": 16, "steps": 60,
        "warmup": 10, "lr": 0.01, "stats-every": 7,
    }  # fmt: skip
    flat = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*QKNORM, "train", str(folder), *flat, *more]

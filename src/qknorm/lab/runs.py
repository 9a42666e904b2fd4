"""Runs as they lie on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qknorm.lab.files import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE
from qknorm.lab.log import read


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder.

    Attributes:
        name: of the folder.
        title: arm, rate and seed; with the folder where that is not enough.
        config, environment: as saved.
        steps: records of every step.
        final: the last record, None for a run that has not ended.
    """

    name: str
    title: str
    config: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    final: dict[str, Any] | None

    @property
    def watched(self) -> list[dict[str, Any]]:
        """The records that hold attention statistics."""
        return [record for record in self.steps if "layers" in record]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among the given ones, or directly inside them.

    Raises ValueError for a folder that is neither a run nor holds one.
    """
    found: list[Path] = []
    for folder in folders:
        if (folder / METRICS_FILE).is_file():
            inside = [folder]
        else:
            inside = sorted(log.parent for log in folder.glob(f"*/{METRICS_FILE}"))
        if not inside:
            raise ValueError(f"{folder} is no run and holds none: it has no {METRICS_FILE}")
        found += inside
    return found


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders. Raises ValueError for one that is not whole."""
    runs = [_load(folder) for folder in folders]
    titles = [run.title for run in runs]
    return [
        replace(run, title=f"{run.title} ({folder})") if titles.count(run.title) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def _load(folder: Path) -> Run:
    records = read(folder / METRICS_FILE)
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        raise ValueError(f"{folder} holds no step yet: nothing to report")
    final = [record for record in records if record["kind"] == "final"]
    config = _read_json(folder / CONFIG_FILE)
    return Run(
        name=folder.name,
        title=f"{config['arm']}, lr {config['lr']:g}, seed {config['seed']}",
        config=config,
        environment=_read_json(folder / ENVIRONMENT_FILE),
        steps=steps,
        final=final[-1] if final else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: is this the folder of a run?") from error
    return value

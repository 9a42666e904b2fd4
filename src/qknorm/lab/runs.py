"""Runs as they lie on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qknorm.lab.files import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE
from qknorm.lab.timeline import Timeline, log_file
from qknorm.monitor.alerts import ORDER, Alert
from qknorm.monitor.record import Record
from qknorm.monitor.to.jsonl import RANK_FILES

MOST_ALERTS = 40  # of a run, in a report


@dataclass(kw_only=True)
class Run(Timeline):
    """One run folder: what it logged, and how it was set up.

    Attributes:
        name: of the folder.
        title: arm, rate and seed; with the folder where that is not enough, and the folder alone for a
            run that is not of the lab.
        config, environment: as saved; empty for a run that is not of the lab.
    """

    name: str
    title: str
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def has_alarm(self) -> bool:
        """Whether there was an alarm."""
        return any(alert.severity == "alarm" for alert in self.findings)

    @property
    def alert_counts(self) -> str:
        """How many of each severity, in words."""
        counts = [(name, sum(a.severity == name for a in self.findings)) for name in reversed(ORDER)]
        return ", ".join(f"{n} {name}{'s' * (n > 1 and name != 'info')}" for name, n in counts if n)

    @property
    def worst_alerts(self) -> list[Alert]:
        """At most MOST_ALERTS: the most severe, then the first."""
        return sorted(self.findings, key=lambda a: (-ORDER.index(a.severity), a.step))[:MOST_ALERTS]

    @property
    def advice(self) -> dict[str, str]:
        """What to do about the alerts of `worst_alerts`, by their code."""
        return {alert.code: alert.advice for alert in self.worst_alerts}

    @property
    def end(self) -> Record | None:
        """Attention on held-out text at the end, or else the newest record."""
        if self.final is not None and self.evaluation is not None:
            return self.evaluation
        return self.records[-1] if self.records else None


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs among the given folders and logs, or directly inside the folders.

    Raises ValueError for a folder that is neither a run nor holds one.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"no such file or folder: {folder}")
        if log_file(folder) is not None:
            inside = [folder]
        else:
            inside = sorted(path for path in folder.glob("*/") if log_file(path) is not None)
        if not inside:
            raise ValueError(
                f"{folder} is no run and holds none: it has no {METRICS_FILE}, no {RANK_FILES} and no "
                "log of another tool that can be read"
            )
        found += inside
    return found


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders. Raises ValueError for one that holds no step, or no settings."""
    runs = [_load(folder) for folder in folders]
    titles = [run.title for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if titles.count(run.title) > 1:
            run.title = f"{run.title} ({folder})"
    return runs


def _load(folder: Path) -> Run:
    path = log_file(folder)
    if path is None:
        raise ValueError(f"no log in {folder}: is this the folder of a run?")
    name = folder.resolve().name
    run = Run(name=name, title=name, config={}, environment={})
    run.read(path)
    if run.step < 0:
        raise ValueError(f"{folder} holds no step yet: nothing to report")
    if path.name == METRICS_FILE:
        settings = (path.with_name(name) for name in (CONFIG_FILE, ENVIRONMENT_FILE))
        run.config, run.environment = map(_read_json, settings)
        run.title = f"{run.config['arm']}, lr {run.config['lr']:g}, seed {run.config['seed']}"
    return run


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: is this the folder of a run?") from error
    return value

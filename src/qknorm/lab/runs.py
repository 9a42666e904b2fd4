"""Find runs on disk and read them."""

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

MOST_ALERTS = 40  # that a report lists of one run


@dataclass(kw_only=True)
class Run(Timeline):
    """A run that was read from its folder: its log and its settings.

    Attributes:
        name: the name of the folder.
        title: arm, learning rate and seed of a run of the lab, followed by the folder if several runs
            share them. For a run of another trainer it is the name of the folder.
        config: the configuration of a run of the lab, empty otherwise.
        environment: the environment of a run of the lab, see `environment.describe`, empty otherwise.
    """

    name: str
    title: str
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def has_alarm(self) -> bool:
        """Whether an alert of the run is an alarm."""
        return any(alert.severity == "alarm" for alert in self.findings)

    @property
    def alert_counts(self) -> str:
        """The number of alerts of each severity, such as "1 alarm, 2 warnings"."""
        counts = [(name, sum(a.severity == name for a in self.findings)) for name in reversed(ORDER)]
        return ", ".join(f"{n} {name}{'s' * (n > 1 and name != 'info')}" for name, n in counts if n)

    @property
    def worst_alerts(self) -> list[Alert]:
        """The most severe alerts, at most MOST_ALERTS, by severity and then by step."""
        return sorted(self.findings, key=lambda a: (-ORDER.index(a.severity), a.step))[:MOST_ALERTS]

    @property
    def advice(self) -> dict[str, str]:
        """The advice for the alerts in `worst_alerts`, by code."""
        return {alert.code: alert.advice for alert in self.worst_alerts}

    @property
    def end(self) -> Record | None:
        """The record of the final evaluation, or else the newest record; None without records."""
        if self.final is not None and self.evaluation is not None:
            return self.evaluation
        return self.records[-1] if self.records else None


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Find runs among the given folders and logs, or directly inside the folders.

    Args:
        folders: folders of runs, or folders that directly hold folders of runs.

    Returns:
        The folders of runs.

    Raises:
        ValueError: a folder does not exist, or neither is the folder of a run nor holds one.
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
                f"{folder} is not the folder of a run and holds none: it has no {METRICS_FILE}, no "
                f"{RANK_FILES} and no log of another tool that can be read"
            )
        found += inside
    return found


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders.

    Args:
        folders: the folders.

    Returns:
        The runs, with titles that differ.

    Raises:
        ValueError: a folder has no log, its log has no step yet, or its settings cannot be read.
    """
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
        raise ValueError(f"{folder} has logged no step yet, so there is nothing to report")
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

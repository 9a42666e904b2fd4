"""Write a report of runs: an offline HTML page with conclusions, plots and configurations."""

from __future__ import annotations

import base64
import json
import math
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qknorm.lab import watched
from qknorm.lab.compare import sensitivities
from qknorm.lab.figures import figures
from qknorm.lab.files import replace_file
from qknorm.lab.page import render
from qknorm.lab.runs import Run
from qknorm.lab.verdict import VERDICT_RULES


def words(summary: Sequence[dict[str, Any]]) -> list[str]:
    """Describe the results of runs in sentences.

    At each learning rate, every arm is compared with the arm "none", or with the first arm if "none" is
    missing, over the seeds that both have.

    Args:
        summary: the last line of the log of each run, see `compare`.

    Returns:
        The sentences.
    """
    keys = [(r["arm"], r["lr"], r["seed"]) for r in summary]
    ended = {k: r for k, r in zip(keys, summary, strict=True) if _is_whole(r)}
    sentences = []
    if len(set(keys)) < len(keys):
        # Some configurations differ in more than the arm, so nothing is compared.
        return [_alone(r) for r in summary]
    for lr in dict.fromkeys(r["lr"] for r in summary):
        arms = dict.fromkeys(r["arm"] for r in summary if r["lr"] == lr)
        base = "none" if "none" in arms else next(iter(arms))
        for arm in arms:
            seeds = [s for a, rate, s in ended if (a, rate) == (arm, lr) and (base, lr, s) in ended]
            if arm != base and seeds:
                pair = [[ended[name, lr, s] for s in seeds] for name in (base, arm)]
                sentences.append(_against(lr, base, arm, *pair))
    for r in summary:
        if r["verdict"] != "finished":
            who = f"{r['arm']} at {r['lr']:g} (seed {r['seed']})"
            sentences.append(f"{who} {r['verdict']}: {r['reason']}.")
    for arm, value in sensitivities(list(summary)).items():
        sentences.append(
            f"LR sensitivity of {arm}: {value:.3f} nats (Wortsman et al. 2023, seven rates)."
        )
    if not sentences:
        sentences = [_alone(r) for r in summary]
    return sentences or ["No run has ended yet."]


def _is_whole(r: dict[str, Any]) -> bool:
    """Whether the three results of a run are finite."""
    return None not in (r["final_loss"], r["max_logit"], r["entropy_nats"])


def _alone(r: dict[str, Any]) -> str:
    """Return a sentence about one run."""
    who = f"{r['arm']} at {r['lr']:g} (seed {r['seed']}) ended"
    if r["final_loss"] is None:
        return f"{who} without a finite loss."
    if not _is_whole(r):
        return (
            f"{who} with a held-out loss of {r['final_loss']:.3f}, and its attention was not measured."
        )
    return (
        f"{who} with a held-out loss of {r['final_loss']:.3f}, a largest logit of "
        f"{r['max_logit']:,.1f} and a lowest layer entropy of {r['entropy_nats']:.3f} nats."
    )


def _against(
    lr: float, base: str, arm: str, base_runs: list[dict[str, Any]], arm_runs: list[dict[str, Any]]
) -> str:
    """Return sentences that compare two arms at one learning rate, with means over seeds."""

    def mean(runs: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(r[key] for r in runs)

    logit, base_logit = mean(arm_runs, "max_logit"), mean(base_runs, "max_logit")
    loss, base_loss = mean(arm_runs, "final_loss"), mean(base_runs, "final_loss")
    ratio = base_logit / logit if logit > 0 else float("nan")
    gap = base_loss - loss
    seeds = "" if len(arm_runs) == 1 else f" (means of {len(arm_runs)} seeds)"
    if abs(gap) < 0.005:
        outcome = f"with the held-out loss of {base}, {loss:.3f} nats{seeds}"
    else:
        direction = "below" if gap > 0 else "above"
        outcome = (
            f"{abs(gap):.3f} nats {direction} {base} in held-out loss, "
            f"{loss:.3f} against {base_loss:.3f}{seeds}"
        )
    if 1 / 1.5 < ratio < 1.5:
        size = "of the same order"
    else:
        factor = max(ratio, 1 / ratio)
        size = f"{factor:,.{int(factor < 10)}f} times {'smaller' if ratio > 1 else 'larger'}"
    return (
        f"At a peak rate of {lr:g}, {arm} ended {outcome}. "
        f"Its largest logit is {size} ({logit:,.1f} against {base_logit:,.1f}), and the entropy of its "
        f"sharpest layer is {mean(arm_runs, 'entropy_nats'):.3f} nats against "
        f"{mean(base_runs, 'entropy_nats'):.3f}."
    )


def missing_extra() -> str | None:
    """Return a sentence that says what to install before a report can be written; None if nothing."""
    try:
        import jinja2  # noqa: F401
        import plotly.offline  # noqa: F401
    except ImportError:
        return "the report needs an extra: pip install 'qknorm[report]'"
    return None


def write_report(runs: Sequence[Run], path: Path) -> Path:
    """Write the report.

    Args:
        runs: the runs.
        path: the file to write.

    Returns:
        The file.

    Raises:
        ValueError: there are no runs, or the `report` extra is not installed.
    """
    if not runs:
        raise ValueError("there are no runs to report")
    if missing := missing_extra():
        raise ValueError(missing)
    from plotly.offline import get_plotlyjs

    summary = [run.final for run in runs if run.final is not None]
    page = render(
        "qknorm.lab",
        "report.html",
        # Compression reduces plotly from 4.8 MB to 1.9 MB. The browser decompresses it.
        plotly=base64.b64encode(zlib.compress(get_plotlyjs().encode(), 9)).decode(),
        sentences=_sentences(runs, summary) + _alarms(runs),
        runs=runs,
        curves=figures(runs),
        shared=_shared([_flat(run.config) for run in runs]),
        differing=[_differing(run, runs) for run in runs],
        layers=_layers,
        environment=runs[0].environment,
        verdict_rules=VERDICT_RULES,
    )
    replace_file(path, lambda file: file.write(page.encode()))
    return path


def _sentences(runs: Sequence[Run], summary: Sequence[dict[str, Any]]) -> list[str]:
    """Describe the runs of the lab, and those of other trainers that the monitor watched."""
    others = watched.sentences([run for run in runs if not run.config])
    return others if others and not summary else words(summary) + others


def _alarms(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for the first alarm of each run."""
    sentences = []
    for run in runs:
        # Of a run of the lab that diverged another sentence tells.
        alerts = run.findings if run.final is None else run.alerts
        alarm = next((alert for alert in alerts if alert.severity == "alarm"), None)
        if alarm is not None:
            sentences.append(f"{run.title}: alarm {alarm.code} at step {alarm.step}: {alarm.message}.")
    return sentences


def _layers(run: Run) -> list[list[str]]:
    """Return a row of a table for each layer, with its numbers in the newest record."""
    assert run.end is not None
    return [
        [
            name,
            _cell([layer.top]),
            _cell([] if layer.bound is None else [layer.bound]),
            " and ".join(_cell([gain]) for gain in layer.gain_max or ()) or "-",
            _cell(layer.seen("entropy_nats")),
            _cell(layer.seen("entropy_ratio")),
            _cell(layer.sink_mass and layer.seen("sink_mass")),
            _cell(layer.first_mass and layer.seen("first_mass")),
            _cell(layer.q_rms),
            _cell(layer.k_rms),
        ]
        for name, layer in run.end.layers.items()
    ]


def _cell(values: Sequence[float] | None) -> str:
    """Return the mean with four digits; a dash if there are no values or it is not finite."""
    mean = statistics.fmean(values) if values else math.nan
    return f"{mean:.4g}" if math.isfinite(mean) else "-"


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as a flat one with dotted names and values in JSON."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value)
    return flat


def _shared(configs: list[dict[str, str]]) -> dict[str, str]:
    """Return the settings that are equal in all configurations."""
    first = configs[0]
    return {k: v for k, v in first.items() if all(c.get(k) == v for c in configs)}


def _differing(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """Return the settings of a run that are not equal in all runs."""
    shared = _shared([_flat(other.config) for other in runs])
    return {k: v for k, v in _flat(run.config).items() if k not in shared}

"""Does the monitor warn before a run goes bad? Measured over a corpus of short runs.

    python benchmarks/early_warning.py [--json] [--half tune|report] [--runs]

A run is bad if it diverged, or ended 0.1 nats or more above its twin: the run with QK-norm at the same
rate, schedule and seed. It is flagged if an alarm comes before 30 % of the run (constant, cosine), or
before the run falls 0.1 behind its twin (ramp; the lead is the distance between the two). A false
alarm is an alarm in a run that is not bad.

The rules were fixed on the first half of the twins (the first seed and a part of the second), "tune";
the figures are those of the second half, "report".
Of growth (QM002, and what `qknorm watch` shows) it is counted how many forecasts came true. A forecast
is made for each layer and record that allows one, and falls due within the run; it came true if the
first record at the level lies inside its interval. A layer of a healthy run counts as warned in vain if
a QM002 of it did not come true. Both halves are shown: the constants of the forecast were chosen on
"tune", but for its horizon, which was decided on "report"; docs/monitor.md says how.

Beside the monitor stand two detectors of the kind in use today, on the loss and on the gradient norm:
a value far above its running median. Their thresholds are chosen on the same half, so that they flag
the most there with at most 2 % of false alarms.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from qknorm.monitor.alerts import Alerts
from qknorm.monitor.forecast import POINTS, forecast
from qknorm.monitor.record import LayerRecord, Record
from qknorm.monitor.rules import Thresholds

CORPUS = Path(__file__).with_name("corpus") / "early_warning.jsonl.xz"
BEHIND = 0.1  # nats
SMOOTH = 20  # steps over which losses are averaged before they are compared
DEADLINE = 0.3  # of the run
WINDOW = 50  # steps of the running median
MOST_FALSE = 0.02
LEVEL = Thresholds().level_warning

Run = dict[str, Any]
Detector = Callable[[Run], float]  # the step of the first alarm, inf for none


@dataclass(frozen=True)
class Judged:
    """A run and what became of it."""

    run: Run
    bad: bool
    deadline: float  # the last step at which an alarm is in time
    behind: float  # the step at which it falls behind its twin


def read(path: Path = CORPUS) -> list[Run]:
    """All runs of the corpus."""
    if not path.exists():
        raise SystemExit(f"no corpus at {path}: make it with benchmarks/early_warning_corpus.py")
    with lzma.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def twins(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Pairs (with the norm, without), seed by seed, in the order in which they were made."""
    order = ("cosine", "constant", "ramp")
    by_key: dict[tuple[Any, ...], dict[str, Run]] = {}
    for run in runs:
        key = (run["seed"], order.index(run["schedule"]), run["lr"])
        by_key.setdefault(key, {})[run["arm"]] = run
    return [
        (pair["qk"], pair["none"]) for _, pair in sorted(by_key.items()) if pair.keys() == {"none", "qk"}
    ]


def half(runs: list[Run], name: str) -> list[Judged]:
    """The first half of the twins, on which rules may be fixed, or the second, to judge them by."""
    pairs = twins(runs)
    chosen = pairs[: len(pairs) // 2] if name == "tune" else pairs[len(pairs) // 2 :]
    return [judged for qk, none in chosen for judged in (judge(qk, qk), judge(none, qk))]


def judge(run: Run, twin: Run) -> Judged:
    """By its twin with the norm, which may be the run itself."""
    behind = falls_behind(run["loss"], twin["loss"])
    bad = run["diverged"] or not run["final_loss"] < twin["final_loss"] + BEHIND
    in_time = behind if run["schedule"] == "ramp" else DEADLINE * run["steps"]
    return Judged(run, bad, in_time, behind)


def falls_behind(loss: list[float | None], twin: list[float | None]) -> float:
    """The first step after which the smoothed loss stays BEHIND above that of the twin; inf if none."""
    apart = [
        math.inf if a is None else -math.inf if b is None else a - b
        for a, b in zip(loss, twin, strict=False)
    ]
    last = math.inf
    for step in range(len(apart), SMOOTH - 1, -1):
        if fmean(apart[step - SMOOTH : step]) < BEHIND:
            break
        last = step
    return last


def monitor(run: Run) -> float:
    """The first alarm of the monitor's rules."""
    alerts = Alerts()
    for seen in run["watched"]:
        for alert in alerts(to_record(seen)):
            if alert.severity == "alarm":
                return alert.step
    return math.inf


def to_record(seen: dict[str, Any]) -> Record:
    """What the monitor would have recorded."""
    layers = {}
    for i, tops in enumerate(seen["max_logit"]):
        bound = None if seen["bound"] is None else seen["bound"][i]
        number = [math.nan if v is None else v for v in tops]
        layers[f"layer{i}"] = LayerRecord(
            max_logit=number,
            entropy_nats=[math.nan if v is None else v for v in seen["entropy_nats"][i]],
            entropy_ratio=[math.nan if v is None else v for v in seen["entropy_ratio"][i]],
            sink_mass=None,
            first_mass=None,
            q_rms=[],
            q_rms_cv=[],
            k_rms=[],
            k_rms_cv=[],
            gain_max=None,
            bound=None if bound is None else max(bound),
            coverage="exact",
            rms_of="projection",
            rows=1,
        )
    return Record(step=seen["step"], phase="train", layers=layers)


def growth(judged: list[Judged]) -> dict[str, Any]:
    """How many forecasts came true, and how many healthy runs and layers were warned in vain."""
    due, true, warnings, layers, runs = 0, 0, 0, 0, 0
    for one in judged:
        alerts, failed = Alerts(last_step=one.run["steps"]), set()
        records = [to_record(seen) for seen in one.run["watched"]]
        for i, record in enumerate(records, start=1):
            warned = {alert.layer for alert in alerts(record) if alert.code == "QM002"}
            for name, layer in record.layers.items():
                found = forecast(
                    [r.step for r in records[max(0, i - POINTS) : i]],
                    [r.layers[name].top for r in records[max(0, i - POINTS) : i]],
                    LEVEL,
                    bound=layer.bound,
                    last_step=one.run["steps"],
                )
                if found is None:
                    continue
                reached = next((r.step for r in records[i:] if not r.layers[name].top < LEVEL), math.inf)
                came_true = found.early <= reached <= found.late
                due += 1
                true += came_true
                warnings += name in warned
                if name in warned and not came_true and not one.bad:
                    failed.add(name)
        layers += len(failed)
        runs += bool(failed)
    healthy = [one for one in judged if not one.bad]
    return {
        "forecasts_due": due,
        "came_true": true,
        "warnings": warnings,
        "healthy_runs": len(healthy),
        "healthy_runs_warned_in_vain": runs,
        "healthy_layers": sum(len(one.run["watched"][0]["max_logit"]) for one in healthy),
        "healthy_layers_warned_in_vain": layers,
    }


def above_median(name: str, factor: float, *, relative: bool) -> Detector:
    """The first step whose value is `factor` above (or times) the median of the steps before."""

    def detect(run: Run) -> float:
        past: list[float] = []
        for step, value in enumerate(run[name], start=1):
            if value is None:
                return step
            if len(past) >= WINDOW:
                middle = median(past[-WINDOW:])
                if value > (middle * factor if relative else middle + factor):
                    return step
            past.append(value)
        return math.inf

    return detect


def tuned(judged: list[Judged], name: str, factors: list[float], *, relative: bool) -> Detector:
    """The detector that flags the most with at most MOST_FALSE false alarms; of equals the strictest."""
    best, most = above_median(name, math.inf, relative=relative), -1
    for factor in sorted(factors, reverse=True):
        detector = above_median(name, factor, relative=relative)
        found = measure(judged, detector)
        if found["false_alarms"] <= MOST_FALSE * found["healthy"] and found["flagged"] > most:
            best, most = detector, found["flagged"]
    return best


def measure(judged: list[Judged], detector: Detector) -> dict[str, Any]:
    """Counts, and median leads as a share of the run: over bad runs with a ramp that were flagged, and
    over all that were."""
    flagged, false, leads, ramps = 0, 0, [], []
    for one in judged:
        step = detector(one.run)
        if one.bad:
            flagged += step < one.deadline
            if step < one.deadline and math.isfinite(one.behind):
                leads.append((one.behind - step) / one.run["steps"])
                if one.run["schedule"] == "ramp":
                    ramps.append(leads[-1])
        else:
            false += math.isfinite(step)
    return {
        "bad": sum(one.bad for one in judged),
        "flagged": flagged,
        "median_lead": median(ramps) if ramps else None,
        "median_lead_of_all": median(leads) if leads else None,
        "healthy": sum(not one.bad for one in judged),
        "false_alarms": false,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--half", choices=("tune", "report"), default="report")
    parser.add_argument("--runs", action="store_true", help="also a line for each run")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    args = parser.parse_args()
    runs = read(args.corpus)
    tune, judged = half(runs, "tune"), half(runs, args.half)
    losses = tuned(tune, "loss", [0.05 * i for i in range(1, 41)], relative=False)
    norms = tuned(tune, "grad_norm", [1.25**i for i in range(1, 31)], relative=True)
    result = {"runs": len(judged)} | measure(judged, monitor)
    result |= {"loss_only": measure(judged, losses), "grad_norm_only": measure(judged, norms)}
    result["growth"] = {name: growth(half(runs, name)) for name in ("tune", "report")}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    if args.runs:
        for one in judged:
            r = one.run
            print(
                f"{r['schedule']:8} {r['lr']:<6g} {r['seed']} {r['arm']:4} loss {r['final_loss']} "
                f"{'BAD' if one.bad else '   '} behind at {one.behind:<5} alarm at {monitor(r)}"
            )
    for name in ("monitor", "loss_only", "grad_norm_only"):
        found = result if name == "monitor" else result[name]
        lead = found["median_lead"]
        print(
            f"{name:15} flagged {found['flagged']} of {found['bad']} bad runs, "
            f"{found['false_alarms']} false alarms in {found['healthy']}, "
            f"median lead in ramps {'-' if lead is None else f'{100 * lead:.0f} %'} of the run"
        )
    for name, found in result["growth"].items():
        share = found["came_true"] / found["forecasts_due"] if found["forecasts_due"] else math.nan
        print(
            f"growth, {name:6}  {found['forecasts_due']} forecasts fell due, "
            f"{100 * share:.0f} % came true; {found['warnings']} warnings; in vain they were in "
            f"{found['healthy_runs_warned_in_vain']} of {found['healthy_runs']} healthy runs, "
            f"{found['healthy_layers_warned_in_vain']} of {found['healthy_layers']} healthy layers"
        )


if __name__ == "__main__":
    main()

"""`qknorm watch`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qknorm.cli import options as o
from qknorm.cli.console import number, out, print_json
from qknorm.lab.files import CONFIG_FILE
from qknorm.lab.finished_logs import is_finished_log
from qknorm.lab.follow import Follower
from qknorm.lab.heatmaps import short_names
from qknorm.lab.timeline import Timeline, log_file
from qknorm.monitor.forecast import POINTS, forecast
from qknorm.monitor.record import LayerRecord, Record, lowest
from qknorm.monitor.rules import Thresholds
from qknorm.monitor.scalars import worst_heads

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # of a sparkline
AROUND = 14  # lines of the view that are not layers
STYLES = {"info": "", "warning": "yellow", "alarm": "bold red"}


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or its log.")],
    interval: Annotated[float, typer.Option(help="Seconds between looks at the log.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the present state and end.")] = False,
    fail_on: o.FailOn = None,
    as_json: o.AsJson = False,
) -> int:
    """Follow a run that is being trained, here or on another machine that writes to this file system.

    Max logit and entropy of every layer, the sharpest heads, when the level of 50 will be reached, and
    alerts. Ends with Ctrl-C, or when the run does. A finished log of another tool is read once: a
    trainer_state.json, a CSV, or event files of TensorBoard.

    Exit code 0; with --fail-on 1 if the run has such an alert; 2 for bad input.
    """
    if not run.exists():
        raise ValueError(f"no such file or folder: {run}")
    path = log_file(run)
    if path is None:
        raise ValueError(f"no log in {run}: is this the folder of a run that has begun?")
    if interval <= 0:
        raise ValueError(f"interval must be positive; got {interval:g}")
    fails = o.failing(fail_on)
    follower, timeline = Follower(path), Timeline()
    if is_finished_log(path):
        timeline.read(path)
        once = True
    else:
        _catch_up(follower, timeline)
    if as_json:
        print_json(summary(timeline))
        return fails(timeline.findings)
    if once or not out.is_terminal:
        out.print(view(timeline, path, out.height if out.is_terminal else None))
        return fails(timeline.findings)
    try:
        with Live(
            view(timeline, path, out.height), console=out, screen=True, auto_refresh=False
        ) as live:
            while not timeline.has_ended:
                time.sleep(interval)
                timeline = _catch_up(follower, timeline)
                live.update(view(timeline, path, out.height), refresh=True)
    except KeyboardInterrupt:
        pass
    out.print(view(timeline, path, None))
    return fails(timeline.findings)


def _catch_up(follower: Follower, timeline: Timeline) -> Timeline:
    lines = follower.poll()
    if follower.restarted:
        timeline = Timeline()
    for line in lines:
        timeline.feed(line)
    return timeline


def summary(timeline: Timeline) -> dict[str, Any]:
    """The newest numbers, for scripts."""
    record = timeline.records[-1] if timeline.records else None
    heads = [] if record is None else worst_heads(record)
    return {
        "step": timeline.step,
        "loss": timeline.loss,
        "max_logit": None if record is None else record.max_logit,
        "entropy_nats": None if record is None else record.entropy_nats,
        "worst_heads": [vars(head) for head in heads],
        "alerts": [alert.to_json() for alert in timeline.findings],
        "ended": timeline.has_ended,
    }


def view(timeline: Timeline, path: Path, height: int | None) -> RenderableType:
    """The whole picture, at most `height` lines of the terminal."""
    parts: list[RenderableType] = [_headline(timeline, path)]
    if not timeline.records:
        nothing = "no attention was recorded" if timeline.has_ended else "no attention record yet"
        return Group(*parts, Text(nothing, style="dim"), *_alerts(timeline))
    room = None if height is None else max(3, height - AROUND)
    last_step = timeline.step if timeline.has_ended else _planned(path)
    parts.append(_layers(timeline.records, room, last_step))
    if any(layer.rows for layer in timeline.records[-1].layers.values()):
        parts.append(_heads(timeline.records[-1]))
    parts += _alerts(timeline)
    return Group(*parts)


def _planned(path: Path) -> int | None:
    """How many steps the run was to make, which the lab writes beside its log; None if nothing tells."""
    try:
        steps = json.loads(path.with_name(CONFIG_FILE).read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def _headline(timeline: Timeline, path: Path) -> Text:
    text = Text.assemble((str(path.parent), "bold"), f"  step {timeline.step}")
    if timeline.loss is not None:
        text.append(f"  loss {number(timeline.loss)}")
    if timeline.records:
        record = timeline.records[-1]
        text.append(f"  max logit {number(record.max_logit, 1)}")
        if any(layer.rows for layer in record.layers.values()):
            text.append(f"  lowest layer entropy {number(record.entropy_nats)} nats")
    if timeline.has_ended:
        verdict = "finished" if timeline.final is None else timeline.final["verdict"]
        text.append(f"  {verdict}", style="bold")
    return text


def _layers(records: Sequence[Record], room: int | None, last_step: int | None) -> Table:
    """A line per layer; where there is no room for all, those with the largest logits."""
    names = list(dict.fromkeys(name for record in records for name in record.layers))
    short = dict(zip(names, short_names(names), strict=True))
    newest = {
        name: next(r.layers[name] for r in reversed(records) if name in r.layers) for name in names
    }
    shown = names
    if room is not None and len(names) > room:
        ranked = sorted(names, key=lambda n: -_order(newest[n].top))
        shown = [name for name in names if name in ranked[:room]]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("layer", "max logit (log)", "", "entropy ratio", "", "forecast"):
        wraps, least = title in ("layer", "forecast"), 8 if title == "forecast" else 5
        table.add_column(title, no_wrap=not wraps, overflow="fold", min_width=least)
    bottom = min((_log(r.max_logit) for r in records if math.isfinite(r.max_logit)), default=0.0)
    top = max((_log(r.max_logit) for r in records if math.isfinite(r.max_logit)), default=1.0)
    for name in shown:
        past = [(r.step, r.layers[name]) for r in records if name in r.layers]
        tops = [layer.top for _, layer in past]
        ratios = [lowest(layer.seen("entropy_ratio")) for _, layer in past]
        table.add_row(
            short[name],
            Text(spark([_log(v) for v in tops], bottom, top), style=_level_style(tops[-1])),
            Text(number(tops[-1], 1), style=_level_style(tops[-1]), justify="right"),
            Text(spark(ratios, 0.0, 1.0, extreme=min), style=_entropy_style(ratios[-1])),
            # A log of another tool does not tell it.
            Text(number(ratios[-1] if newest[name].rows else None), style=_entropy_style(ratios[-1])),
            _forecast(past, last_step),
        )
    if len(shown) < len(names):
        table.add_row(Text(f"and {len(names) - len(shown)} more", style="dim"))
    return table


def spark(
    values: Sequence[float],
    low: float,
    high: float,
    extreme: Callable[[list[float]], float] = max,
) -> str:
    """The values as bars, several to a bar where there are many: then their extreme counts."""
    each = math.ceil(len(values) / WIDTH)
    groups = [values[i : i + each] for i in range(0, len(values), each)] if each else []
    bars = ""
    for group in groups:
        finite = [v for v in group if math.isfinite(v)]
        share = (extreme(finite) - low) / (high - low) if finite and high > low else 0.0
        bars += BARS[round(max(0.0, min(1.0, share)) * (len(BARS) - 1))] if finite else "?"
    return bars


def _forecast(past: Sequence[tuple[int, LayerRecord]], last_step: int | None) -> str:
    """When the layer's max logit will be at the level, if that can be told; the same as QM002 says."""
    steps, layers = zip(*past[-POINTS:], strict=True)
    tops = [layer.top for layer in layers]
    if not math.isfinite(tops[-1]):
        return "not finite"
    level = Thresholds().level_warning
    found = forecast(steps, tops, level, bound=layers[-1].bound, last_step=last_step)
    return "" if found is None else f"{level:g} at step {_steps(found.early)} to {_steps(found.late)}"


def _steps(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def _heads(record: Record) -> Text:
    text = Text("sharpest heads", style="dim")
    names = dict(zip(record.layers, short_names(list(record.layers)), strict=True))
    for head in worst_heads(record):
        text.append(f"  {names[head.layer]}.{head.head} ")
        text.append(number(head.max_logit, 1), style=_level_style(head.max_logit))
        text.append(f" ({number(head.entropy_ratio)})", style="dim")
    return text


def _alerts(timeline: Timeline) -> list[RenderableType]:
    """The first alarm, and the newest of the rest."""
    findings = timeline.findings
    alarms = [alert for alert in findings if alert.severity == "alarm"][:1]
    others = [a for a in findings if a.severity != "info" and a not in alarms][-4:]
    lines: list[RenderableType] = []
    for alert in alarms + others:
        lines.append(
            Text(f"step {alert.step}  {alert.code}  {alert.message}", style=STYLES[alert.severity])
        )
    if alarms:
        lines.append(Text(f"  {alarms[0].advice}"))
    return lines


def _log(value: float) -> float:
    return math.log(max(value, 1.0)) if math.isfinite(value) else math.nan


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _level_style(value: float) -> str:
    t = Thresholds()
    if not value < t.level_warning:
        return "red"
    return "yellow" if value >= t.level_info else "green"


def _entropy_style(ratio: float) -> str:
    t = Thresholds()
    return "red" if not ratio >= t.collapsed else "green"

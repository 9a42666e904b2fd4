"""Options that `train` and `compare` share: a table, and a decorator that adds them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from qknorm.lab import data
from qknorm.lab.model import ModelConfig
from qknorm.lab.trainer import TrainConfig
from qknorm.monitor.alerts import ORDER, Alert

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
FailOn = Annotated[
    str | None,
    typer.Option(help="warning or alarm: exit code 1 if there was an alert of it or above."),
]


def failing(fail_on: str | None) -> Callable[[Sequence[Alert]], int]:
    """Return what makes an exit code of alerts. Raises ValueError for a severity that is none."""
    if fail_on not in (None, "warning", "alarm"):
        raise ValueError(f"--fail-on takes warning or alarm; got {fail_on}")
    failures = [] if fail_on is None else ORDER[ORDER.index(fail_on) :]
    return lambda alerts: int(any(alert.severity in failures for alert in alerts))


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """One shared option; its default is that of the field it sets, unless given.

    Attributes:
        owner: the configuration it belongs to.
        name: of the field.
        kind: type on the command line.
        help: one line.
        flag: spelling, if not that of the field.
        default: where the command line has its own.
    """

    owner: type
    name: str
    kind: Any
    help: str
    flag: str | None = None
    default: Any = None

    def parameter(self) -> inspect.Parameter:
        """The option as a parameter that typer reads."""
        default = next(f.default for f in fields(self.owner) if f.name == self.name)
        option = typer.Option(
            self.flag or "--" + self.name.replace("_", "-"),
            help=self.help,
            rich_help_panel=self.owner.__name__.removesuffix("Config"),
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default if self.default is None else self.default,
            annotation=Annotated[self.kind, option],
        )


_M, _D, _T = ModelConfig, data.DataConfig, TrainConfig
_SHARED = [
    _Shared(owner=_M, name="layers", kind=int, help="Layers."),
    _Shared(owner=_M, name="dim", kind=int, help="Model width."),
    _Shared(owner=_M, name="heads", kind=int, help="Query heads."),
    _Shared(owner=_M, name="kv_heads", kind=int | None, help="Key heads, a divisor of --heads."),
    _Shared(owner=_M, name="head_dim", kind=int | None, help="Head width; --dim / --heads."),
    _Shared(owner=_M, name="rotary_share", kind=float, help="Share of a head that RoPE turns."),
    _Shared(owner=_M, name="window", kind=int | None, help="Keys a query sees, itself included."),
    _Shared(owner=_M, name="backend", kind=str, help="Of the operator; see `qknorm env`."),
    _Shared(owner=_M, name="vocab_size", kind=int | None, help="0: as the data implies.", default=0),
    _Shared(
        owner=_D,
        name="source",
        kind=str,
        help='"stdlib", a .txt, .jsonl or .bin file, or a folder of .txt files.',
        flag="--data",
    ),
    _Shared(owner=_D, name="tokenizer", kind=Path | None, help="A tokenizer.json; bytes without."),
    _Shared(owner=_D, name="token_dtype", kind=str, help="Of a .bin file: uint8, uint16, int32."),
    _Shared(owner=_T, name="steps", kind=int, help="Optimizer steps."),
    _Shared(owner=_T, name="batch", kind=int, help="Sequences a step."),
    _Shared(owner=_T, name="context", kind=int, help="Tokens a sequence."),
    _Shared(owner=_T, name="schedule", kind=str, help="cosine, constant or ramp, after the warm-up."),
    _Shared(owner=_T, name="warmup", kind=int, help="Steps of linear warm-up."),
    _Shared(owner=_T, name="weight_decay", kind=float, help="Independent of the rate."),
    _Shared(owner=_T, name="clip", kind=float, help="Largest gradient norm; 0 for no clipping."),
    _Shared(owner=_T, name="z_loss", kind=float, help="Weight of the squared log denominator."),
    _Shared(owner=_T, name="dtype", kind=str, help="float32, or bfloat16 for autocast."),
    _Shared(owner=_T, name="compile", kind=bool, help="Use torch.compile.", flag="--compile"),
    _Shared(owner=_T, name="stats_every", kind=int, help="Steps between attention statistics."),
    _Shared(
        owner=_T,
        name="checkpoint_every",
        kind=int,
        help="Steps between checkpoints; 0: only at the end.",
    ),
    _Shared(owner=_T, name="tensorboard", kind=bool, help="Also write its files.", flag="--tensorboard"),
]


def given(context: typer.Context) -> set[str]:
    """Return the names of the options that stand on the command line and are not left at a default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def flag(name: str) -> str:
    """Return an option as it is spelled on the command line."""
    spelled = {option.name: option.flag for option in _SHARED}
    return spelled.get(name) or "--" + name.replace("_", "-")


def with_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the shared options to a command, which receives the run that they mean as `base`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "base"]
    shared = [option.parameter() for option in _SHARED]

    @wraps(command)
    def with_options(**values: Any) -> int:
        base = _run_config({p.name: values.pop(p.name) for p in shared})
        return command(**values, base=base)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _run_config(values: dict[str, Any]) -> TrainConfig:
    """The run that the shared options describe, without its arm, rate and seed."""
    if values["tokenizer"] is not None:
        values["tokenizer"] = str(values["tokenizer"])
    values["clip"] = values["clip"] or None
    parts: dict[type, dict[str, Any]] = {owner: {} for owner in (_M, _D, _T)}
    for option in _SHARED:
        parts[option.owner][option.name] = values[option.name]
    source = data.DataConfig(**parts[_D])
    implied = data.vocabulary(source)
    if not parts[_M]["vocab_size"]:
        if implied is None:
            raise ValueError("a .bin file does not say its vocabulary: give --vocab-size")
        parts[_M]["vocab_size"] = implied
    return TrainConfig(model=ModelConfig(**parts[_M]), data=source, **parts[_T])

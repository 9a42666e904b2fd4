"""The options that `train` and `compare` share: their table, and a decorator that adds them."""

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

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete a run or comparison that the folder holds.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
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
    """A shared option, which sets a field of a configuration.

    Attributes:
        owner: the class of the configuration.
        name: the name of the field.
        kind: the type on the command line.
        help: a sentence for the help.
        flag: the spelling on the command line; None for that of the field.
        default: the default on the command line; None for that of the field.
    """

    owner: type
    name: str
    kind: Any
    help: str
    flag: str | None = None
    default: Any = None

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a function, which typer reads."""
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
    _Shared(owner=_M, name="layers", kind=int, help="Set the number of layers."),
    _Shared(owner=_M, name="dim", kind=int, help="Set the width of the model."),
    _Shared(owner=_M, name="heads", kind=int, help="Set the number of query heads."),
    _Shared(
        owner=_M,
        name="kv_heads",
        kind=int | None,
        help="Set the number of key heads, a divisor of --heads.",
    ),
    _Shared(
        owner=_M,
        name="head_dim",
        kind=int | None,
        help="Set the width of a head. The default is --dim / --heads.",
    ),
    _Shared(
        owner=_M, name="rotary_share", kind=float, help="Set the share of a head that RoPE rotates."
    ),
    _Shared(
        owner=_M,
        name="window",
        kind=int | None,
        help="Let a query see only this many keys, its own included.",
    ),
    _Shared(
        owner=_M,
        name="backend",
        kind=str,
        help="Choose the backend of the operator. `qknorm env` lists them.",
    ),
    _Shared(
        owner=_M,
        name="vocab_size",
        kind=int | None,
        help="Set the size of the vocabulary. 0 takes that of the data.",
        default=0,
    ),
    _Shared(
        owner=_D,
        name="source",
        kind=str,
        help='Read this source: "stdlib", a .txt, .jsonl or .bin file, or a folder of .txt files.',
        flag="--data",
    ),
    _Shared(
        owner=_D,
        name="tokenizer",
        kind=Path | None,
        help="Use this tokenizer.json. Without it each byte is a token.",
    ),
    _Shared(
        owner=_D,
        name="token_dtype",
        kind=str,
        help="Set the dtype of a .bin file: uint8, uint16 or int32.",
    ),
    _Shared(owner=_T, name="steps", kind=int, help="Set the number of optimizer steps."),
    _Shared(owner=_T, name="batch", kind=int, help="Set the number of sequences in a step."),
    _Shared(owner=_T, name="context", kind=int, help="Set the number of tokens in a sequence."),
    _Shared(
        owner=_T,
        name="schedule",
        kind=str,
        help="Choose the learning rate after the warm-up: cosine, constant or ramp.",
    ),
    _Shared(owner=_T, name="warmup", kind=int, help="Set the number of steps of linear warm-up."),
    _Shared(
        owner=_T,
        name="optimizer",
        kind=str,
        help="Choose adamw, or muon for the matrices of the blocks with AdamW for the rest.",
    ),
    _Shared(
        owner=_T,
        name="weight_decay",
        kind=float,
        help="Set the weight decay, which does not depend on the peak learning rate.",
    ),
    _Shared(
        owner=_T,
        name="clip",
        kind=float,
        help="Clip the gradient norm to this value. 0 turns clipping off.",
    ),
    _Shared(
        owner=_T,
        name="z_loss",
        kind=float,
        help="Add the mean squared log of the softmax denominator to the loss, with this weight.",
    ),
    _Shared(owner=_T, name="dtype", kind=str, help="Choose float32, or bfloat16 for autocast."),
    _Shared(owner=_T, name="compile", kind=bool, help="Use torch.compile.", flag="--compile"),
    _Shared(
        owner=_T,
        name="stats_every",
        kind=int,
        help="Set the number of steps between observations of the attention. 0 turns them off.",
    ),
    _Shared(
        owner=_T,
        name="checkpoint_every",
        kind=int,
        help="Set the number of steps between checkpoints. 0 writes one at the end only.",
    ),
    _Shared(
        owner=_T,
        name="tensorboard",
        kind=bool,
        help="Write event files for TensorBoard too.",
        flag="--tensorboard",
    ),
]


def given(context: typer.Context) -> set[str]:
    """Return the names of the options that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def flag(name: str) -> str:
    """Return the spelling of an option on the command line."""
    spelled = {option.name: option.flag for option in _SHARED}
    return spelled.get(name) or "--" + name.replace("_", "-")


def with_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the shared options to a command.

    Args:
        command: a function that receives the configuration from the shared options as `base`.

    Returns:
        The function with the shared options in the place of `base`.
    """
    signature = inspect.signature(command, eval_str=True)
    shared = [option.parameter() for option in _SHARED]

    @wraps(command)
    def with_options(**values: Any) -> int:
        base = _run_config({p.name: values.pop(p.name) for p in shared})
        return command(**values, base=base)

    others = [p for p in signature.parameters.values() if p.name != "base"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others] + shared
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _run_config(values: dict[str, Any]) -> TrainConfig:
    """Return the configuration that the shared options describe, with default arm, rate and seed."""
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
            raise ValueError("a .bin file does not state the size of its vocabulary: give --vocab-size")
        parts[_M]["vocab_size"] = implied
    return TrainConfig(model=ModelConfig(**parts[_M]), data=source, **parts[_T])

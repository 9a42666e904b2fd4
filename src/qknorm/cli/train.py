"""`qknorm train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from qknorm.cli import options as o
from qknorm.cli.console import RunProgress, err, number, print_json, say
from qknorm.lab.arms import get_arm
from qknorm.lab.trainer import FREE, TrainConfig, saved_config
from qknorm.lab.trainer import train as train_run


@o.with_run_options
def train(
    call: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder of the run.")],
    arm: Annotated[str, typer.Option(help="Variant of attention; see `qknorm compare --help`.")] = "qk",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the folder's checkpoint, bit for bit, with its settings."
        ),
    ] = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    *,
    base: TrainConfig,
) -> int:
    """Train one small language model, and log max logit and entropy of every head.

    SIGINT, SIGTERM, SIGHUP or a closed pipe ends the run after the current step with a checkpoint;
    --resume continues it. A checkpoint is also written every --checkpoint-every steps. Exit code 0 when
    finished, 1 if it diverged, did not learn or was stopped, 2 for bad input.
    """
    chosen = get_arm(arm)
    config = replace(
        base, arm=arm, lr=lr, seed=seed, model=chosen.apply(base.model), gain_decay=chosen.gain_decay
    )
    if resume:
        config = _resumed(folder, config, o.given(call))
    with RunProgress(quiet=as_json) as progress:
        outcome = train_run(
            config,
            folder,
            resume=resume,
            overwrite=overwrite,
            on_item=lambda item: progress.update(0, arm, config.steps, item),
        )
    final = outcome.final
    if final is None:
        say(f"stopped after step {outcome.steps} of {config.steps}; continue with --resume", to=err)
        if as_json:
            print_json({"stopped_at": outcome.steps})
        return 1
    if as_json:
        print_json(final)
    else:
        reason = "" if final["reason"] is None else f": {final['reason']}"
        say(
            f"{final['verdict']}{reason}. Held-out loss {number(final['final_loss'])}, max logit "
            f"{number(final['max_logit'], 1)}, lowest layer entropy "
            f"{number(final['entropy_nats'])} nats. Log in {folder}."
        )
    return int(final["verdict"] in ("diverged", "did not learn"))


def _resumed(folder: Path, asked: TrainConfig, given: set[str]) -> TrainConfig:
    """Return the saved configuration of a run, with what may change between sessions as it was given.

    Raises ValueError, by its name, for a setting that was given and differs from the saved one.
    """
    saved = saved_config(folder)
    changed = {}
    for name in sorted(given):
        for part, other in ((asked, saved), (asked.model, saved.model), (asked.data, saved.data)):
            if not hasattr(part, name) or getattr(part, name) == getattr(other, name):
                continue
            if name not in FREE:
                new, old = getattr(part, name), getattr(other, name)
                raise ValueError(
                    f"{o.flag(name)} is {new}, and {old} in the run of {folder}: leave it out to "
                    "resume, or start in a new folder"
                )
            changed[name] = getattr(part, name)
    return replace(saved, **changed)

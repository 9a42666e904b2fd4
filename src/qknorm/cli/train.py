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
    folder: Annotated[Path, typer.Argument(help="The folder of the run.")],
    arm: Annotated[
        str, typer.Option(help="Choose the variant of attention. `qknorm compare --help` lists them.")
    ] = "qk",
    lr: Annotated[float, typer.Option(help="Set the peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Set the seed of weights and batches.")] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the checkpoint in the folder, with the settings saved in it.",
        ),
    ] = False,
    overwrite: o.Overwrite = False,
    as_json: o.AsJson = False,
    *,
    base: TrainConfig,
) -> int:
    """Train a small language model, and log the max logit and the entropy of every head.

    SIGINT, SIGTERM, SIGHUP or a closed pipe stops the run after the current step and writes a
    checkpoint, from which --resume continues bit for bit. The exit code is 0 if the run finished or
    saturated, 1 if it diverged, did not learn or was stopped, and 2 for bad input.
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


def _resumed(folder: Path, config: TrainConfig, given: set[str]) -> TrainConfig:
    """Return the saved configuration of a run, with the new values of settings that may change.

    Args:
        folder: the folder of the run.
        config: the configuration from the command line.
        given: the names of the options on the command line.

    Raises:
        ValueError: an option differs from the saved setting, which may not change.
    """
    saved = saved_config(folder)
    changed = {}
    for name in sorted(given):
        for part, other in ((config, saved), (config.model, saved.model), (config.data, saved.data)):
            if not hasattr(part, name) or getattr(part, name) == getattr(other, name):
                continue
            if name not in FREE:
                new, old = getattr(part, name), getattr(other, name)
                raise ValueError(
                    f"{o.flag(name)} is {new}, but the run in {folder} has {old}: leave the option out "
                    "to resume, or start in a new folder"
                )
            changed[name] = getattr(part, name)
    return replace(saved, **changed)

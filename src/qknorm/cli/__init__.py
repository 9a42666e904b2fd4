"""The command line, one file per verb. Exit codes: 0 fine, 1 a run diverged or stopped, 2 bad input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from qknorm.cli import audit, compare, env, report, sample, train, watch
from qknorm.cli.console import complain

app = typer.Typer(
    name="qknorm",
    help="QK-Norm attention: train twins with and without it, and see the two numbers that matter.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _verb(command: Callable[..., int]) -> None:
    """Register a command; what it returns is the exit code."""

    @wraps(command)
    def exiting(**values: Any) -> None:
        raise typer.Exit(command(**values))

    app.command()(exiting)


for verb in (
    train.train,
    compare.compare,
    sample.sample,
    watch.watch,
    report.report,
    audit.audit,
    env.env,
):
    _verb(verb)


def main() -> None:
    """Run the command line; bad input ends in one sentence on stderr and exit code 2."""
    try:
        app()
    except BrokenPipeError:
        # Whoever read what is printed is gone. At exit Python writes out what is left: to nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.exit(1)
    except (ValueError, OSError) as error:
        complain(_sentence(error))
        sys.exit(2)


def _sentence(error: Exception) -> str:
    """One line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)

"""The command line, with one file for each command.

Exit codes are 0 for success, 1 for a run that failed or was stopped, and 2 for bad input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from qknorm import __version__
from qknorm.cli import audit, compare, convert, env, report, sample, train, watch
from qknorm.cli.console import complain, only_our_words, out

app = typer.Typer(
    name="qknorm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"qknorm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Train, watch and audit attention with QK-norm, and compare it with other variants."""


def _verb(command: Callable[..., int]) -> None:
    """Register a command, whose return value becomes the exit code."""

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
    convert.convert,
    env.env,
):
    _verb(verb)


def main() -> None:
    """Run the command line. Bad input prints one sentence on stderr and gives the exit code 2."""
    try:
        with only_our_words():
            app()
    except BrokenPipeError:
        # The process that read the output has ended. Python flushes the rest at exit, to the null
        # device.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.exit(1)
    except (ValueError, OSError) as error:
        complain(_sentence(error))
        sys.exit(2)


def _sentence(error: Exception) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)

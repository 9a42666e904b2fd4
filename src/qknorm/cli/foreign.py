"""Run the code of a target with redirected output, without input, and within a time limit."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from qknorm.auditor.guard import TargetError, in_one_line
from qknorm.lab.printable import printable


@contextmanager
def foreign(what: str, *, time_limit_s: float) -> Iterator[None]:
    """Run the block without access to standard input and output, and within a time limit.

    Output of the block goes to standard error, and its input is empty. After the time limit the process
    ends with one sentence and the exit code 2.

    Args:
        what: the name of the target, for messages.
        time_limit_s: the time limit in seconds; 0 for no limit.

    Raises:
        TargetError: the block raised an error other than an OSError, a ValueError or a
            KeyboardInterrupt, which are raised as they are.
    """
    seconds = min(time_limit_s, threading.TIMEOUT_MAX)
    watchdog = threading.Timer(seconds, _give_up, (what, time_limit_s))
    watchdog.daemon = True
    if time_limit_s:
        watchdog.start()
    try:
        with _without_standard_streams():
            yield
    except (KeyboardInterrupt, OSError, ValueError):
        raise
    except BaseException as error:  # also SystemExit, since a model may call sys.exit(0)
        raise TargetError(f"{what} cannot be audited: {in_one_line(error)}") from error
    finally:
        watchdog.cancel()


def _give_up(what: str, time_limit_s: float) -> None:
    """End the process at once, since code that hangs cannot be interrupted in another way."""
    sentence = f"{what} was not audited within {time_limit_s:g} s: give a larger --time-limit"
    os.write(2, f"error: {printable(sentence)}\n".encode())
    os._exit(2)


@contextmanager
def _without_standard_streams() -> Iterator[None]:
    """Empty standard input and redirect standard output to standard error, also for child processes."""
    sys.stdout.flush()
    kept = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        for number, copy in enumerate(kept):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nothing)

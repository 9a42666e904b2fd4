"""Running code that others wrote: what it prints, asks, raises, and how long it takes."""

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
    """Keep code of others from standard input and output, and end the process where it hangs.

    What it prints goes to standard error, and a question is answered by the end of the input. After the
    time limit the process ends with one sentence and exit code 2; 0 is no limit. Whatever is raised
    becomes a TargetError, but for an OSError, a ValueError and the user's Ctrl-C.
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
    except BaseException as error:  # also SystemExit: a model that calls sys.exit(0) is no success
        raise TargetError(f"{what} cannot be audited: {in_one_line(error)}") from error
    finally:
        watchdog.cancel()


def _give_up(what: str, time_limit_s: float) -> None:
    """End the process at once, since code that hangs cannot be asked to end."""
    sentence = f"{what} was not audited within {time_limit_s:g} s: give a larger --time-limit"
    os.write(2, f"error: {printable(sentence)}\n".encode())
    os._exit(2)


@contextmanager
def _without_standard_streams() -> Iterator[None]:
    """Connect input to nothing and output to standard error, for Python, C code and child processes."""
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

"""One part of an audit that fails does not end the others: it is listed, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NotUnderstoodError(Exception):
    """This attention cannot be asked, and why."""


class Guarded:
    """A block after which the audit goes on: what it raises is noted in `not_probed`."""

    def __init__(self, not_probed: list[str], what: str) -> None:
        self.not_probed, self.what = not_probed, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, NotUnderstoodError):
            self.not_probed.append(f"{self.what}: {error}")
        elif isinstance(error, Exception | SystemExit):
            self.not_probed.append(f"{self.what} raised {in_one_line(error)}")
        return isinstance(error, Exception | SystemExit)


def first_line(error: BaseException) -> str:
    """Of what an error says."""
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), "")


def in_one_line(error: BaseException) -> str:
    """Its type and what it says."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


class TargetError(ValueError):
    """What is to be audited cannot be: one sentence."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever is raised while something is read or built into a TargetError that names it."""
    try:
        yield
    except (TargetError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit: a factory that calls sys.exit(0) is no success
        raise TargetError(f"{what} cannot be read: {in_one_line(error)}") from error

"""Let an audit go on when one of its parts fails, and list the part and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NotUnderstoodError(Exception):
    """The formula of an attention cannot be read. The message says why."""


class Guarded:
    """A context that catches the errors of its block and adds a sentence for each to `not_probed`.

    Args:
        not_probed: receives the sentence.
        what: the part of the audit that the block does; the sentence begins with it.
    """

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
    """Return the first line of the message of an error, at most 200 characters."""
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), "")


def in_one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


class TargetError(ValueError):
    """A target cannot be audited. The message is one sentence that says why."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any error of the block into a TargetError which says that `what` cannot be read."""
    try:
        yield
    except (TargetError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, since a factory may call sys.exit(0)
        raise TargetError(f"{what} cannot be read: {in_one_line(error)}") from error

"""Names from files and models, made fit for a terminal and a page."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text in which every character that does not print is spelled out, as `\\x1b` is.

    So a name can neither steer a terminal, nor reverse what is read, nor begin a line of its own.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

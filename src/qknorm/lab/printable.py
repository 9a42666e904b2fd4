"""Make names from files and models safe for a terminal and a page."""

from __future__ import annotations


def printable(text: str) -> str:
    """Spell out every character of a text that does not print, such as `\\x1b`.

    A name can then not control a terminal, reverse the direction of the text, or start a new line.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

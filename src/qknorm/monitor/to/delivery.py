"""How a record or alert is handed to destinations: one that fails costs itself and nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

LOG = logging.getLogger("qknorm")

Destination = Callable[[Any], object]  # of records, alerts, or both; may have `flush()`


class Delivery:
    """Calls destinations, each on its own. One that raises is named in the log once, in one line."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def __call__(self, send: Destination, item: Any) -> bool:
        """Whether it was taken."""
        return self._attempt(send, lambda: send(item), f"step {item.step}")

    def flush(self, to: Iterable[Destination]) -> None:
        """Have those that keep something back let go of it."""
        for send in to:
            flush = getattr(send, "flush", None)
            if flush is not None:
                self._attempt(send, flush, "the end")

    def _attempt(self, send: Destination, act: Callable[[], object], what: str) -> bool:
        try:
            act()
        except Exception as error:
            if id(send) not in self._named:
                self._named.add(id(send))
                name = getattr(send, "__qualname__", type(send).__name__)
                why = next(iter(str(error).splitlines()), "")[:200]
                LOG.warning(
                    "%s failed at %s, and is called again without a further word: %s: %s",
                    name,
                    what,
                    type(error).__name__,
                    why,
                )
            return False
        return True

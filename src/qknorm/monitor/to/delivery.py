"""How a record or alert is handed to destinations: one that fails costs itself and nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

LOG = logging.getLogger("qknorm")

# Of records, alerts, or both. It may also have `run_started(facts)` and `run_ended(facts)`, which get
# plain values about the run, and `flush()`.
Destination = Callable[[Any], object]


def destinations(to: Any) -> list[Destination]:
    """One or several destinations as a list.

    Raises TypeError for what cannot be called with a record.
    """
    is_one = callable(to) or isinstance(to, str) or not isinstance(to, Iterable)
    found: list[Destination] = [to] if is_one else list(to)
    for send in found:
        if isinstance(send, type) or not callable(send):
            name = send.__name__ if isinstance(send, type) else repr(send)[:80]
            raise TypeError(
                f"a destination is called with each record, as JsonLines(path) is; {name} cannot be"
            )
    return found


class Delivery:
    """Calls destinations, each on its own. One that raises is named in the log once, in one line."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def __call__(self, send: Destination, item: Any) -> bool:
        """Whether it was taken."""
        return self._attempt(send, lambda: send(item), f"step {item.step}")

    def tell(self, send: Destination, what: str, *facts: dict[str, Any]) -> None:
        """Call "run_started", "flush" or "run_ended" of a destination that has it."""
        method = getattr(send, what, None)
        if method is not None:
            self._attempt(send, lambda: method(*facts), what)

    def flush(self, to: Iterable[Destination]) -> None:
        """Have those that keep something back let go of it."""
        for send in to:
            self.tell(send, "flush")

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

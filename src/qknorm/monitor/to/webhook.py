"""Alerts as JSON to a web address, such as that of a chat room, from a thread of its own."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from qknorm.monitor.alerts import ORDER, Alert
from qknorm.monitor.rules import Severity
from qknorm.monitor.to.jsonl import named

LOG = logging.getLogger("qknorm")
WAITING = 64  # alerts that may wait to be sent; more are dropped
Body = Callable[[Alert], dict[str, Any]]


def message(alert: Alert) -> dict[str, Any]:
    """The alert's fields, and as `text` what a person should read; Slack and others show that."""
    text = f"step {alert.step}, {alert.code} {alert.severity}: {alert.message}. {alert.advice}"
    return {"text": text} | alert.to_json()


class Webhook:
    """Posts each alert to an address. Pass it in `to=` of the alerts.

    The training never waits for the network and never fails with it. What does not arrive is named in
    the log once. Of a process that is killed, what still waited is lost.

    Args:
        url: http or https.
        at_least: the least severity that is sent.
        headers: of each request, such as an authorisation.
        body: makes of an alert what is posted.
        timeout_s: of one request.
    """

    def __init__(
        self,
        url: str,
        *,
        at_least: Severity = "warning",
        headers: dict[str, str] | None = None,
        body: Body = message,
        timeout_s: float = 10.0,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"a webhook's address begins with http:// or https://; got {url!r}")
        if at_least not in ORDER:
            raise ValueError(f"at_least is one of {', '.join(ORDER)}; got {at_least!r}")
        self.at_least, self.body, self.timeout_s = at_least, body, timeout_s
        self._queue: queue.Queue[bytes] = queue.Queue(WAITING)
        self._has_failed = False
        self._request = (url, {"Content-Type": "application/json"} | (headers or {}))
        self._thread: threading.Thread | None = None

    def __call__(self, item: object) -> None:
        """Have an alert sent; a record is passed over."""
        if not isinstance(item, Alert) or ORDER.index(item.severity) < ORDER.index(self.at_least):
            return
        text = json.dumps(named(self.body(item)), allow_nan=False).encode()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="qknorm webhook", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._complain(f"{WAITING} alerts wait already")

    def flush(self) -> None:
        """Wait until what was given is sent, but no longer than one request may take."""
        deadline = time.monotonic() + self.timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _send_all(self) -> None:
        while True:
            text = self._queue.get()
            try:
                url, headers = self._request
                request = urllib.request.Request(url, data=text, headers=headers, method="POST")
                with urllib.request.urlopen(request, timeout=self.timeout_s):
                    pass
            except Exception as error:
                self._complain(f"{type(error).__name__}: {error}")
            finally:
                self._queue.task_done()

    def _complain(self, why: str) -> None:
        """Once. The address itself is a secret."""
        if not self._has_failed:
            self._has_failed = True
            LOG.warning("a webhook did not take an alert, which is not said again: %s", why[:200])

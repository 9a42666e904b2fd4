"""Alerts over http, to a real server: they arrive, and what goes wrong stops no training."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from made import layer, record
from qknorm.monitor import Alerts, Monitor, Webhook
from qknorm.monitor.to.webhook import WAITING
from test_taps import Plain

LOUD = record(5, {"a": layer([60.0], ratio=[0.1])})


class Server:
    """Keeps what it is sent; answers with `status`, once `go` is set."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], Any]] = []
        self.status = 200
        self.go = threading.Event()
        self.go.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.go.wait(20)
                outer.got.append((dict(self.headers), json.loads(body, parse_constant=pytest.fail)))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.go.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    found = Server()
    yield found
    found.close()


def test_alerts_arrive_before_detach_returns(server: Server) -> None:
    hook = Webhook(server.url, headers={"Authorization": "Bearer x"})
    alerts = Alerts(to=[hook])
    with Monitor.attach(Plain(), to=[alerts, hook]):
        hook(LOUD)
        given = alerts(record(5, {"a": layer([math.nan], ratio=[0.1]), "b": layer([60.0], ratio=[0.1])}))
    sent = [alert for alert in given if alert.severity != "info"]
    assert len(sent) >= 2
    assert [body["code"] for _, body in server.got] == [alert.code for alert in sent]
    headers, body = server.got[0]
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer x"
    assert sent[0].message in body["text"]
    assert body["step"] == 5
    assert "NaN" in [body["evidence"].get("max_logit") for _, body in server.got]


def test_a_body_and_a_severity_of_ones_own(server: Server) -> None:
    hook = Webhook(server.url, at_least="alarm", body=lambda alert: {"content": alert.code})
    Alerts(to=[hook])(LOUD)
    hook.flush()
    assert [body for _, body in server.got] == [{"content": "QM010"}]


def test_a_server_that_hangs_refuses_or_is_gone_holds_nothing_up(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    (alarm,) = [alert for alert in Alerts()(LOUD) if alert.severity == "alarm"]
    server.go.clear()
    hook = Webhook(server.url, timeout_s=0.3)
    begin = time.perf_counter()
    for _ in range(WAITING + 9):
        hook(alarm)
    assert time.perf_counter() - begin < 0.3, "the caller waited for the network"
    begin = time.perf_counter()
    hook.flush()
    assert time.perf_counter() - begin < 5
    server.status = 404
    server.go.set()
    for url in (server.url, "http://127.0.0.1:9/"):
        other = Webhook(url, timeout_s=5)
        for _ in range(3):
            other(alarm)
        other.flush()
    said = [r.getMessage() for r in caplog.records if "webhook" in r.getMessage()]
    assert len(said) == 3, "each says once that it failed"
    assert "404" in said[1]
    assert not any("secret" in line for line in said)


def test_what_makes_no_sense_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="begins with http"):
        Webhook("file:///etc/passwd")
    with pytest.raises(ValueError, match="at_least is one of"):
        Webhook("https://x.org", at_least="loud")


def test_on_alarm_is_called_with_alarms_alone() -> None:
    alarms: list[Any] = []
    everything: list[Any] = []
    alerts = Alerts(to=[everything.append], on_alarm=alarms.append)
    for step in range(5, 8):
        alerts(record(step, {"a": layer([60.0], ratio=[0.1]), "b": layer([40.0])}))
    assert [(alarm.code, alarm.step) for alarm in alarms] == [("QM010", 5)]
    assert len(everything) > 1

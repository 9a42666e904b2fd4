"""F22: real clients of trackers, into which a user writes too. What arrived is read from their files.

Without a client its tests are skipped: `pip install 'qknorm[wandb,trackio,mlflow,tensorboard]'`.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from made import layer, record
from qknorm.monitor import Alerts, Monitor, Record
from qknorm.monitor.alerts import Alert
from qknorm.monitor.to.trackers import Gauges, Mlflow, TensorBoard, Trackio, Wandb
from test_taps import Plain

STEPS = 6
Write = Callable[[Any, int], None]  # of the user, at an optimizer step

USERS: dict[str, Write] = {
    "with a step": lambda run, i: run.log({"loss": float(i)}, step=i),
    "without a step": lambda run, i: run.log({"loss": float(i)}),
    "every third step": lambda run, i: run.log({"loss": float(i)}, step=i) if i % 3 == 2 else None,
    "with the epoch": lambda run, i: run.log({"loss": float(i)}, step=i // 3) if i % 3 == 2 else None,
    "twice a step": lambda run, i: (run.log({"loss": float(i)}), run.log({"late": float(i)}))[0],
    "never": lambda run, i: None,
}


def records_of(step: int) -> list[Record]:
    """One of training, and now and then one of evaluation."""
    made = [record(step, {"a": layer([float(step)])})]
    return made + [record(step, {"a": layer([9.0])}, phase="eval")] * (step % 4 == 0)


def loud() -> tuple[Record, list[Alert]]:
    loud = record(5, {"a": layer([60.0], ratio=[0.1])})
    return loud, Alerts()(loud)


def train(run: Any, write: Write, send: Any, *, is_first: bool) -> None:
    """`is_first`: the user writes before the monitor does."""
    for i in range(STEPS):
        if is_first:
            write(run, i)
        for one in records_of(i) if send is not None else ():
            send(one)
        if not is_first:
            write(run, i)
    if send is not None:
        send.flush()


# W&B ----------------------------------------------------------------------------------------------


def wandb_records(folder: Path) -> list[Any]:
    """All that the client wrote for a run that is finished; its service may still be writing."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):
        found = list(parsed(path.read_bytes()))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.1)
    raise AssertionError("the log of the run has no end")


def parsed(data: bytes) -> Iterator[Any]:
    """Records in the framing of LevelDB's log, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found = wandb_internal_pb2.Record()
            found.ParseFromString(whole)
            whole = b""
            yield found


def wandb_rows(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = [one.history for one in wandb_records(folder) if one.WhichOneof("record_type") == "history"]
    return [
        (
            row.step.num,
            {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item},
        )
        for row in rows
    ]


@pytest.fixture
def wandb_run(tmp_path: Path) -> Callable[..., Any]:
    wandb = pytest.importorskip("wandb", reason="needs the extra qknorm[wandb]")

    def make(name: str, mode: str = "offline") -> Any:
        folder = tmp_path / name
        folder.mkdir()
        return wandb.init(
            project="p", dir=folder, mode=mode, settings=wandb.Settings(console="off", silent=True)
        )

    return make


@pytest.mark.parametrize("user", USERS)
def test_f22_wandb_keeps_all_of_the_user_and_of_us(
    user: str, wandb_run: Callable[..., Any], tmp_path: Path
) -> None:
    def user_rows(name: str) -> list[tuple[int, float]]:
        return [
            (step, row[key])
            for step, row in wandb_rows(tmp_path / name)
            for key in ("loss", "late")
            if key in row
        ]

    run = wandb_run("alone")
    train(run, USERS[user], None, is_first=True)
    run.finish()
    for is_first in (True, False):
        name = f"both {is_first}"
        run = wandb_run(name)
        train(run, USERS[user], Wandb(run), is_first=is_first)
        run.finish()
        assert user_rows(name) == user_rows("alone")
        ours = [row for _, row in wandb_rows(tmp_path / name) if "attention/step" in row]
        assert [row["attention/step"] for row in ours] == list(range(STEPS))
        for step, row in enumerate(ours):
            assert row["attention/max_logit"] == step
            assert row["attention/worst_1/head"] == "a head 0"
            assert ("attention_eval/max_logit" in row) == (step % 4 == 0)


def test_f22_wandb_after_the_monitor_has_left(wandb_run: Callable[..., Any], tmp_path: Path) -> None:
    """What waited opens a row that the user's next one joins."""
    run = wandb_run("run")
    send = Wandb(run)
    for i in range(2 * STEPS):
        USERS["with a step"](run, i)
        if i < STEPS:
            send(record(i, {"a": layer([float(i)])}))
        elif i == STEPS:
            send.flush()
    run.finish()
    rows = wandb_rows(tmp_path / "run")
    assert [row["loss"] for _, row in rows] == [float(i) for i in range(2 * STEPS)]
    assert [row["attention/max_logit"] for _, row in rows if "attention/step" in row] == list(
        range(STEPS)
    )


def test_f22_wandb_gets_alerts_and_axes_and_says_when_a_run_is_over(
    wandb_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = wandb_run("run")
    send, (found, alerts) = Wandb(run), loud()
    send(found)
    for alert in alerts:
        send(alert)
    run.finish()
    start = time.perf_counter()
    with pytest.raises(Exception, match="finished"):
        send(record(6, {"a": layer([1.0])}))
    assert time.perf_counter() - start < 5
    kinds = [(one.WhichOneof("record_type"), one) for one in wandb_records(tmp_path / "run")]
    titles = [one.alert.title for kind, one in kinds if kind == "alert"]
    assert titles == [f"{alert.code} {alert.severity}" for alert in alerts] != []
    assert "attention/step" in {one.metric.name for kind, one in kinds if kind == "metric"}
    off = wandb_run("off", mode="disabled")
    train(off, USERS["without a step"], Wandb(off), is_first=True)


def test_f22_what_is_no_run_is_refused_at_once() -> None:
    for make in (Wandb, Trackio, Mlflow, TensorBoard):
        with pytest.raises(TypeError, match=r"pass .*; got object"):
            make(object())


# Trackio ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", USERS)
def test_f22_trackio_keeps_all_of_the_user_and_of_us(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="needs the extra qknorm[trackio]")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)

    def rows(name: str, table: str = "metrics", column: str = "metrics") -> list[Any]:
        (path,) = tmp_path.glob("*.db")
        with sqlite3.connect(path) as file:
            query = f"SELECT step, {column} FROM {table} WHERE run_name = ? ORDER BY id"
            return file.execute(query, (name,)).fetchall()

    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name in ("alone", "first", "second"):
        run = trackio.init(project="p", name=name, embed=False)
        send = None if name == "alone" else Trackio(run)
        for i in range(STEPS):
            if name != "second":
                USERS[user](run, i)
            for one in records_of(i) if send else ():
                send(one)
            if name == "second":
                USERS[user](run, i)
        if send:
            for alert in loud()[1]:
                send(alert)
        run.finish()
        found[name] = (
            [(step, json.loads(text)) for step, text in rows(name)] if user != "never" or send else []
        )
        if send:
            alerts = rows(name, "alerts", "level || ' ' || title")
            wanted = {"info": "info", "warning": "warn", "alarm": "error"}
            assert alerts == [
                (5, f"{wanted[alert.severity]} {alert.code} {alert.severity}") for alert in loud()[1]
            ]
    for name in ("first", "second"):
        users = [row for row in found[name] if not any(key.startswith("attention") for key in row[1])]
        ours = [(step, row) for step, row in found[name] if "attention/max_logit" in row]
        assert users == found["alone"]
        assert [(step, row["attention/max_logit"]) for step, row in ours] == [
            (i, float(i)) for i in range(STEPS)
        ]


# MLflow -------------------------------------------------------------------------------------------


def test_f22_mlflow_keeps_all_of_the_user_and_of_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes long to set up
    mlflow = pytest.importorskip("mlflow", reason="needs the extra qknorm[mlflow]")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'runs'}")  # the folder must not be there yet
    send = Mlflow(mlflow)
    with mlflow.start_run() as run:
        for i in range(STEPS):
            mlflow.log_metric("loss", i, step=i)
            for one in records_of(i):
                send(one)
            mlflow.log_metric("late", i)
    nan = record(STEPS, {"a": layer([math.nan])})
    send(nan)  # the user's run has ended
    for alert in Alerts()(nan):
        send(alert)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    assert len(client.search_runs(["0"])) == 1
    values = {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in ("loss", "late", "attention/max_logit", "attention_eval/max_logit")
    }
    assert values["loss"] == [(i, i) for i in range(STEPS)]
    assert values["late"] == [(0, i) for i in range(STEPS)]
    assert values["attention/max_logit"][:-1] == [(i, i) for i in range(STEPS)]
    assert math.isnan(values["attention/max_logit"][-1][1])
    assert [step for step, _ in values["attention_eval/max_logit"]] == [0, 4]
    tags = client.get_run(run.info.run_id).data.tags
    assert "is not finite" in tags["attention.QM008.6.a"]


# TensorBoard --------------------------------------------------------------------------------------


def test_f22_tensorboard_keeps_all_of_the_user_and_of_us(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra qknorm[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send = TensorBoard(tmp_path)
    for i in range(STEPS):
        send.writer.add_scalar("loss", i, i)
        for one in records_of(i):
            send(one)
        send.writer.add_scalar("late", i)
    for alert in loud()[1]:
        send(alert)
    send.flush()
    read = EventAccumulator(str(tmp_path), {"images": 0})
    read.Reload()
    scalars = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert scalars["loss"] == scalars["attention/max_logit"] == [(i, i) for i in range(STEPS)]
    assert [value for _, value in scalars["late"]] == list(range(STEPS))
    assert [step for step, _ in scalars["attention_eval/max_logit"]] == [0, 4]
    assert len(read.Images("attention/entropy_ratio")) == STEPS
    texts = [tag for tag in read.Tags()["tensors"] if "text" in tag]
    assert len([tag for tag in texts if "QM" in tag]) == len({alert.code for alert in loud()[1]})
    name = "attention/worst_1/head/text_summary"
    (event,) = read.Tensors(name)  # it has not changed since
    assert event.tensor_proto.string_val == [b"a head 0"]
    send.writer.close()


# All ----------------------------------------------------------------------------------------------


def test_gauges_are_made_once() -> None:
    class Gauge:
        def __init__(self) -> None:
            self.values: list[float] = []

        def set(self, value: float) -> None:
            self.values.append(value)

    gauges: dict[str, Gauge] = {}
    made: list[str] = []
    send = Gauges(lambda name: made.append(name) or gauges.setdefault(name, Gauge()))
    for _ in range(2):
        send(loud()[0])
    assert len(set(made)) == len(made)  # Prometheus refuses a second gauge of the same name
    assert gauges["qknorm_attention_max_logit"].values == [60.0] * 2


def test_f22_detaching_flushes_the_destinations_of_records_and_of_alerts() -> None:
    class Keeps:
        flushed = 0

        def __call__(self, item: Any) -> None:
            pass

        def flush(self) -> None:
            self.flushed += 1

    mine, theirs = Keeps(), Keeps()
    Monitor.attach(Plain(), to=[mine, Alerts(to=[theirs])]).detach()
    assert (mine.flushed, theirs.flushed) == (1, 1)

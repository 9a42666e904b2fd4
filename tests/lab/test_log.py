"""One log: the lab writes it as every monitor does, and one reader takes in what is whole."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from made import layer, record
from qknorm.lab import DataConfig, ModelConfig, TrainConfig, train
from qknorm.lab.follow import Follower
from qknorm.lab.runs import load_runs
from qknorm.lab.timeline import Timeline, log_file
from qknorm.lab.trainer import Trainer
from qknorm.monitor import Alerts, JsonLines, Monitor, rank_path
from qknorm.monitor.to.jsonl import read_lines, to_record
from runs import arm, at_step, final, stop, strict_lines

# Written as by any monitor ------------------------------------------------------------------------


def test_a_record_of_the_lab_is_what_a_monitor_on_the_model_sees(config, tmp_path):
    """The step of a record is that of its loss: the batch of step 7 and the weights before it."""
    run = replace(config, steps=7)
    train(run, tmp_path / "run", on_item=at_step(6, stop()))
    trainer = Trainer(replace(run, stats_every=0))
    trainer.restore(torch.load(tmp_path / "run" / "checkpoint.pt"))
    inputs, _ = trainer.data.batch(run.seed, 7, run.batch, run.context)
    with Monitor.attach(trainer.model, every=1) as monitor:
        trainer.model(inputs)
        (seen,) = monitor.step()
    train(run, tmp_path / "run", resume=True)
    (line,) = (x for x in strict_lines(tmp_path / "run", "record") if x["phase"] == "train")
    assert line["step"] == 7
    assert to_record(line).layers == seen.layers


def test_the_log_is_read_the_same_at_once_and_while_it_grows(config, tmp_path):
    """`report` and `watch` see one thing, in a run of the lab and in one of any other monitor."""
    folder = tmp_path / "run"
    follower, followed = Follower(folder / "metrics.jsonl"), Timeline()

    def follow(item):
        for line in follower.poll():
            followed.feed(line)

    train(replace(arm(config, "none", lr=0.3), steps=40), folder, on_item=follow)
    follow(None)
    (run,) = load_runs([folder])
    assert run.alerts
    for name in vars(followed):
        assert getattr(followed, name) == getattr(run, name), name
    assert [r.step for r in run.records] == [7, 14, 21, 28, 35]
    assert (run.end.phase, run.end.step) == ("eval", 40)
    assert run.has_ended

    log = JsonLines(rank_path(tmp_path / "other", 0))
    log(record(0, {"a": layer([1.0])}))
    log({"kind": "step", "step": 0, "loss": 2.5})
    log.close(ended=True)
    (other,) = load_runs([tmp_path / "other"])
    assert (other.step, other.loss, other.has_ended, other.final) == (0, 2.5, True, None)
    assert other.end == other.records[0]


def alerts_of(folder):
    return [json.dumps(line) for line in strict_lines(folder, "alert")]


def test_alerts_are_given_once_each_and_a_resumed_run_does_not_repeat_them(config, tmp_path):
    run = replace(arm(config, "none", lr=0.3), stats_every=1, steps=40)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(run, whole)
    expected = alerts_of(whole)
    assert len(expected) > 4
    assert len(set(expected)) == len(expected)
    given = []

    def hear(step):
        act = at_step(step, stop())

        def on_item(item):
            if not isinstance(item, dict) and hasattr(item, "severity"):
                given.append(item)
            act(item)

        return on_item

    # Stopped between alerts: some stand when the run goes on.
    train(run, parts, on_item=hear(12))
    assert 0 < len(given) < len(expected)
    train(run, parts, resume=True, on_item=hear(25))
    train(run, parts, resume=True, on_item=hear(0))
    assert alerts_of(parts) == expected
    assert len(given) == len(expected)


def test_an_alert_that_could_not_be_written_is_given_when_the_run_goes_on(config, tmp_path, monkeypatch):
    """Given is what was sent: the run that could not say it ends, and says it when it is resumed."""
    run = replace(arm(config, "none", lr=0.3), stats_every=1, steps=40, checkpoint_every=1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(run, whole)
    write = JsonLines.__call__

    def full(self, item):
        if not isinstance(item, dict) and getattr(item, "code", None) == "QM010":
            raise OSError(28, os.strerror(28))
        write(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "__call__", full)
        with pytest.raises(OSError, match=os.strerror(28)):
            train(run, parts)
    assert "QM010" not in str(alerts_of(parts))
    train(run, parts, resume=True)
    assert "QM010" in str(alerts_of(parts))
    assert alerts_of(parts) == alerts_of(whole)


# Ranks --------------------------------------------------------------------------------------------


def one_rank(rank: int, world: int, text: str, folder: str) -> None:
    """A process of two, with a folder of its own to write to if it writes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    run = TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=text),
        steps=4, batch=2, context=16, warmup=2, eval_batches=2, stats_every=2, checkpoint_every=2,
        tensorboard=True,
    )  # fmt: skip
    seen: list[object] = []
    outcome = train(run, Path(folder) / f"rank{rank}", on_item=seen.append)
    assert bool(seen) == (rank == 0)
    torch.save(outcome.final, Path(folder) / f"final{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_only_the_first_rank_writes_and_its_records_are_of_all_ranks(text, tmp_path):
    mp.spawn(one_rank, (2, str(text), str(tmp_path)), nprocs=2)
    assert not (tmp_path / "rank1").exists()
    folder = tmp_path / "rank0"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "checkpoint.pt", "tensorboard",
    }  # fmt: skip
    records = strict_lines(folder, "record")
    assert [(line["phase"], line["step"]) for line in records] == [
        ("train", 2),
        ("train", 4),
        ("eval", 4),
    ]
    for line in records:
        tokens = 2 * 16 * (2 if line["phase"] == "eval" else 1)
        assert {x["rows"] for x in line["layers"].values()} == {2 * tokens}
    first, second = (torch.load(tmp_path / f"final{rank}.pt") for rank in (0, 1))
    assert first == second
    assert final(folder).items() >= first.items()


# Damage -------------------------------------------------------------------------------------------


def damaged(kind: str, line: bytes) -> bytes:
    whole = json.loads(line)
    return {
        "no object": b"[]",
        "no kind": b"{}",
        "a number": b"3",
        "parts missing": json.dumps({k: v for k, v in whole.items() if k != "silent"}).encode(),
        "no layers": json.dumps(whole | {"layers": {"a": {"max_logit": [1.0]}}}).encode(),
        "layers of another kind": json.dumps(whole | {"layers": [1]}).encode(),
        "an alert without words": b'{"kind": "alert", "step": 3}',
        "a step that is none": b'{"kind": "step", "step": "three", "loss": 1.0}',
        "a loss that is a word": b'{"kind": "step", "step": 3, "loss": "low"}',
        "an end that is a list": b'{"kind": "final", "step": 3, "final_loss": [1.0]}',
        "heads that are words": json.dumps(
            whole | {"layers": {n: v | {"max_logit": ["high"]} for n, v in whole["layers"].items()}}
        ).encode(),
        "fewer heads": json.dumps(
            whole | {"layers": {n: v | {"entropy_nats": []} for n, v in whole["layers"].items()}}
        ).encode(),
        "deep": b"[" * 100_000 + b"]" * 100_000,
        "another schema": json.dumps(whole | {"schema": "one"}).encode(),
        "bytes": b"\xff\xfe" + line.strip(),
        "zeros": bytes(40),
        "half a line and a whole one": line[:30] + line.strip(),
    }[kind]


KINDS = (
    "no object", "no kind", "a number", "parts missing", "no layers", "layers of another kind",
    "an alert without words", "a step that is none", "a loss that is a word", "an end that is a list",
    "heads that are words", "fewer heads", "deep", "another schema", "bytes", "zeros",
    "half a line and a whole one",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_f80_a_damaged_line_is_named_and_the_rest_is_read(tmp_path, caplog, kind):
    log = JsonLines(rank_path(tmp_path, 0))
    alerts = Alerts(to=[log])
    for step in range(3):
        log(record(step, {"a": layer([60.0])}))
        alerts(record(step, {"a": layer([60.0])}))
    log.close(ended=True)
    lines = log.path.read_bytes().splitlines(keepends=True)
    at = len(lines) - 2
    lines[at] = damaged(kind, lines[at]) + b"\n"
    log.path.write_bytes(b"".join(lines))
    with caplog.at_level(logging.WARNING, "qknorm"):
        (run,) = load_runs([tmp_path])
    assert [r.step for r in run.records] == [0, 1]
    assert run.alerts
    assert run.has_ended
    assert f"{log.path}, line {at + 1} is damaged and left out: " in caplog.text
    caplog.clear()
    assert len(Follower(log.path).poll()) == len(lines) - 1
    assert f"{log.path}, line {at + 1} is damaged and left out: " in caplog.text
    # A resumed run keeps the rest too.
    JsonLines(log.path, resume_after=1).close()
    assert [line["step"] for line in read_lines(log.path) if line["kind"] == "record"] == [0, 1]


def test_a_line_of_a_newer_schema_is_refused_by_every_reader(config, stopped):
    path = log_file(stopped)
    with path.open("a") as file:
        file.write('{"kind": "record", "schema": 99, "step": 6, "shape": "another"}\n')
    for read in (lambda: load_runs([stopped]), Follower(path).poll):
        with pytest.raises(ValueError, match="schema 99, newer than 1: update qknorm"):
            read()

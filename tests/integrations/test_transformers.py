"""The Trainer of Hugging Face with the callback: what it records, logs, resumes and leaves alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from qknorm.integrations.transformers import MonitorCallback
from qknorm.monitor import Monitor, Record
from qknorm.monitor.to.jsonl import rank_path, read_lines

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def examples(count: int = 64) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(
    folder: Path, model: LlamaForCausalLM, callbacks: list[TrainerCallback] | None = None, **options: Any
) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "max_steps": 6,
        "logging_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "save_steps": 3,
        "disable_tqdm": True,
    }
    return Trainer(
        model,
        TrainingArguments(**arguments | options),
        train_dataset=examples(),
        eval_dataset=examples(4),
        callbacks=callbacks,
    )


class Tracker(TrainerCallback):
    """Stands where a report to a tracker stands: before the callbacks of the user."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


def lines(folder: Path, kind: str = "record") -> list[dict[str, Any]]:
    return [line for line in read_lines(rank_path(folder, 0)) if line["kind"] == kind]


def test_records_reach_the_file_the_trackers_and_the_history(tmp_path: Path) -> None:
    run = trainer(tmp_path, new_model(), eval_strategy="steps", eval_steps=2)
    tracker = Tracker()
    run.add_callback(tracker)
    seen: list[Any] = []
    run.add_callback(MonitorCallback(every=2, to=[seen.append]))
    run.train()
    records = [line for line in lines(tmp_path) if line["phase"] == "train"]
    assert [line["step"] for line in records] == [0, 2, 4]
    # Two micro-batches of two sequences of 16 tokens.
    assert {layer["rows"] for line in records for layer in line["layers"].values()} == {2 * 2 * 16}
    assert list(records[0]["layers"]) == [f"model.layers.{i}.self_attn" for i in range(2)]
    evaluations = [line for line in lines(tmp_path) if line["phase"] == "eval"]
    assert [line["step"] for line in evaluations] == [2, 4, 6]  # between these steps and the next
    trained = [log for log in tracker.logs if "loss" in log]
    assert [log["attention/max_logit"] for log in trained] == [
        max(max(layer["max_logit"]) for layer in line["layers"].values()) for line in records
    ]
    assert "attention/entropy_ratio_min" in next(h for h in run.state.log_history if "loss" in h)
    assert len([item for item in seen if isinstance(item, Record)]) == 6


def test_watching_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    weights = []
    for watched in (False, True):
        run = trainer(tmp_path / str(watched), new_model())
        if watched:
            run.add_callback(MonitorCallback(every=1))
        run.train()
        weights.append(run.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    Monitor.attach(run.model, every=1).detach()  # it was detached: else this is refused


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", new_model())
    whole.add_callback(MonitorCallback(every=1))
    whole.train()
    part = trainer(tmp_path / "parts", new_model())
    part.add_callback(MonitorCallback(every=1))
    part.train()  # as if it had been stopped after the checkpoint of step 3
    again = trainer(tmp_path / "parts", new_model())
    again.add_callback(MonitorCallback(every=1))
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    found, wanted = lines(tmp_path / "parts"), lines(tmp_path / "whole")
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4, 5]
    assert found == wanted


def test_f29_a_second_training_is_a_new_run_with_a_file_of_its_own(tmp_path: Path) -> None:
    """With accumulated micro-batches, of which the last step of an epoch has fewer."""
    run = trainer(tmp_path, new_model(), max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=3)
    run.add_callback(MonitorCallback(every=2))
    for _ in range(2):
        run.train()
        assert run.state.global_step == 11
        assert [line["step"] for line in lines(tmp_path)] == [0, 2, 4, 6, 8, 10]
    assert len(list(tmp_path.glob("attention.rank00000.jsonl*"))) == 2


def test_an_alarm_is_a_log_line_and_can_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    run = trainer(tmp_path, model)
    run.add_callback(MonitorCallback(every=1, stop_on_alarm=True))
    with caplog.at_level(logging.INFO, logger="qknorm"):
        run.train()
    assert run.state.global_step == 1
    assert any(r.levelname == "ERROR" and "QM008" in r.message for r in caplog.records)
    assert {line["code"] for line in lines(tmp_path, "alert")} >= {"QM008"}


def scalars(folder: Path) -> dict[str, list[int]]:
    """The steps of each scalar in the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("place", ["constructor", "added", "before"])
def test_f79_its_numbers_reach_tensorboard_wherever_it_stands(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    callback, later = MonitorCallback(every=1, folder=tmp_path / "elsewhere"), Tracker()
    given = {"constructor": [callback, later], "before": [later, callback], "added": [later]}[place]
    run = trainer(tmp_path, new_model(), callbacks=given, report_to=["tensorboard"], max_steps=4)
    if place == "added":
        run.add_callback(callback)
    order = [type(one) for one in run.callback_handler.callbacks if one is not callback]
    run.train()
    found = scalars(tmp_path / "tb")
    assert found["train/attention/max_logit"] == found["train/loss"] == [2, 4]
    assert len([tag for tag in found if tag.startswith("train/attention/")]) >= 18
    assert all("attention/max_logit" in log for log in later.logs if "loss" in log)
    assert [type(one) for one in run.callback_handler.callbacks if one is not callback] == order
    assert [line["step"] for line in lines(tmp_path / "elsewhere")] == [0, 1, 2, 3]

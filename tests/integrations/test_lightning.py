"""Lightning's Trainer with the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from qknorm.integrations.lightning import MonitorCallback
from qknorm.monitor.to.jsonl import rank_path, read_lines


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.block(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.block(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def batches(count: int = 12) -> DataLoader[Tensor]:
    x = torch.randn(count * 2, 8, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(x, batch_size=2)  # type: ignore[arg-type]


def fit(folder: Path, callback: MonitorCallback | None, module: Module, **options: Any) -> pl.Trainer:
    chosen = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "max_steps": 6,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 1,
        "logger": CSVLogger(folder, name="", version="run"),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [] if callback is None else [callback],
    }
    checkpoint = options.pop("ckpt_path", None)
    trainer = pl.Trainer(**chosen | options)
    trainer.fit(module, batches(), batches(2), ckpt_path=checkpoint)
    return trainer


def records(folder: Path) -> list[dict[str, Any]]:
    return [
        line
        for line in read_lines(rank_path(folder, 0))
        if line["kind"] == "record" and line["phase"] == "train"
    ]


def test_records_reach_the_file_the_logger_and_the_metrics(tmp_path: Path) -> None:
    trainer = fit(tmp_path, MonitorCallback(every=2), Module())
    found = records(tmp_path / "run")
    assert [line["step"] for line in found] == [0, 2, 4]
    assert list(found[0]["layers"]) == ["block.self_attn"]
    assert found[0]["layers"]["block.self_attn"]["rows"] == 2 * 2 * 8  # two accumulated batches
    assert float(trainer.callback_metrics["attention/max_logit"]) == pytest.approx(
        max(found[-1]["layers"]["block.self_attn"]["max_logit"])
    )
    assert "attention/max_logit" in (tmp_path / "run" / "metrics.csv").read_text()


def test_watching_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    plain, watched = Module(), Module()
    fit(tmp_path / "plain", None, plain)
    fit(tmp_path / "watched", MonitorCallback(every=1), watched)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    first = fit(tmp_path, MonitorCallback(every=1, folder=tmp_path), Module(), max_steps=3)
    first.save_checkpoint(tmp_path / "three.ckpt")
    fit(tmp_path, MonitorCallback(every=1, folder=tmp_path), Module(), ckpt_path=tmp_path / "three.ckpt")
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 3, 4, 5]


class TwoOptimizers(Module):
    """Steps both by hand, the second in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        loss = self.block(batch).square().mean()
        self.manual_backward(loss)
        first.step()
        if index % 2:
            second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        half = list(self.parameters())
        return [torch.optim.SGD(part, lr=1e-2) for part in (half[:4], half[4:])]


def test_f29_one_axis_of_steps_with_two_optimizers(tmp_path: Path) -> None:
    """A resumed run goes on, also in another trainer, also where the first part was not watched; what
    starts at the beginning starts at 0."""
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 6}
    options |= {"accumulate_grad_batches": 1, "limit_val_batches": 0}
    watched = MonitorCallback(every=1, folder=tmp_path)
    first = fit(tmp_path, watched, TwoOptimizers(), **options)
    assert first.global_step == 9
    first.save_checkpoint(tmp_path / "one.ckpt")
    again = options | {"max_epochs": 2, "ckpt_path": tmp_path / "one.ckpt"}
    fit(tmp_path, MonitorCallback(every=1, folder=tmp_path), TwoOptimizers(), **again)
    assert [line["step"] for line in records(tmp_path)] == list(range(12))
    late = MonitorCallback(every=1, folder=tmp_path / "late")
    plain = fit(tmp_path, None, TwoOptimizers(), **options)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    fit(tmp_path, late, TwoOptimizers(), **again | {"ckpt_path": tmp_path / "plain.ckpt"})
    assert len(records(tmp_path / "late")) == 6
    fit(tmp_path, late, TwoOptimizers(), **options)  # the same callback in a new trainer
    assert [line["step"] for line in records(tmp_path / "late")] == list(range(6))


def test_f29_a_second_fit_of_the_same_trainer_goes_on(tmp_path: Path) -> None:
    callback = MonitorCallback(every=1, folder=tmp_path)
    module = Module()
    trainer = fit(tmp_path, callback, module, max_steps=3)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, batches(), batches(2))
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_an_alarm_can_stop_the_training(tmp_path: Path) -> None:
    module = Module()
    with torch.no_grad():
        module.block.self_attn.in_proj_weight[0, 0] = torch.nan
    callback = MonitorCallback(every=1, folder=tmp_path, stop_on_alarm=True)
    trainer = fit(tmp_path, callback, module, limit_val_batches=0)
    assert trainer.global_step == 1


def test_a_failing_training_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            raise RuntimeError("on purpose")

    module = Failing()
    before = module.block.self_attn.forward
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, MonitorCallback(folder=tmp_path), module)
    assert module.block.self_attn.forward == before

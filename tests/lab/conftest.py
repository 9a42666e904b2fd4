"""A text, a configuration of a second, and a run that was stopped."""

import pytest

from qknorm.lab import DataConfig, ModelConfig, TrainConfig, train
from runs import at_step, stop


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400)))
    return path


@pytest.fixture
def config(text):
    """A run of a second or less, with everything on that a checkpoint must carry."""
    return TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=60,
        batch=2,
        context=16,
        lr=1e-2,
        warmup=10,
        weight_decay=1e-2,
        z_loss=1e-4,
        eval_batches=2,
        stats_every=7,
    )


@pytest.fixture
def stopped(config, tmp_path):
    """A run that was stopped at step 5, and its folder."""
    folder = tmp_path / "stopped"
    assert train(config, folder, on_item=at_step(5, stop())).final is None
    return folder

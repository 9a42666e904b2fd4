"""F48: a number that is not finite ends a run, and no weight and no checkpoint is spoilt by it."""

from dataclasses import replace

import pytest
import torch

from qknorm.lab import CompareConfig, checkpoint, compare, train
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.report import words, write_report
from qknorm.lab.runs import find_runs, load_runs
from qknorm.lab.trainer import Trainer
from runs import arm, assert_same_bits, assert_same_run, at_step, final, stop, strict_lines

BAD = 15


@pytest.fixture
def run(config):
    return replace(config, steps=30, checkpoint_every=10, stats_every=5)


def spoil(monkeypatch, what, *, step=BAD, arm=None):
    """Training in which something is not finite at one step, in all arms or in one."""
    original = Trainer.train_step

    def train_step(self):
        handles = []
        if self.step == step - 1 and arm in (None, self.config.arm):
            name, *value = what.split()
            weight = self.model.head.weight
            if name == "loss":
                spoilt = self.model.norm.register_forward_hook(lambda *call: call[2] * float(value[0]))
                handles.append(spoilt)
            elif name == "gradient":
                handles.append(weight.register_hook(lambda g: torch.full_like(g, float(value[0]))))
            else:
                self.optimizers[0].state[weight]["exp_avg"].view(-1)[3] = torch.nan
        try:
            return original(self)
        finally:
            for handle in handles:
                handle.remove()

    monkeypatch.setattr(Trainer, "train_step", train_step)


def all_finite(state):
    checkpoint.check_finite(state)
    return True


# The loss, and the gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("loss nan", "the loss is not finite at step 15"),
        ("loss inf", "the loss is not finite at step 15"),
        ("gradient nan", "the gradient norm is not finite at step 15"),
        ("gradient inf", "the gradient norm is not finite at step 15"),
        # Each entry is finite, their norm in fp32 is not.
        ("gradient 1e30", "the gradient norm is not finite at step 15"),
    ],
)
def test_f48_no_step_is_taken_and_the_run_ends_with_a_sentence(
    run, tmp_path, monkeypatch, what, reason, clip
):
    run, folder = replace(run, clip=clip), tmp_path / "run"
    twin = Trainer(run)
    for _ in range(BAD - 1):
        twin.train_step()
    spoil(monkeypatch, what)
    outcome = train(run, folder)
    assert outcome.steps == BAD
    assert (outcome.final["diverged"], outcome.final["reason"]) == (True, reason)
    # The weights are those of the last good step, and so they can still be evaluated and saved.
    assert outcome.final["final_loss"] == pytest.approx(twin.evaluate()[0], rel=1e-6)
    state = checkpoint.load(folder / CHECKPOINT_FILE)
    assert state["step"] == BAD
    wanted = twin.state()
    assert_same_bits(state["model"], wanted["model"])
    for mine, other in zip(state["optimizers"], wanted["optimizers"], strict=True):
        assert_same_bits(without_rates(mine), without_rates(other))
    assert all_finite(state)
    steps = strict_lines(folder, "step")
    assert [line["step"] for line in steps] == [*range(1, BAD + 1)]
    assert isinstance(steps[-1]["loss"], str) == what.startswith("loss")
    assert isinstance(steps[-1]["grad_norm"], str)
    assert [line["kind"] for line in strict_lines(folder)][-3:] == ["final", "record", "end"]


def without_rates(state):
    """The optimizer's rate is set before the step that is not taken."""
    groups = [group | {"lr": 0.0} for group in state.get("param_groups", [])]
    return state | ({"param_groups": groups} if groups else {})


@pytest.mark.parametrize("what", ["loss nan", "gradient inf"])
def test_f48_resuming_such_a_run_trains_no_further(run, tmp_path, monkeypatch, what):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, what)
        first = train(run, folder)
    again = train(run, folder, resume=True)
    assert again.steps == first.steps == BAD
    assert again.final == first.final


# Weights, and the state of the optimizer ----------------------------------------------------------


def test_f48_a_finite_checkpoint_is_never_replaced_by_one_that_is_not(run, tmp_path, monkeypatch):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    train(run, whole)
    kept = []

    def keep(item):
        if isinstance(item, dict) and item.get("step") == 12:
            kept.append((folder / CHECKPOINT_FILE).read_bytes())

    with monkeypatch.context() as patch:
        spoil(patch, "moment")
        outcome = train(run, folder, on_item=keep)
    # The weights were lost in step 15, which the loss of the next one shows.
    assert outcome.final["reason"] == "the loss is not finite at step 16"
    assert outcome.final["final_loss"] is None
    assert (folder / CHECKPOINT_FILE).read_bytes() == kept[0]
    state = checkpoint.load(folder / CHECKPOINT_FILE)
    assert state["step"] == 10
    assert all_finite(state)
    # From there the run goes on as if nothing had been.
    train(run, folder, resume=True)
    assert_same_run(folder, whole)


@pytest.mark.parametrize("how", ["periodic", "last", "stopped"])
def test_f48_a_checkpoint_that_would_not_be_finite_ends_the_run(run, tmp_path, monkeypatch, how):
    folder = tmp_path / "run"
    spoil(monkeypatch, "moment")
    if how == "last":
        run = replace(run, steps=BAD)
    else:
        run = replace(run, checkpoint_every=5 if how == "periodic" else 10)
    outcome = train(run, folder, on_item=at_step(BAD, stop() if how == "stopped" else lambda: None))
    assert outcome.steps == BAD
    assert outcome.final["diverged"] is True
    assert outcome.final["reason"].startswith("after step 15 model.head.weight is not finite")
    assert checkpoint.load(folder / CHECKPOINT_FILE)["step"] == 10
    assert final(folder)["reason"] == outcome.final["reason"]


def test_f48_saving_what_is_not_finite_is_refused_and_names_the_tensor(run, tmp_path):
    trainer = Trainer(run)
    trainer.train_step()
    path = tmp_path / CHECKPOINT_FILE
    checkpoint.save(trainer.state(), path)
    before = path.read_bytes()
    moment = trainer.optimizers[0].state[trainer.model.head.weight]["exp_avg_sq"]
    moment.view(-1)[0] = torch.inf
    with pytest.raises(
        checkpoint.NotFiniteError, match=r"optimizers\.0\.state\.\d+\.exp_avg_sq is not finite"
    ):
        checkpoint.save(trainer.state(), path)
    assert path.read_bytes() == before


# Twins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, BAD])
def test_f48_the_other_arms_of_a_comparison_go_on(run, tmp_path, monkeypatch, step):
    """Also where a run has no finite loss at all."""
    spoil(monkeypatch, "loss nan", step=step, arm="none")
    grid = CompareConfig(base=replace(run, steps=20), arms=("none", "qk"), lrs=(1e-2,))
    none, qk = compare(grid, tmp_path)
    assert none["reason"] == f"the loss is not finite at step {step}"
    assert (none["initial_loss"] is None) == (step == 1)
    assert (qk["diverged"], qk["steps"]) == (False, 20)
    said = " ".join(words([none, qk]))
    assert f"none at 0.01 (seed 0) diverged: the loss is not finite at step {step}." in said
    page = write_report(load_runs(find_runs([tmp_path])), tmp_path / "report.html").read_text()
    assert "nan" not in said
    assert none["reason"] in page


def test_f48_an_arm_whose_rate_is_beyond_fp32_leaves_no_checkpoint(config, tmp_path):
    """The first step already makes every weight infinite."""
    run = arm(config, "none", lr=1e39, clip=None, warmup=0, schedule="constant")
    outcome = train(replace(run, checkpoint_every=1), tmp_path / "run")
    assert outcome.steps == 1
    assert "is not finite" in outcome.final["reason"]
    assert not (tmp_path / "run" / CHECKPOINT_FILE).exists()

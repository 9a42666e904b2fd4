"""Twins: one grid, the same weights and batches for all arms, and a summary that is true."""

import json
import signal
from dataclasses import asdict, replace

import pytest
import torch

from qknorm.lab import ARMS, CompareConfig, DataConfig, ModelConfig, TrainConfig, compare
from qknorm.lab.compare import sensitivities
from qknorm.lab.data import Dataset
from qknorm.lab.trainer import Trainer
from runs import final

KEYS = {"arm", "lr", "seed", "final_loss", "max_logit", "entropy_nats", "diverged"}
GRID = [(arm, lr, seed) for arm in ("none", "qk") for lr in (1e-3, 3e-2) for seed in (0, 1)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} green bottles hanging on the wall, {i * i}\n" for i in range(400)))
    return path


@pytest.fixture(scope="module")
def base(text):
    return TrainConfig(
        model=ModelConfig(layers=2, dim=32, heads=2),
        data=DataConfig(source=str(text)),
        steps=3,
        batch=2,
        context=16,
        warmup=0,
        eval_batches=2,
        stats_every=1,
    )


@pytest.fixture(scope="module")
def grid(base):
    return CompareConfig(base=base, arms=("none", "qk"), lrs=(1e-3, 3e-2), seeds=(0, 1))


@pytest.fixture(scope="module")
def compared(grid, tmp_path_factory):
    """The folder of a whole comparison and what it returned."""
    folder = tmp_path_factory.mktemp("compared") / "grid"
    return folder, compare(grid, folder)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def runs_of(folder):
    return sorted(path.parent for path in folder.glob("*/metrics.jsonl"))


def stop_at(run_index, step):
    def on_item(index, run, item):
        if index == run_index and isinstance(item, dict) and item.get("step") == step:
            signal.raise_signal(signal.SIGTERM)

    return on_item


def test_the_grid_has_every_arm_rate_and_seed_once(grid):
    runs = grid.runs()
    assert sorted((run.arm, run.lr, run.seed) for _, run in runs) == sorted(GRID)
    assert len({name for name, _ in runs}) == 8


def test_twins_differ_in_the_arm_and_in_nothing_else(grid):
    for _, run in grid.runs():
        attention = {"norm": None, "sink": "none", "cap": None}
        neutral = replace(run, arm="", gain_decay=0.0, model=replace(run.model, **attention))
        same = replace(grid.base, arm="", lr=run.lr, seed=run.seed, gain_decay=0.0)
        assert asdict(neutral) == asdict(replace(same, model=replace(same.model, **attention)))


def test_the_arm_with_gain_decay_is_trained_with_it_and_the_others_without(base):
    grid = CompareConfig(base=base, arms=tuple(ARMS))
    decays = {run.arm: run.gain_decay for _, run in grid.runs()}
    assert decays.pop("qk-decay") == ARMS["qk-decay"].gain_decay > 0
    assert set(decays.values()) == {0.0}


def test_the_summary_is_a_list_of_records_one_per_run(compared):
    folder, returned = compared
    summary = strict((folder / "summary.json").read_text())
    assert isinstance(summary, list)
    assert all(record.keys() >= KEYS for record in summary)
    assert sorted((r["arm"], r["lr"], r["seed"]) for r in summary) == sorted(GRID)
    assert [(r["arm"], r["lr"], r["seed"]) for r in returned] == [
        (r["arm"], r["lr"], r["seed"]) for r in summary
    ]


def test_the_numbers_of_the_summary_are_those_of_the_logs(compared):
    folder, returned = compared
    summary = strict((folder / "summary.json").read_text())
    ends = {}
    for run in runs_of(folder):
        end = final(run)
        ends[end["arm"], end["lr"], end["seed"]] = end
    assert len(ends) == len(summary) == len(returned) == 8
    for record, given in zip(summary, returned, strict=True):
        end = ends[record["arm"], record["lr"], record["seed"]]
        assert record == {key: end[key] for key in record}
        assert given["final_loss"] == pytest.approx(end["final_loss"], rel=1e-6)
        assert isinstance(record["diverged"], bool)
    assert len({record["final_loss"] for record in summary}) == 8


@pytest.mark.parametrize("arm", [name for name in ARMS if name != "none"])
def test_twins_start_from_identical_weights_where_shapes_agree(base, arm):
    grid = CompareConfig(base=base, arms=("none", arm), seeds=(3,))
    plain, other = (Trainer(run).model.state_dict() for _, run in grid.runs())
    assert plain.keys() <= other.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, other[name]), name
    assert plain["embed.weight"].std() > 0


def test_seeds_start_from_different_weights(base):
    grid = CompareConfig(base=base, arms=("qk",), seeds=(0, 1))
    first, second = (Trainer(run).model.embed.weight for _, run in grid.runs())
    assert not torch.equal(first, second)


def batches_of(grid, folder, monkeypatch):
    """The batches that each run was trained on, by arm, rate and seed."""
    seen = {}
    batch = Dataset.batch

    def spy(self, *args):
        inputs, targets = batch(self, *args)
        drawn.append(torch.cat([inputs, targets]).tolist())
        return inputs, targets

    def on_item(index, run, item):
        if isinstance(item, dict) and item["kind"] == "final":
            seen[run.arm, run.lr, run.seed] = drawn.copy()
            drawn.clear()

    drawn = []
    monkeypatch.setattr(Dataset, "batch", spy)
    compare(grid, folder, on_item=on_item)
    assert all(len(batches) == grid.base.steps for batches in seen.values())
    return seen


def test_twins_see_identical_batches(grid, tmp_path, monkeypatch):
    seen = batches_of(grid, tmp_path / "new", monkeypatch)
    for _, lr, seed in GRID:
        assert seen["none", lr, seed] == seen["qk", lr, seed]


def test_seeds_see_different_batches(grid, tmp_path, monkeypatch):
    seen = batches_of(grid, tmp_path / "new", monkeypatch)
    assert seen["qk", 1e-3, 0] != seen["qk", 1e-3, 1]


def test_a_comparison_is_the_same_when_it_is_made_again(grid, compared, tmp_path):
    compare(grid, tmp_path / "again")
    assert (tmp_path / "again/summary.json").read_text() == (compared[0] / "summary.json").read_text()


# Folders ----------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_comparison_is_refused_and_left_untouched(grid, compared):
    folder, _ = compared
    before = files(folder)
    with pytest.raises(ValueError, match="overwrite") as error:
        compare(grid, folder)
    assert "\n" not in str(error.value)
    assert files(folder) == before


def test_overwrite_replaces_the_comparison(base, tmp_path):
    grid = CompareConfig(base=base, lrs=(1e-2,))
    first = compare(grid, tmp_path)
    second = compare(replace(grid, base=replace(base, steps=5)), tmp_path, overwrite=True)
    assert [r["steps"] for r in first] == [3, 3]
    assert [r["steps"] for r in strict((tmp_path / "summary.json").read_text())] == [5, 5]
    assert [r["final_loss"] for r in first] != [r["final_loss"] for r in second]


def test_a_run_in_the_way_is_found_before_the_first_run_is_trained(grid, tmp_path):
    names = [name for name, _ in grid.runs()]
    assert compare(replace(grid, arms=("qk",), lrs=(3e-2,), seeds=(1,)), tmp_path) is not None
    (tmp_path / "summary.json").unlink()
    before = files(tmp_path)
    with pytest.raises(ValueError, match=names[-1]):
        compare(grid, tmp_path)
    assert files(tmp_path) == before


@pytest.mark.parametrize("what", ["source", "context", "vocab_size"])
def test_bad_input_is_refused_and_creates_nothing(grid, tmp_path, what):
    base = grid.base
    bad = {
        "source": replace(base, data=DataConfig(source=str(tmp_path / "no.txt"))),
        "context": replace(base, context=10_000),
        "vocab_size": replace(base, model=replace(base.model, vocab_size=40)),
    }[what]
    with pytest.raises(ValueError, match=r"\S") as error:
        compare(replace(grid, base=bad), tmp_path / "new")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_bad_arm_late_in_the_list_is_refused_before_the_first_is_trained(base, tmp_path):
    # A soft-cap is dense: with a named fast backend it is an unsupported combination.
    stock = replace(base, model=replace(base.model, backend="stock"))
    with pytest.raises(ValueError, match="stock"):
        compare(CompareConfig(base=stock, arms=("none", "softcap")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"arms": ()}, {"lrs": ()}, {"seeds": ()}, {"arms": ("qk", "qk")}, {"lrs": (0.1, 0.1)},
        {"seeds": (1, 1)}, {"arms": ("none", "qk-unknown")},
    ],
    ids=str,
)  # fmt: skip
def test_a_grid_that_means_nothing_is_refused(base, options):
    with pytest.raises(ValueError, match=r"\S"):
        CompareConfig(base=base, **options)


@pytest.mark.parametrize("lr", [-1e-3, 0.0, float("nan")])
def test_a_rate_that_means_nothing_is_refused_before_anything_is_trained(base, tmp_path, lr):
    with pytest.raises(ValueError, match="lr"):
        compare(CompareConfig(base=base, lrs=(1e-2, lr)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Stops ------------------------------------------------------------------------------------------


def test_a_stop_in_the_middle_of_a_run_gives_no_summary_and_no_further_run(grid, tmp_path):
    assert compare(grid, tmp_path, on_item=stop_at(1, 2)) is None
    assert not (tmp_path / "summary.json").exists()
    assert len(runs_of(tmp_path)) == 2
    assert (runs_of(tmp_path)[0] / "checkpoint.pt").exists()


def test_a_stop_in_the_last_step_of_a_run_starts_no_further_run(grid, tmp_path):
    assert compare(grid, tmp_path, on_item=stop_at(1, 3)) is None
    assert not (tmp_path / "summary.json").exists()
    assert len(runs_of(tmp_path)) == 2


def test_a_stop_while_overwriting_leaves_no_summary_of_the_old_runs(grid, base, tmp_path):
    compare(CompareConfig(base=base), tmp_path)
    assert (tmp_path / "summary.json").exists()
    assert compare(CompareConfig(base=base), tmp_path, overwrite=True, on_item=stop_at(1, 2)) is None
    assert not (tmp_path / "summary.json").exists()


# Results ----------------------------------------------------------------------------------------


def test_a_diverged_run_is_a_record_with_null_and_not_an_error(base, tmp_path):
    grid = CompareConfig(base=replace(base, clip=None), arms=("none",), lrs=(1e30,))
    assert len(compare(grid, tmp_path)) == 1
    (record,) = strict((tmp_path / "summary.json").read_text())
    assert record["diverged"] is True
    assert record["final_loss"] is None


def test_seven_rates_give_a_sensitivity_and_six_give_none(base, tmp_path):
    rates = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    grid = CompareConfig(base=replace(base, steps=2), arms=("none", "qk"), lrs=rates)
    summary = compare(grid, tmp_path)
    found = sensitivities(summary)
    for arm in ("none", "qk"):
        runs = [r for r in summary if r["arm"] == arm]
        initial = runs[0]["initial_loss"]
        assert {r["initial_loss"] for r in runs} == {initial}
        clipped = [min(r["final_loss"], initial) for r in runs]
        assert found[arm] == pytest.approx(sum(clipped) / 7 - min(clipped), abs=1e-6)
        assert found[arm] > 0
    assert sensitivities([r for r in summary if r["lr"] != 1e-2]) == {}

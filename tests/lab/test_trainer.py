"""The trainer: its optimizer, its options, an honest log."""

import copy
import math
import shutil
import time
from dataclasses import replace

import pytest
import torch

from qknorm.lab import TrainConfig, checkpoint, train
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.report import words, write_report
from qknorm.lab.runs import load_runs
from qknorm.lab.trainer import Trainer
from qknorm.monitor import Monitor, Record
from qknorm.monitor.record import ROUNDING
from runs import (
    arm,
    assert_same_bits,
    assert_same_run,
    at_step,
    final,
    strict_lines,
    without_clocks,
)

# The optimizer ----------------------------------------------------------------------------------


def test_the_schedule_warms_up_and_ends_at_a_tenth_of_the_peak():
    cosine = TrainConfig(lr=2.0, warmup=10, steps=110)
    assert cosine.rate(1) == pytest.approx(0.2)
    assert cosine.rate(5) == pytest.approx(1.0)
    assert cosine.rate(10) == pytest.approx(2.0)
    assert cosine.rate(60) == pytest.approx(1.1)  # half way: the mean of peak and end
    assert cosine.rate(35) == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 4)))
    assert cosine.rate(110) == pytest.approx(0.2)
    rates = [cosine.rate(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_the_constant_schedule_stays_at_the_peak_and_no_warm_up_starts_there():
    constant = TrainConfig(lr=2.0, warmup=10, steps=110, schedule="constant")
    assert constant.rate(5) == pytest.approx(1.0)
    assert {constant.rate(step) for step in range(10, 111)} == {2.0}
    assert TrainConfig(lr=2.0, warmup=0, steps=5, schedule="constant").rate(1) == 2.0


def test_the_logged_rate_is_that_of_the_schedule(config, tmp_path):
    run = replace(config, steps=25)
    train(run, tmp_path / "run")
    for line in strict_lines(tmp_path / "run", "step"):
        assert line["lr"] == pytest.approx(run.rate(line["step"]), rel=1e-6)


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
def test_weight_decay_is_independent_of_the_peak_rate(config, lr):
    run = replace(config, lr=lr, weight_decay=0.2, warmup=4, steps=12)
    trainer = Trainer(run)
    # Rows of bytes that the text has not: their gradient is zero, so that decay alone moves them.
    before = trainer.model.embed.weight[200:].detach().clone()
    expected = 1.0
    for step in range(1, 13):
        trainer.train_step()
        expected *= 1 - 0.2 * run.rate(step) / lr
        after = trainer.model.embed.weight[200:].detach()
        assert torch.allclose(after, before * expected, rtol=1e-5, atol=0)
    assert expected < 0.6


def test_gains_and_norms_do_not_decay(config):
    trainer = Trainer(replace(config, weight_decay=0.5))
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    decayed = {id(p) for g in groups.values() if g["weight_decay"] for p in g["params"]}
    for name, parameter in trainer.model.named_parameters():
        is_weight = parameter.ndim == 2 and not name.endswith("gain")
        assert (id(parameter) in decayed) == is_weight, name


def test_gain_decay_pulls_the_gain_to_one(config):
    run = arm(config, "qk-decay")
    assert run.gain_decay > 0
    run = replace(run, gain_decay=0.1, lr=1e-6, warmup=0, schedule="constant", steps=40)
    trainer = Trainer(run)
    norms = [layer.norm for layer in trainer.model.attention_layers()]
    with torch.no_grad():
        for norm in norms:
            for stored, value in zip(norm.parameters(), (2.0, -0.5), strict=True):
                stored.fill_(value)
    for _ in range(40):
        trainer.train_step()
    for norm in norms:
        q_gain, k_gain = norm.effective_gains()
        # Adam at a rate of 1e-6 moves them by 4e-5 at most; the decay by 0.9 a step.
        assert torch.allclose(q_gain, torch.full_like(q_gain, 1 + 2 * 0.9**40), atol=1e-4)
        assert torch.allclose(k_gain, torch.full_like(k_gain, 1 - 0.5 * 0.9**40), atol=1e-4)


def test_clipping_limits_the_step_and_the_log_shows_the_norm_before_it(config, monkeypatch):
    loose, tight = (Trainer(replace(config, clip=clip, z_loss=0.0)) for clip in (None, 1e-3))
    grads = []
    for trainer in (loose, tight):
        step = trainer.optimizers[0].step

        def spy(step=step, trainer=trainer):
            grads.append([p.grad.norm() for p in trainer.model.parameters()])
            return step()

        monkeypatch.setattr(trainer.optimizers[0], "step", spy)
    records = [trainer.train_step()[-1] for trainer in (loose, tight)]
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-6)
    assert records[0]["grad_norm"] > 0.1
    norms = [float(torch.stack(norms).norm()) for norms in grads]
    assert norms[0] == pytest.approx(records[0]["grad_norm"], rel=1e-5)
    assert norms[1] == pytest.approx(1e-3, rel=1e-3)
    for trainer in (loose, tight):
        trainer.close()


def test_z_loss_is_the_mean_squared_log_of_the_denominator_and_not_in_the_logged_loss(
    config, monkeypatch
):
    with_z, without = (Trainer(replace(config, z_loss=z, clip=None)) for z in (0.3, 0.0))
    inputs, targets = with_z.data.batch(config.seed, 1, config.batch, config.context)
    twin = copy.deepcopy(with_z.model)
    log_probabilities = twin(inputs).log_softmax(-1)
    loss = -log_probabilities.gather(-1, targets[..., None]).mean()
    z = torch.logsumexp(twin(inputs), -1).square().mean()
    (loss + 0.3 * z).backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    found = {}
    step = with_z.optimizers[0].step

    def spy():
        found.update({name: p.grad.clone() for name, p in with_z.model.named_parameters()})
        return step()

    monkeypatch.setattr(with_z.optimizers[0], "step", spy)
    assert with_z.train_step()[-1]["loss"] == without.train_step()[-1]["loss"]
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-6), name
    for trainer in (with_z, without):
        trainer.close()


def test_the_loss_is_cross_entropy_in_nats_per_token(config):
    trainer = Trainer(config)
    inputs, targets = trainer.data.batch(config.seed, 1, config.batch, config.context)
    with torch.no_grad():
        logits = trainer.model(inputs).double()
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    record = trainer.train_step()[-1]
    assert record["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert record["loss"] == pytest.approx(math.log(256), abs=0.1)


def test_training_lowers_the_loss_on_text_it_has_not_seen(config, tmp_path):
    outcome = train(replace(config, steps=60), tmp_path / "run")
    assert outcome.final["final_loss"] < outcome.final["initial_loss"] - 0.5
    assert outcome.final["diverged"] is False
    assert outcome.final["reason"] is None


def test_seeds_change_the_run_and_nothing_else_does(config, tmp_path):
    run = replace(config, steps=3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)
        train(replace(run, seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    losses = [[line["loss"] for line in strict_lines(tmp_path / n, "step")] for n in ("a", "c")]
    assert losses[0] != losses[1]


# Options ----------------------------------------------------------------------------------------


def test_bf16_autocast_trains_with_weights_in_fp32_and_a_bound_that_covers_bf16(config, tmp_path):
    run = replace(config, steps=30, dtype="bfloat16", stats_every=1)
    outcome = train(run, tmp_path / "bf16")
    train(replace(run, dtype="float32"), tmp_path / "fp32")
    assert outcome.final["final_loss"] < outcome.final["initial_loss"] - 0.3
    state = checkpoint.load(tmp_path / "bf16" / CHECKPOINT_FILE)
    assert {p.dtype for p in state["model"].values()} == {torch.float32}
    losses = [[x["loss"] for x in strict_lines(tmp_path / n, "step")] for n in ("bf16", "fp32")]
    assert losses[0] != losses[1]
    assert losses[0][:10] == pytest.approx(losses[1][:10], rel=0.02)
    assert_bounded(tmp_path / "bf16", ROUNDING)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_a_compiled_run_follows_the_eager_one(config, tmp_path):
    run = replace(config, model=replace(config.model, layers=1), steps=3, stats_every=1)
    train(replace(run, compile=True), tmp_path / "compiled")
    train(run, tmp_path / "eager")
    pairs = zip(strict_lines(tmp_path / "compiled"), strict_lines(tmp_path / "eager"), strict=True)
    seen = set()
    for compiled, eager in pairs:
        assert compiled["kind"] == eager["kind"]
        for key in ("loss", "grad_norm", "max_logit", "entropy_nats", "final_loss"):
            if key in eager:
                assert compiled[key] == pytest.approx(eager[key], rel=1e-3)
                seen.add(key)
        for name, layer in eager.get("layers", {}).items():
            for key in ("max_logit", "entropy_nats", "entropy_ratio"):
                assert compiled["layers"][name][key] == pytest.approx(layer[key], rel=1e-3)
                seen.add(f"{eager['phase']} {key}")
    assert len(seen) == 5 + 2 * 3


def test_tensorboard_files_hold_the_logged_numbers_once_also_of_a_run_that_crashed(config, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    run = replace(config, steps=8, tensorboard=True, checkpoint_every=3)
    with pytest.raises(ZeroDivisionError):
        train(run, folder, on_item=at_step(5, lambda: 1 / 0))
    time.sleep(1)  # files are named by the second, and are read in the order of their names
    train(run, folder, resume=True)
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()

    def shown(name):
        found = events.Scalars(name)
        values = {event.step: event.value for event in found}
        assert len(values) == len(found)
        return values

    for name in ("loss", "grad_norm"):
        logged = {line["step"]: line[name] for line in strict_lines(folder, "step")}
        assert shown(name) == pytest.approx(logged, rel=1e-5)
    # The monitor's own names, each on the step of its loss.
    for name, phase, steps in (("attention", "train", [7]), ("attention_eval", "eval", [8])):
        records = [line for line in strict_lines(folder, "record") if line["phase"] == phase]
        assert [line["step"] for line in records] == steps
        tops = {r["step"]: max(max(x["max_logit"]) for x in r["layers"].values()) for r in records}
        assert shown(f"{name}/max_logit") == pytest.approx(tops, rel=1e-5)
        assert shown(f"{name}/entropy_nats_lowest_layer").keys() == tops.keys()


# The log ----------------------------------------------------------------------------------------


def assert_bounded(folder, rounding=1.0):
    """There is a bound, and no head passes it, in every layer of every record."""
    records = strict_lines(folder, "record")
    assert {line["phase"] for line in records} == {"train", "eval"}
    for line in records:
        assert len(line["layers"]) == 2
        for layer in line["layers"].values():
            assert max(layer["max_logit"]) <= layer["bound"] * rounding


@pytest.mark.parametrize("name", ["qk", "qk-full", "qk-after-rope", "softcap", "qk-decay"])
def test_the_measured_maximum_stays_within_the_bound_on_every_logged_step(config, tmp_path, name):
    # Heads of two entries come close to their bound, and a bold rate moves the gains.
    narrow = replace(config, model=replace(config.model, head_dim=2), stats_every=1, steps=40)
    train(arm(narrow, name, lr=1e-1, warmup=0, schedule="constant"), tmp_path / "run")
    assert_bounded(tmp_path / "run")


def test_the_bound_of_a_step_is_that_of_the_gains_that_were_measured(config):
    """Gains that shrink in the step must not put the bound below what was seen before it."""
    run = arm(replace(config, model=replace(config.model, head_dim=2)), "qk-decay")
    trainer = Trainer(replace(run, gain_decay=0.5, warmup=0, lr=1e-3, stats_every=1, batch=16))
    with torch.no_grad():
        for layer in trainer.model.attention_layers():
            for stored in layer.norm.parameters():
                stored.fill_(3.0)  # a gain of 4, and of 2.5 after the step
    record, line = trainer.train_step()
    assert isinstance(record, Record)
    assert record.step == line["step"] == 1
    for layer in record.layers.values():
        assert layer.gain_max == (4.0, 4.0)
        # scale * D * 4 * 4
        assert layer.bound == pytest.approx(2**-0.5 * 2 * 4 * 4)
        assert layer.top <= layer.bound


@pytest.mark.parametrize("name", ["none", "qk", "softcap", "qk+sink"])
def test_every_line_is_strict_json_with_the_promised_shapes(config, tmp_path, name):
    model = replace(config.model, layers=3, heads=4, kv_heads=2)
    outcome = train(arm(replace(config, model=model, steps=15), name), tmp_path / "run")
    folder = tmp_path / "run"
    kinds = [line["kind"] for line in strict_lines(folder) if line["kind"] != "alert"]
    # What was seen of a step stands before its line.
    steps = [*["step"] * 6, "record", *["step"] * 7, "record", *["step"] * 2]
    assert kinds == [*steps, "final", "record", "end"]
    for line in strict_lines(folder, "step"):
        for key in ("loss", "grad_norm", "lr", "step_ms", "tokens_per_s"):
            assert line[key] > 0
        assert line["tokens_per_s"] == pytest.approx(2 * 16 / (line["step_ms"] / 1e3), rel=1e-3)
    records = strict_lines(folder, "record")
    assert [(r["phase"], r["step"]) for r in records] == [("train", 7), ("train", 14), ("eval", 15)]
    for record in records:
        assert list(record["layers"]) == [f"blocks.{i}.attention" for i in range(3)]
        assert record["silent"] == {}
        for layer in record["layers"].values():
            for key in ("max_logit", "entropy_nats", "entropy_ratio", "q_rms", "q_rms_cv"):
                assert len(layer[key]) == 4
                assert all(isinstance(x, float) for x in layer[key])
            assert len(layer["k_rms"]) == 2
            assert all(0 <= x <= math.log(16) for x in layer["entropy_nats"])
            assert all(0 <= x <= 1 for x in layer["entropy_ratio"])
            assert (layer["bound"] is None) == (name == "none")
            assert (layer["gain_max"] is None) == (name in ("none", "softcap"))
            assert (layer["sink_mass"] is None) == ("sink" not in name)
            assert all(0 < x < 1 for x in layer["sink_mass"] or [])
    end = final(folder)
    assert (end["arm"], end["lr"], end["seed"], end["steps"]) == (name, 1e-2, 0, 15)
    assert end["initial_loss"] == pytest.approx(strict_lines(folder, "step")[0]["loss"], rel=1e-6)
    assert end["final_loss"] == pytest.approx(outcome.final["final_loss"], rel=1e-6)
    # The two numbers are those of the last evaluation.
    layers = records[-1]["layers"].values()
    assert end["max_logit"] == pytest.approx(max(max(x["max_logit"]) for x in layers), rel=1e-6)
    lowest = min(sum(x["entropy_nats"]) / 4 for x in layers)
    assert end["entropy_nats"] == pytest.approx(lowest, rel=1e-5)


def test_a_monitor_that_sees_nothing_costs_the_run_nothing_but_its_records(
    config, tmp_path, monkeypatch
):
    for name in ("step", "flush"):
        monkeypatch.setattr(Monitor, name, lambda self: [])
    folder = tmp_path / "run"
    outcome = train(replace(config, steps=20), folder)
    assert outcome.final["final_loss"] < outcome.final["initial_loss"]
    assert (outcome.final["max_logit"], outcome.final["entropy_nats"]) == (None, None)
    assert [line["layers"] for line in strict_lines(folder, "record")] == [{}]
    (run,) = load_runs([folder])
    assert run.end is None
    assert "its attention was not measured" in words([run.final])[0]
    assert "not measured" in write_report([run], tmp_path / "r.html").read_text()


def test_watching_or_not_gives_the_same_run(config, tmp_path):
    run = replace(config, steps=20)
    for every in (0, 1):
        train(replace(run, stats_every=every), tmp_path / str(every))
    states = [checkpoint.load(tmp_path / n / CHECKPOINT_FILE) for n in "01"]
    assert_same_bits(states[0]["model"], states[1]["model"])
    records = [[line["phase"] for line in strict_lines(tmp_path / n, "record")] for n in "01"]
    assert records == [["eval"], [*["train"] * 20, "eval"]]


def test_on_item_sees_what_is_logged(config, tmp_path):
    seen = []
    train(replace(config, steps=8), tmp_path / "run", on_item=seen.append)
    lines = strict_lines(tmp_path / "run")
    kinds = [x["kind"] if isinstance(x, dict) else type(x).__name__.lower() for x in seen]
    assert [*kinds, "end"] == [line["kind"] for line in lines]
    losses = [item["loss"] for item in seen if isinstance(item, dict) and item["kind"] == "step"]
    assert losses == [line["loss"] for line in strict_lines(tmp_path / "run", "step")]


def test_a_line_is_in_the_file_when_it_is_reported(config, tmp_path):
    folder = tmp_path / "run"
    counts = []
    train(
        replace(config, steps=5), folder, on_item=lambda item: counts.append(len(strict_lines(folder)))
    )
    assert counts == [1, 2, 3, 4, 5, 6, 7]
    assert len(strict_lines(folder)) == 8


def test_a_loss_that_is_not_finite_stops_the_run_and_is_recorded_as_diverged(config, tmp_path):
    run = arm(config, "none", lr=1e30, clip=None, warmup=0, schedule="constant")
    outcome = train(run, tmp_path / "run")
    assert outcome.steps < 60
    assert outcome.final["diverged"] is True
    steps, end = strict_lines(tmp_path / "run", "step"), final(tmp_path / "run")
    assert end["diverged"] is True
    assert "finite" in end["reason"]
    assert end["final_loss"] is None
    assert end["steps"] == outcome.steps == steps[-1]["step"]
    assert steps[-1]["loss"] in ("NaN", "Infinity")
    assert all(isinstance(line["loss"], float) for line in steps[:-1])


def test_resuming_what_has_diverged_trains_no_further(config, tmp_path):
    run = arm(config, "none", lr=1e30, clip=None, warmup=0, schedule="constant")
    first = train(run, tmp_path / "run")
    before = without_clocks(tmp_path / "run")
    again = train(run, tmp_path / "run", resume=True)
    assert again.steps == first.steps
    assert without_clocks(tmp_path / "run") == before

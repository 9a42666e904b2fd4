"""The trainer: its optimizer, its options, an honest log."""

import copy
import math
import shutil
from dataclasses import replace

import pytest
import torch

from qknorm.lab import TrainConfig, checkpoint, train
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.trainer import Trainer
from runs import arm, assert_same_bits, assert_same_run, strict_lines, without_clocks

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
    for line in strict_lines(tmp_path / "run")[:-1]:
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
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
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
        step = trainer.optimizer.step

        def spy(step=step, trainer=trainer):
            grads.append([p.grad.norm() for p in trainer.model.parameters()])
            return step()

        monkeypatch.setattr(trainer.optimizer, "step", spy)
    records = [trainer.train_step() for trainer in (loose, tight)]
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-6)
    assert records[0]["grad_norm"] > 0.1
    norms = [float(torch.stack(norms).norm()) for norms in grads]
    assert norms[0] == pytest.approx(records[0]["grad_norm"], rel=1e-5)
    assert norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_z_loss_is_the_mean_squared_log_of_the_denominator_and_not_in_the_logged_loss(
    config, monkeypatch
):
    with_z, without = (Trainer(replace(config, z_loss=z, clip=None)) for z in (0.3, 0.0))
    inputs, targets = with_z.data.batch(config.seed, 1, config.batch, config.context)
    twin = copy.deepcopy(with_z.model)
    log_probabilities = twin(inputs)[0].log_softmax(-1)
    loss = -log_probabilities.gather(-1, targets[..., None]).mean()
    z = torch.logsumexp(twin(inputs)[0], -1).square().mean()
    (loss + 0.3 * z).backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    found = {}
    step = with_z.optimizer.step

    def spy():
        found.update({name: p.grad.clone() for name, p in with_z.model.named_parameters()})
        return step()

    monkeypatch.setattr(with_z.optimizer, "step", spy)
    assert with_z.train_step()["loss"] == without.train_step()["loss"]
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-6), name


def test_the_loss_is_cross_entropy_in_nats_per_token(config):
    trainer = Trainer(config)
    inputs, targets = trainer.data.batch(config.seed, 1, config.batch, config.context)
    with torch.no_grad():
        logits = trainer.model(inputs)[0].double()
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    record = trainer.train_step()
    assert record["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert record["loss"] == pytest.approx(math.log(256), abs=0.1)


def test_training_lowers_the_loss_on_text_it_has_not_seen(config, tmp_path):
    outcome = train(replace(config, steps=60), tmp_path / "run")
    assert outcome.record["final_loss"] < outcome.record["initial_loss"] - 0.5
    assert outcome.record["diverged"] is False
    assert outcome.record["reason"] is None


def test_seeds_change_the_run_and_nothing_else_does(config, tmp_path):
    run = replace(config, steps=3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)
        train(replace(run, seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    losses = [[line["loss"] for line in strict_lines(tmp_path / n)[:-1]] for n in ("a", "c")]
    assert losses[0] != losses[1]


# Options ----------------------------------------------------------------------------------------


def test_bf16_autocast_trains_with_weights_in_fp32_and_a_bound_that_covers_bf16(config, tmp_path):
    run = replace(config, steps=30, dtype="bfloat16", stats_every=1)
    outcome = train(run, tmp_path / "bf16")
    train(replace(run, dtype="float32"), tmp_path / "fp32")
    assert outcome.record["final_loss"] < outcome.record["initial_loss"] - 0.3
    state = checkpoint.load(tmp_path / "bf16" / CHECKPOINT_FILE)
    assert {p.dtype for p in state["model"].values()} == {torch.float32}
    losses = [[x["loss"] for x in strict_lines(tmp_path / n)[:-1]] for n in ("bf16", "fp32")]
    assert losses[0] != losses[1]
    assert losses[0][:10] == pytest.approx(losses[1][:10], rel=0.02)
    assert_bounded(strict_lines(tmp_path / "bf16"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_a_compiled_run_follows_the_eager_one(config, tmp_path):
    run = replace(config, model=replace(config.model, layers=1), steps=3, stats_every=1)
    train(replace(run, compile=True), tmp_path / "compiled")
    train(run, tmp_path / "eager")
    pairs = zip(strict_lines(tmp_path / "compiled"), strict_lines(tmp_path / "eager"), strict=True)
    for compiled, eager in pairs:
        for key in ("loss", "grad_norm", "max_logit", "entropy_nats", "final_loss"):
            if key in eager:
                assert compiled[key] == pytest.approx(eager[key], rel=1e-3)


def test_tensorboard_files_hold_the_logged_numbers(config, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    train(replace(config, steps=8, tensorboard=True), folder)
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps = strict_lines(folder)[:-1]
    for name in ("loss", "grad_norm", "max_logit", "entropy_nats"):
        logged = {line["step"]: line[name] for line in steps if name in line}
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx(logged, rel=1e-5)
        assert shown


# The log ----------------------------------------------------------------------------------------


def assert_bounded(lines):
    """Measured at most the bound, for every head of every line that has both."""
    watched = [line["layers"] for line in lines if "layers" in line]
    assert watched
    for layers in watched:
        for measured, bounds in zip(layers["max_logit"], layers["bound"], strict=True):
            for x, bound in zip(measured, bounds, strict=True):
                assert x <= bound


@pytest.mark.parametrize("name", ["qk", "qk-full", "qk-after-rope", "softcap", "qk-decay"])
def test_the_measured_maximum_stays_within_the_bound_on_every_logged_step(config, tmp_path, name):
    # Heads of two entries come close to their bound, and a bold rate moves the gains.
    narrow = replace(config, model=replace(config.model, head_dim=2), stats_every=1, steps=40)
    train(arm(narrow, name, lr=1e-1, warmup=0, schedule="constant"), tmp_path / "run")
    assert_bounded(strict_lines(tmp_path / "run"))


def test_the_bound_of_a_step_is_that_of_the_gains_that_were_measured(config):
    """Gains that shrink in the step must not put the bound below what was seen before it."""
    run = arm(replace(config, model=replace(config.model, head_dim=2)), "qk-decay")
    trainer = Trainer(replace(run, gain_decay=0.5, warmup=0, lr=1e-3, stats_every=1, batch=16))
    with torch.no_grad():
        for layer in trainer.model.attention_layers():
            for stored in layer.norm.parameters():
                stored.fill_(3.0)  # a gain of 4, and of 2.5 after the step
    bound = trainer.model.logit_bounds(run.context)
    layers = trainer.train_step()["layers"]
    assert torch.allclose(layers["bound"], bound)
    assert (layers["max_logit"] <= layers["bound"]).all()


@pytest.mark.parametrize("name", ["none", "qk", "softcap", "qk+sink"])
def test_every_line_is_strict_json_with_the_promised_shapes(config, tmp_path, name):
    model = replace(config.model, layers=3, heads=4, kv_heads=2)
    outcome = train(arm(replace(config, model=model, steps=15), name), tmp_path / "run")
    lines = strict_lines(tmp_path / "run")
    assert [line["kind"] for line in lines] == ["step"] * 15 + ["final"]
    for line in lines[:-1]:
        for key in ("loss", "grad_norm", "lr", "step_ms", "tokens_per_s"):
            assert line[key] > 0
        assert line["tokens_per_s"] == pytest.approx(2 * 16 / (line["step_ms"] / 1e3), rel=1e-3)
    watched = [line for line in lines if "layers" in line]
    assert [line["step"] for line in watched[:-1]] == [1, 7, 14]
    for line in watched:
        layers = line["layers"]
        tables = ["max_logit", "entropy_nats", "entropy_ratio", "sink_mass"]
        if name == "none":
            assert layers["bound"] is None
        else:
            tables.append("bound")
        for key in tables:
            assert [len(row) for row in layers[key]] == [4, 4, 4], key
            assert all(isinstance(x, float) for row in layers[key] for x in row), key
        assert line["max_logit"] == max(map(max, layers["max_logit"]))
        entropy = min(sum(row) / 4 for row in layers["entropy_nats"])
        assert line["entropy_nats"] == pytest.approx(entropy, rel=1e-5)
        flat = [x for row in layers["entropy_nats"] for x in row]
        assert all(0 <= x <= math.log(16) for x in flat)
        assert all(0 <= x <= 1 for row in layers["entropy_ratio"] for x in row)
        sinks = [x for row in layers["sink_mass"] for x in row]
        assert all(0 < x < 1 if "sink" in name else x == 0 for x in sinks)
    final = lines[-1]
    assert (final["arm"], final["lr"], final["seed"], final["steps"]) == (name, 1e-2, 0, 15)
    assert final["initial_loss"] == lines[0]["loss"]
    assert final["final_loss"] == pytest.approx(outcome.record["final_loss"], rel=1e-6)


def test_watching_or_not_gives_the_same_run(config, tmp_path):
    run = replace(config, steps=20)
    for every in (0, 1):
        train(replace(run, stats_every=every), tmp_path / str(every))
    states = [checkpoint.load(tmp_path / n / CHECKPOINT_FILE) for n in "01"]
    assert_same_bits(states[0]["model"], states[1]["model"])
    assert [line["kind"] for line in strict_lines(tmp_path / "0") if "layers" in line] == ["final"]


def test_on_record_sees_what_is_logged(config, tmp_path):
    seen = []
    train(replace(config, steps=8), tmp_path / "run", on_record=seen.append)
    lines = strict_lines(tmp_path / "run")
    assert [r["kind"] for r in seen] == [line["kind"] for line in lines]
    assert [r.get("loss") for r in seen] == pytest.approx([line.get("loss") for line in lines])


def test_a_line_is_in_the_file_when_it_is_reported(config, tmp_path):
    folder = tmp_path / "run"
    counts = []
    train(replace(config, steps=5), folder, on_record=lambda r: counts.append(len(strict_lines(folder))))
    assert counts == [1, 2, 3, 4, 5, 6]


def test_a_loss_that_is_not_finite_stops_the_run_and_is_recorded_as_diverged(config, tmp_path):
    run = arm(config, "none", lr=1e30, clip=None, warmup=0, schedule="constant")
    outcome = train(run, tmp_path / "run")
    assert outcome.steps < 60
    assert outcome.record["diverged"] is True
    lines = strict_lines(tmp_path / "run")
    final = lines[-1]
    assert final["kind"] == "final"
    assert final["diverged"] is True
    assert "finite" in final["reason"]
    assert final["final_loss"] is None
    assert final["steps"] == outcome.steps == lines[-2]["step"]
    assert lines[-2]["loss"] is None
    assert all(line["loss"] is not None for line in lines[:-2])


def test_resuming_what_has_diverged_trains_no_further(config, tmp_path):
    run = arm(config, "none", lr=1e30, clip=None, warmup=0, schedule="constant")
    first = train(run, tmp_path / "run")
    before = without_clocks(tmp_path / "run")
    again = train(run, tmp_path / "run", resume=True)
    assert again.steps == first.steps
    assert without_clocks(tmp_path / "run") == before

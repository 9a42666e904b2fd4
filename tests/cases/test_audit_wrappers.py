"""A model inside something that hides its arguments, and projections inside adapters (F45).

Shapes: B batch, T tokens, H heads, D head width.
"""

import pytest
import torch
from torch import nn

from audited import (
    Layer,
    assert_sound,
    formula_of,
    hugging_face,
    model_of,
    normed,
    of,
    only,
    rms,
    tokens,
)
from qknorm.auditor import audit


class Anything(nn.Module):
    """Takes whatever what it holds does."""

    def __init__(self, inner, *, named=True):
        super().__init__()
        self.inner = inner
        if not named:
            self.forward = lambda *args: self.inner(*args)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Positional(nn.Module):
    """Does not say what its arguments are called, and has more than one child."""

    def __init__(self, model):
        super().__init__()
        self.model, self.other = model, nn.Identity()

    def forward(self, tokens, /):
        return self.other(self.model(tokens))


@pytest.mark.parametrize("wrap", ["any", "twice", "args", "positional", "star", "data parallel"])
def test_f45_a_wrapper_is_audited(wrap):
    model = of(Layer)
    names = ["layers.0", "layers.1"]
    if wrap == "data parallel":
        made = nn.DataParallel(model)
    elif wrap == "positional":
        made = Positional(model)
        names = [f"model.{name}" for name in names]
    else:
        made = Anything(model, named=wrap != "args")
        made = Anything(made) if wrap == "twice" else made
        names = [("inner.inner." if wrap == "twice" else "inner.") + name for name in names]
        if wrap == "star":
            made.other = nn.Identity()  # nothing tells which child has the names
    assert_sound(audit(made, tokens()), names)
    model.layers[1].value = rms
    assert only(audit(made, tokens()), "QK003")[0].layer == names[1]
    if wrap in ("any", "data parallel"):
        assert only(audit(made, {"tokens": tokens()}), "QK003")[0].layer == names[1]


def test_f45_ddp_is_audited_and_trains_on(tmp_path):
    from torch import distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(of(Layer))
        assert_sound(audit(model, tokens()))
        for _ in range(2):  # an audit that left gradients half reduced would end this
            model(tokens()).sum().backward()
        model.module.layers[0].value = rms
        assert only(audit(model, tokens()), "QK003")[0].layer == "layers.0"
    finally:
        distributed.destroy_process_group()


def test_f45_a_hugging_face_model_in_a_wrapper_or_with_inputs_of_its_own():
    model = hugging_face()
    ids = torch.randint(5, 64, (2, 12))
    for made, inputs in ((Anything(model), None), (Anything(model), ids), (model, ids), (model, (ids,))):
        report = audit(made, inputs)
        prefix = "" if made is model else "inner."
        assert_sound(report, [f"{prefix}model.layers.{n}.self_attn" for n in range(2)])
        paths = next(text for text in report.exercised if text.startswith("paths"))
        assert {"eager", "sdpa", "decode"} == set(paths.removeprefix("paths: ").split(", "))


class LoRA(nn.Module):
    """Beside a frozen projection, as PEFT has it."""

    def __init__(self, base, *, is_new, scale):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 3, bias=False)
        self.b = nn.Linear(3, base.out_features, bias=False)
        self.scale = scale
        if is_new:
            nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x))


@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("is_new", [True, False])
def test_f45_projections_with_adapters(is_new, scale):
    model = model_of(normed, layers=2)
    for layer in model.layers:
        for side in "qv":
            setattr(layer, side, LoRA(getattr(layer, side), is_new=is_new, scale=scale))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = audit(model, tokens(), trained=True)
    assert_sound(report)
    assert formula_of(report).eps == pytest.approx(1e-6, rel=0.05)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    (layer, _) = model.layers
    wanted = layer.q_gain.detach().double()
    torch.testing.assert_close(formula_of(report).q_gain_values, wanted, atol=1e-3, rtol=0)
    # An adapter that is not called at all is still found.
    model.layers[1].k.idle = nn.Linear(3, 3)
    assert only(audit(model, tokens()), "QK009")[0].layer == "layers.1"


def test_f45_a_last_projection_that_begins_at_0_lets_the_others_do_something():
    model = of(Layer)
    for layer in model.layers:
        nn.init.zeros_(layer.out.weight)
    assert_sound(audit(model, tokens()))
    assert not any(bool(layer.out.weight.any()) for layer in model.layers)

"""What a monitor must survive, and what must survive a monitor."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from made import layer, record
from qknorm.monitor import Alerts, Monitor, Record
from qknorm.monitor.taps import functional
from qknorm.nn import Attention, AttentionConfig
from test_taps import CAUSAL, B, C, D, H, Plain, T, agree, dense

KINDS = {
    "sdpa": Plain,
    "multihead": lambda: nn.MultiheadAttention(C, H, batch_first=True),
    "own": lambda: Attention(AttentionConfig(dim=C, num_heads=H)),
}


def call(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
    return out[0] if isinstance(out, tuple) else out


# Copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("detached", [False, True])
def test_a_copy_of_a_watched_module_computes_with_its_own_weights(kind: str, detached: bool) -> None:
    torch.manual_seed(0)
    module, x = KINDS[kind](), torch.randn(B, T, C)
    monitor = Monitor.attach(module, every=1)
    made = [copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module))]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    made.append(torch.load(file, weights_only=False))
    if detached:
        monitor.detach()
    before = call(module, x)
    for one in made:
        assert torch.equal(call(one, x), before)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(call(one, x), before)
        Monitor.attach(one, every=1).detach()  # it is nobody's
    assert torch.equal(call(module, x), before)
    monitor.detach()


def test_an_average_of_the_weights_is_one() -> None:
    torch.manual_seed(0)
    module, x = Plain(), torch.randn(B, T, C)
    with Monitor.attach(module, every=1):
        average = AveragedModel(module)
        before = call(average, x)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        assert torch.equal(call(average, x), before)
        average.update_parameters(module)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        Monitor.attach(nn.DataParallel(Plain()))


# Failures -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Attention of whatever it is given."""

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, **options)


class Mine(Tensor):
    """A mask of a type that nobody knows."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_not_understood_costs_the_record_and_not_the_training(
    fails: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer is named with the reason, and only the call that cannot be measured is left out."""
    module = nn.ModuleDict({"odd": Odd(), "plain": Plain()})
    q, mask = torch.randn(B, H, T, D), torch.zeros(T, T).as_subclass(Mine)
    options = {} if fails else {"attn_mask": mask}
    expected = module["odd"](q, q, **options)

    def fail(*_: Any) -> None:
        raise RuntimeError("something broke")

    with Monitor.attach(module, every=1) as monitor:
        layer = monitor.layers["odd"]
        for _ in range(2):
            with monkeypatch.context() as broken:
                if fails:
                    broken.setattr(layer, "measure", fail)
                assert torch.equal(module["odd"](q, q, **options), expected)
            module["plain"](torch.randn(B, T, C))
            (found,) = monitor.step()
            assert list(found.layers) == ["plain"]
            assert ("something broke" if fails else "a mask of type Mine") in found.silent["odd"]
        module["odd"](q, q)
        with monkeypatch.context() as broken:
            if fails:
                broken.setattr(layer, "measure", fail)
            module["odd"](q, q, **options)
        record = monitor.step()[0].layers["odd"]
        assert record.rows == B * T
        assert record.note
    assert sum("odd: something was not measured" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize(
    ("shapes", "four"),
    [(((T, D), (T, D)), (1, 1)), (((1, H, T, D), (B, H, T, D)), (B, H))],
    ids=["two axes", "one query for a batch of keys"],
)
def test_a_call_of_odd_shape_is_measured(shapes: tuple[Any, Any], four: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module, (q, k) = Odd(), (torch.randn(shape) for shape in shapes)
    with Monitor.attach(module, every=1) as monitor:
        module(q, k)
        found = monitor.step()[0].layers[""]
    q, k = (x.expand(*four, T, D) for x in (q, k))
    agree(found, dense(q, k, torch.ones_like(CAUSAL)))


def test_f30_nested_sequences_are_measured_each_by_itself_and_dense_calls_after_them() -> None:
    torch.manual_seed(0)
    lengths = (T, 5, 12)
    parts = [torch.randn(n, H, D) for n in lengths]
    dense_parts = [part.transpose(0, 1)[None] for part in parts]
    x = torch.randn(B, H, T, D)
    for layout in (torch.jagged, torch.strided):  # torch serves no causal ones on a CPU
        module = Odd()
        q = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
        q = q.contiguous() if layout == torch.strided else q
        before = module(q, q)
        with Monitor.attach(module, every=1) as monitor:
            assert all(map(torch.equal, before.unbind(), module(q, q).unbind()))
            nested = monitor.step()[0].layers[""]
            for part in dense_parts:
                module(part, part)
            one_by_one = monitor.step()[0].layers[""]
            module(x, x, is_causal=True)
            agree(monitor.step()[0].layers[""], dense(x, x, CAUSAL))
        assert nested == one_by_one
        assert nested.rows == sum(lengths)


def test_f30_nested_input_of_multihead_attention() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(C, H, batch_first=True).eval()
    parts = [torch.randn(n, C) for n in (T, 5)]
    x = torch.nested.nested_tensor(parts)
    with torch.no_grad(), Monitor.attach(module, every=1) as monitor:
        module(x, x, x, need_weights=False)
        nested = monitor.step()[0].layers[""]
        for part in parts:
            module(part, part, part, need_weights=False)
        assert monitor.step()[0].layers[""] == nested


def test_a_function_on_a_class_stays_one() -> None:
    class OnClass(nn.Module):
        attend = F.scaled_dot_product_attention  # a builtin: no method

        def forward(self, q: Tensor) -> Tensor:
            return self.attend(q, q, q)

    module, q = OnClass(), torch.randn(B, H, T, D)
    expected = module(q)
    with Monitor.attach(module, every=1) as monitor:
        assert torch.equal(module(q), expected)
        agree(monitor.step()[0].layers[""], dense(q, q, torch.ones_like(CAUSAL)))
    assert vars(OnClass)["attend"] is F.scaled_dot_product_attention


def test_a_failing_attach_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.scaled_dot_product_attention
    model = nn.Sequential(Plain(), Plain())
    with pytest.raises(TypeError):
        Monitor.attach(model, every=1, to=3)  # type: ignore[arg-type]
    installed: list[Any] = []

    def fail(layer: Any) -> Any:
        if installed:
            raise RuntimeError("on purpose")
        installed.append(original_install(layer))
        return installed[0]

    original_install = functional.install
    monkeypatch.setattr(functional, "install", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        Monitor.attach(model, every=1)
    monkeypatch.undo()
    assert F.scaled_dot_product_attention is original
    assert "forward" not in model[0].__dict__
    Monitor.attach(model, every=1).detach()


def test_one_destination_that_fails_does_not_silence_the_others() -> None:
    seen: list[Record] = []

    def fail(_: Record) -> None:
        raise OSError("disk full")

    module = Plain()
    with Monitor.attach(module, every=1, to=[fail, seen.append]) as monitor:
        module(torch.randn(B, T, C))
        monitor.step()
    assert len(seen) == 1


def test_a_forward_that_somebody_put_over_ours_survives_detach() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    monitor = Monitor.attach(module, every=1)
    ours = module.forward
    module.forward = lambda x: 2 * ours(x)  # type: ignore[method-assign]
    monitor.detach()
    expected = Plain.forward(module, x)
    assert torch.equal(module(x), 2 * expected)
    monitor.detach()


@pytest.mark.parametrize("kind", ["sdpa", "multihead"])
def test_a_forward_that_a_module_had_of_its_own_is_watched_and_given_back(kind: str) -> None:
    """As accelerate and others set it: it calls what the class had before we came."""
    module, x = KINDS[kind](), torch.randn(B, T, C)
    of_class = module.forward
    module.forward = mine = lambda *args: of_class(*args)  # type: ignore[method-assign]
    expected = call(module, x)
    with Monitor.attach(module, every=1) as monitor:
        assert torch.equal(call(module, x), expected)
        assert monitor.step()[0].layers[""].rows == B * T
        assert copy.deepcopy(module).__dict__["forward"] is mine
    assert module.forward is mine
    assert torch.equal(call(module, x), expected)


def test_buffers_made_in_inference_mode_serve_training() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    with torch.inference_mode():
        monitor = Monitor.attach(module, every=1)
        module.eval()(x)
        monitor.step()
    module.train()(x).sum().backward()
    assert monitor.step()[0].layers[""].rows == B * T
    monitor.detach()


# Meaning ------------------------------------------------------------------------------------------


def test_padding_of_a_memory_of_the_same_length_hides_no_query() -> None:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(C, H, batch_first=True)
    x, memory = torch.randn(B, T, C), torch.randn(B, T, C)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, T // 2 :] = True
    with Monitor.attach(module, every=1) as monitor:
        module(x, memory, memory, key_padding_mask=padding)
        found = monitor.step()[0].layers[""]
    assert found.rows == B * T


def test_a_mask_that_hides_the_diagonal_is_not_padding() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    others = ~torch.eye(T, dtype=torch.bool)
    with Monitor.attach(module, every=1) as monitor:
        module(x, attn_mask=others)
        found = monitor.step()[0].layers[""]
    assert found.rows == B * T


@pytest.mark.parametrize("low", [-1e9, -1e4, torch.finfo(torch.float32).min, -math.inf])
def test_large_finite_biases_hide(low: float) -> None:
    torch.manual_seed(2)
    module, x = Plain(), torch.randn(B, T, C)
    with Monitor.attach(module, every=1) as monitor:
        module(x, attn_mask=torch.zeros(T, T).masked_fill(~CAUSAL[0, 0], low))
        found = monitor.step()[0].layers[""]
    agree(found, dense(*module.seen[-1], CAUSAL))


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_torch(make: Any) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(B, H, 5, D), torch.randn(B, H, T, D)
    visible = torch.ones(5, T, dtype=torch.bool).tril(0 if make is causal_upper_left else T - 5)

    class Biased(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=make(5, T))

    module = Biased()
    with Monitor.attach(module, every=1) as monitor:
        module(q, k)
        found = monitor.step()[0].layers[""]
    s = (q.double() @ k.double().mT * D**-0.5).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(
        torch.tensor(found.max_logit).double(), s.amax((0, 2, 3)), rtol=1e-5, atol=1e-5
    )


def test_calls_of_another_number_of_heads_are_named_and_do_not_mix() -> None:
    module = Odd()
    many, one = torch.randn(B, H, T, D), torch.randn(B, 1, T, D)
    with Monitor.attach(module, every=1) as monitor:
        module(many, many)
        module(one, one)
        found = monitor.step()[0].layers[""]
        module(one, one)
        silent = monitor.step()[0].silent
    assert found.rows == B * T
    assert len(found.max_logit) == H
    assert "4 heads and with 1" in silent[""]


def test_a_head_that_sees_nothing_is_no_alarm_and_spoils_no_mean() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    mask = torch.ones(1, H, T, T, dtype=torch.bool)
    mask[:, 2] = False
    alerts = Alerts()
    with Monitor.attach(module, every=1) as monitor:
        module(x, attn_mask=mask)
        (found,) = monitor.step()
    assert found.layers[""].max_logit[2] == -math.inf
    assert math.isfinite(found.entropy_nats)
    assert not any(alert.code == "QM008" for alert in alerts(found))


def test_a_thousand_loud_heads_are_one_alert() -> None:
    loud = record(0, {f"layer{i}": layer([60.0 + i] * 32) for i in range(32)})
    found = Alerts()(loud)
    assert len([alert for alert in found if alert.code == "QM001"]) == 1
    assert found[0].evidence == {"max_logit": 91.0, "layers": 32}
    assert found[0].message == (
        "layer31: 32 of 32 heads have a max logit of 50 or more, the worst is head 0 with 91.0; "
        "31 other layers have the same finding"
    )
    assert (found[0].layer, found[0].heads) == ("layer31", tuple(range(32)))


def test_loading_a_state_drops_what_was_seen_before() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    with Monitor.attach(module, every=10) as monitor:
        module(x)
        monitor.load_state_dict({"step_count": 20, "every": 10})
        module(x)
        assert monitor.step()[0].layers[""].rows == B * T


# What stands around a layer ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_f33_selective_checkpointing_saves_what_it_saved_before(kind: str) -> None:
    """What the monitor multiplies must not be taken for what the layer multiplies."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def policy(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = function in products or "flash" in str(function)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(3)
    module, x = KINDS[kind](), torch.randn(B, T, C, requires_grad=True)

    def grads() -> list[Tensor]:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(call, module, x, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(out.square().sum(), [x, *module.parameters()], allow_unused=True)
        return [out.detach(), *(g for g in found if g is not None)]

    plain = grads()
    with Monitor.attach(module, every=1) as monitor:
        watched = grads()
        (record,) = monitor.step()
    assert record.layers[""].rows == B * T
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_of_torch_func_go_on(kind: str) -> None:
    module, x = KINDS[kind](), torch.randn(B, T, C)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        inputs = (x, x, x) if kind == "multihead" else (x,)
        out = torch.func.functional_call(module, parameters, inputs)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    wanted = (
        torch.func.grad(loss)(parameters, x),
        torch.func.vmap(loss, (None, 0))(parameters, x[:, None]),
    )
    with Monitor.attach(module, every=1) as monitor:
        found = [torch.func.grad(loss)(parameters, x)]
        assert monitor.step()[0].layers[""].rows == B * T
        found.append(torch.func.vmap(loss, (None, 0))(parameters, x[:, None]))
        (record,) = monitor.step()
        assert "vmap" in (record.silent.get("") or record.layers[""].note)
    for name, gradient in wanted[0].items():
        torch.testing.assert_close(found[0][name], gradient)
    torch.testing.assert_close(found[1], wanted[1])


def test_f33_lengths_that_change_make_no_more_graphs() -> None:
    module = Plain()
    counts, rows = [], []
    for watched in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        with Monitor.attach(module, every=1) if watched else contextlib.nullcontext() as monitor:
            compiled = torch.compile(module, backend=counter, fullgraph=True)
            for length in (5, 9, 12, 20):
                compiled(torch.randn(B, length, C), is_causal=True)
                if monitor is not None:
                    rows.append(monitor.step()[0].layers[""].rows)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]
    assert rows == [B * length for length in (5, 9, 12, 20)]


def test_a_class_whose_source_was_made_up_while_running_is_watched() -> None:
    """Its functions have no module, as those that `exec` makes without a `__name__`."""
    names: dict[str, Any] = {"Plain": Plain}
    exec("class Made(Plain):\n    def forward(self, x): return super().forward(x)", names)
    assert names["Made"].forward.__module__ is None
    module = names["Made"]()
    with Monitor.attach(module, every=1) as monitor:
        module(torch.randn(B, T, C))
        assert monitor.step()[0].layers[""].rows == B * T

"""Public failures (see README.md): statistics that vanish under compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qknorm.monitor import Monitor
from qknorm.monitor.alerts import Alerts
from test_monitor_training import KINDS, GroupedSdpa, Own, call, two_layers


@pytest.mark.parametrize(
    ("kind", "target", "backend"),
    [
        *((kind, "compiled", "aot_eager") for kind in KINDS),
        ("flex", "compiled", "aot_eager"),
        *((kind, "original", "aot_eager") for kind in ("sdpa", "encoder")),
        *((kind, "layers", "aot_eager") for kind in ("own", "llama")),
        *((kind, "compiled", "inductor") for kind in ("sdpa", "own")),
    ],
)
def test_case_24_a_model_compiled_and_called_before_is_recorded_in_both_layers(kind, target, backend):
    torch._dynamo.reset()
    model, x = two_layers(kind).eval(), torch.randn(2, 9, 32)
    compiled = model
    if target == "layers":
        for layer in model.layers if kind in ("llama", "encoder") else model:
            layer.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    # FlexAttention has no backward pass on the CPU; without gradients the encoder takes another path.
    with torch.set_grad_enabled(kind != "flex"):
        before = call(compiled, x, kind)
        for _ in range(2):
            with Monitor.attach(model if target == "original" else compiled, every=2) as monitor:
                for step in range(4):
                    watched = call(compiled, x, kind)
                    records = [record for record in monitor.step() if record.layers]
                    rows = [[layer.rows for layer in record.layers.values()] for record in records]
                    assert rows == ([[2 * 9] * 2] if step % 2 == 0 else [])
                    assert not any(record.silent for record in records)
                    assert_close(watched, before, atol=1e-5, rtol=1e-5)
            assert_close(call(compiled, x, kind), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attached", ["before", "after"])
def test_case_24_compiled_training_gives_the_statistics_of_the_plain_model(attached):
    torch._dynamo.reset()
    model, x = two_layers("own"), torch.randn(2, 9, 32)
    with Monitor.attach(model, every=1) as monitor:
        model(x)
        right = monitor.step()[0].layers
    compiled = torch.compile(model, backend="aot_eager")
    if attached == "after":
        compiled(x).sum().backward()
    with Monitor.attach(model, every=1) as monitor:
        for _ in range(2):
            compiled(x).sum().backward()
            found = monitor.step()[0].layers
            assert found.keys() == right.keys()
            for name, layer in found.items():
                for field in ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass"):
                    wanted = pytest.approx(getattr(right[name], field), rel=1e-5, abs=1e-5)
                    assert getattr(layer, field) == wanted, field


def test_case_24_a_layer_without_a_record_is_named_and_alerted():
    model, x = nn.ModuleList([GroupedSdpa(), Own()]), torch.randn(1, 5, 32)
    with Monitor.attach(model, every=1) as monitor:
        for layer in model:
            layer(x)
        (both,) = monitor.step()
        model[0](x)
        (one,) = monitor.step()
    silent = both.layers.keys() - one.layers.keys()
    assert len(both.layers) == 2
    assert silent == one.silent.keys() != set()
    assert not both.silent
    alerts = Alerts()
    assert not any(alert.layer in silent for alert in alerts(both))
    assert any(alert.layer in silent for alert in alerts(one))

"""Modules of torch and of this library: every statistic against a dense float64 computation, and nothing
that the model computes changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm import Mask
from qknorm.monitor import LayerRecord, Monitor
from qknorm.nn import Attention, AttentionConfig, RotaryEmbedding

B, T, C, H, D = 2, 37, 32, 4, 8


class Plain(nn.Module):
    """Calls F.scaled_dot_product_attention; keeps q and k for the oracle."""

    def __init__(self, kv_heads: int = H) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, kv_heads * D)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q, self.k))
        self.seen.append((q.detach(), k.detach()))
        return F.scaled_dot_product_attention(q, k, k, **options)


def dense(
    q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | float = 0.0, scale: float = D**-0.5
) -> dict[str, Tensor]:
    """Statistics per head by their definitions, from q, k `[B, H, T, D]` and visible `[B, 1, T, T]`."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    visible = visible.expand(q.shape[0], q.shape[1], *visible.shape[-2:])
    s = (q @ k.mT * scale + bias).masked_fill(~visible, -torch.inf)
    real = visible.diagonal(dim1=-2, dim2=-1)
    counted = real & visible.any(-1)
    p = s.softmax(-1).nan_to_num()
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    keys = visible.sum(-1)
    choice = counted & (keys > 1)

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0.0).sum((0, 2)) / where.sum((0, 2))

    rms = q.square().mean(-1).sqrt()
    mean_rms = mean(rms, real)
    return {
        "max_logit": torch.where(counted[..., None], s, -torch.inf).amax((0, 2, 3)),
        "entropy_nats": mean(entropy, counted),
        "entropy_ratio": mean(entropy / keys.clamp(min=2).log(), choice),
        "q_rms": mean_rms,
        "q_rms_cv": (mean(rms.square(), real) - mean_rms.square()).sqrt() / mean_rms,
    }


def agree(found: LayerRecord, wanted: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)).double(), value, rtol=tolerance, atol=tolerance
        )


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()[None, None]


def _packed() -> Tensor:
    ids = torch.tensor([[0] * 10 + [1] * 20 + [2] * 7, [0] * 36 + [1]])
    return CAUSAL & (ids[:, None, :, None] == ids[:, None, None, :])


def _padded() -> Tensor:
    real = torch.ones(B, T, dtype=torch.bool)
    real[0, :5], real[1, 30:] = False, False
    return CAUSAL & real[:, None, None, :]


@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({"is_causal": True}, CAUSAL),
        ({}, torch.ones_like(CAUSAL)),
        ({"attn_mask": _packed()}, _packed()),
        ({"attn_mask": _padded()}, _padded()),
        ({"attn_mask": torch.zeros(B, 1, T, T).masked_fill(~_padded(), -torch.inf)}, _padded()),
        ({"attn_mask": CAUSAL[0, 0], "scale": 0.7}, CAUSAL),
    ],
    ids=["causal", "full", "packed", "padded", "additive", "scaled"],
)
def test_sdpa_modules(kv_heads: int, options: dict[str, Any], visible: Tensor) -> None:
    torch.manual_seed(1)
    module, x = Plain(kv_heads), 3 * torch.randn(B, T, C)
    with Monitor.attach(module, every=1) as monitor:
        module(x, enable_gqa=kv_heads != H, **options)
        record = monitor.step()[0]
    q, k = module.seen[-1]
    agree(record.layers[""], dense(q, k, visible, scale=options.get("scale", D**-0.5)))
    assert record.layers[""].coverage == "exact"


def test_a_bias_takes_part() -> None:
    torch.manual_seed(2)
    module, x = Plain(), torch.randn(B, T, C)
    bias = torch.randn(1, H, T, T)
    with Monitor.attach(module, every=1) as monitor:
        module(x, attn_mask=bias)
        record = monitor.step()[0]
    q, k = module.seen[-1]
    agree(record.layers[""], dense(q, k, torch.ones_like(CAUSAL), bias=bias.double()))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both", "float"])
def test_multihead(batch_first: bool, need_weights: bool, training: bool, masks: str) -> None:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(C, H, batch_first=batch_first).train(training)
    x = torch.randn(B, T, C) if batch_first else torch.randn(T, B, C)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[0, 30:] = True
    options: dict[str, Any] = {"need_weights": need_weights}
    visible = torch.ones(B, 1, T, T, dtype=torch.bool)
    if masks in ("causal", "both"):
        options["attn_mask"], visible = ~CAUSAL[0, 0], visible & CAUSAL
    if masks in ("padding", "both"):
        options["key_padding_mask"], visible = hidden, visible & ~hidden[:, None, None]
    if masks == "float":
        options["attn_mask"] = torch.zeros(T, T).masked_fill(~CAUSAL[0, 0], -torch.inf)
        visible = visible & CAUSAL
    before = module(x, x, x, **options)[0]
    with Monitor.attach(module, every=1) as monitor:
        after = module(x, x, x, **options)[0]
        record = next(r for r in monitor.step() if r.layers)
    assert torch.equal(before, after)
    assert record.phase == ("train" if training else "eval")
    rows = x if batch_first else x.transpose(0, 1)
    q, k = (
        F.linear(rows, w, b).unflatten(-1, (H, D)).transpose(1, 2)
        for w, b in zip(
            module.in_proj_weight.chunk(3)[:2], module.in_proj_bias.chunk(3)[:2], strict=True
        )
    )
    agree(record.layers[""], dense(q.detach(), k.detach(), visible))


def test_a_layer_inside_another_is_its_own() -> None:
    class Outer(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(C, H, batch_first=True)

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return super().forward(self.inner(x, x, x, need_weights=False)[0], **options)

    torch.manual_seed(8)
    model = Outer()
    with Monitor.attach(model, every=1) as monitor:
        model(torch.randn(B, T, C), is_causal=True)
        record = monitor.step()[0]
    assert {name: layer.rows for name, layer in record.layers.items()} == {"": B * T, "inner": B * T}


def test_own_layers_give_the_statistics_of_the_operator() -> None:
    torch.manual_seed(4)
    layer = Attention(AttentionConfig(dim=C, num_heads=H, num_kv_heads=2, sink="logit", window=9))
    rope = RotaryEmbedding(D, layout="half")(T)
    real = torch.ones(B, T, dtype=torch.bool)
    real[1, :4] = False
    mask = Mask(causal=True, key_padding=real)
    x = torch.randn(B, T, C)
    out, stats = layer(x, rope=rope, mask=mask, stats=True)
    with Monitor.attach(layer, every=1) as monitor:
        watched = layer(x, rope=rope, mask=mask)
        record = monitor.step()[0].layers[""]
    assert torch.equal(out, watched)
    for name in ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass"):
        torch.testing.assert_close(torch.tensor(getattr(record, name)), getattr(stats, name))
    assert record.bound is not None
    assert record.top <= record.bound
    assert record.gain_max == (1.0, 1.0)
    assert record.rms_of == "projection"
    assert "observer" not in layer.__dict__


def test_sampling_says_so_and_never_exceeds_the_truth() -> None:
    torch.manual_seed(5)
    module, x = Plain(), 3 * torch.randn(B, T, C)
    tops, records = [], []
    for sample in (None, 5, T):
        with Monitor.attach(module, every=1, sample=sample) as monitor:
            module(x, is_causal=True)
            records.append(monitor.step()[0].layers[""])
        tops.append(records[-1].top)
    assert [r.coverage for r in records] == ["exact", "sampled", "exact"]
    assert [r.rows for r in records] == [B * T, B * 5, B * T]
    assert tops[1] <= tops[0] == tops[2]


def test_steps_between_observed_ones_cost_nothing_and_record_nothing() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    with Monitor.attach(module, every=3) as monitor:
        found = []
        for _ in range(7):
            module(x, is_causal=True)
            found.append([record.step for record in monitor.step()])
    assert found == [[0], [], [], [3], [], [], [6]]


def test_a_layer_that_was_not_called_is_named() -> None:
    model = nn.ModuleDict({"used": Plain(), "idle": Plain()})
    with Monitor.attach(model, every=1) as monitor:
        model["used"](torch.randn(B, T, C))
        (record,) = monitor.step()
    assert list(record.layers) == ["used"]
    assert list(record.silent) == ["idle"]


def test_accumulation_makes_one_record_and_evaluation_another() -> None:
    torch.manual_seed(6)
    module, x = Plain(), torch.randn(4, T, C)
    with Monitor.attach(module, every=1) as monitor:
        module(x, is_causal=True)
        whole = monitor.step()[0].layers[""]
        module(x[:2], is_causal=True)
        module(x[2:], is_causal=True)
        module.eval()
        module(10 * x, is_causal=True)
        module.train()
        parts = {record.phase: record.layers[""] for record in monitor.step()}
    assert parts["train"].rows == whole.rows
    torch.testing.assert_close(torch.tensor(parts["train"].max_logit), torch.tensor(whole.max_logit))
    torch.testing.assert_close(
        torch.tensor(parts["train"].entropy_nats), torch.tensor(whole.entropy_nats)
    )
    assert parts["eval"].top > 10 * parts["train"].top


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant: bool) -> None:
    module, x = Plain(), torch.randn(B, T, C, requires_grad=True)
    with Monitor.attach(module, every=1) as monitor:
        torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        assert monitor.step()[0].layers[""].rows == B * T
    assert len(module.seen) == 2


def test_what_cannot_be_watched_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Linear has no attention that can be watched"):
        Monitor.attach(nn.Linear(2, 2))
    module = Plain()
    with Monitor.attach(module), pytest.raises(ValueError, match="Plain is watched already"):
        Monitor.attach(module)
    with Monitor.attach(module):
        pass
    for bad in ({"every": 0}, {"sample": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Monitor.attach(module, **bad)
    assert "forward" not in module.__dict__


def test_a_step_counter_resumes() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    with Monitor.attach(module, every=4) as monitor:
        for _ in range(3):
            module(x)
            monitor.step()
        state = monitor.state_dict()
    with Monitor.attach(module, every=4) as monitor:
        monitor.load_state_dict(state)
        assert not monitor.is_observing
        monitor.step()
        module(x)
        assert [record.step for record in monitor.step()] == [4]


def test_a_model_compiled_before_is_watched_all_the_same() -> None:
    torch.manual_seed(7)
    module, x = Plain(), torch.randn(B, T, C)
    compiled = torch.compile(
        lambda x: F.silu(module(x, is_causal=True)), fullgraph=True, backend="aot_eager"
    )
    compiled(x)
    with Monitor.attach(module, every=2) as monitor:
        for step in range(4):
            compiled(x)
            assert bool(monitor.step()) == (step % 2 == 0)


@pytest.mark.parametrize("shape", [(B * H,), (2, 1, H)], ids=["three axes", "five axes"])
def test_other_numbers_of_axes(shape: tuple[int, ...]) -> None:
    """[N, T, D] is one head; what comes before [H, T, D] is batch."""

    class Axes(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    torch.manual_seed(4)
    q = torch.randn(*shape, T, D)
    mask = CAUSAL[0].expand(shape[0], T, T) if len(shape) == 1 else CAUSAL[None].expand(2, 1, 1, T, T)
    module = Axes()
    with Monitor.attach(module, every=1) as monitor:
        module(q, mask)
        record = monitor.step()[0]
    as_four = q.unsqueeze(1) if len(shape) == 1 else q.flatten(0, 1)
    agree(record.layers[""], dense(as_four, as_four, CAUSAL))

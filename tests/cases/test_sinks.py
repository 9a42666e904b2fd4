"""Public failures (see README.md) about sinks: untrained, dropped under packing, added twice."""

import math

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, Rows, RowSink, SinkToken, Stats, attention, logit_stats
from qknorm.nn import Attention, AttentionConfig, RotaryEmbedding

BACKENDS = ["auto", "stock", "reference"]


def zero_logits(keys, heads=1):
    """One query with `keys` zero logits in each head, values of 1."""
    return torch.zeros(1, heads, 1, 4), torch.zeros(1, heads, keys, 4), torch.ones(1, heads, keys, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_18_three_zero_logits_and_a_sink_of_zero(backend):
    q, k, v = zero_logits(3)
    sink = torch.zeros(1, requires_grad=True)
    out = attention(q, k, v, mask=Mask(), sink=sink, backend=backend)
    assert_close(out, torch.full_like(out, 0.75), atol=1e-6, rtol=0)
    out[0, 0, 0, 0].backward()
    assert sink.grad.item() == pytest.approx(-0.1875, abs=1e-6)
    fixed = attention(q, k, v, mask=Mask(), sink="off_by_one", backend=backend)
    assert_close(fixed, torch.full_like(out, 0.75), atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_18_a_sink_larger_than_every_logit_takes_everything(backend):
    q, k, v = zero_logits(3)
    sink = torch.full((1,), 100.0, requires_grad=True)
    out, stats = attention(q, k, v, mask=Mask(), sink=sink, stats="rows", backend=backend)
    assert (out.abs() < 1e-40).all()
    assert stats.sink_mass.item() == 1.0
    assert stats.rows.lse.item() == 100.0
    assert stats.max_logit.item() == 0.0
    out.sum().backward()
    assert sink.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_case_18_packed_documents_equal_the_runs_apart_sink_gradients_included(backend, causal):
    torch.manual_seed(0)
    Hq, Hk, D, lengths = 4, 2, 8, (5, 9)
    q, k, v = (torch.randn(1, H, sum(lengths), D) for H in (Hq, Hk, Hk))
    q_gain, k_gain = torch.rand(Hq, D) + 0.5, torch.rand(Hk, D) + 0.5
    upstream = torch.randn(1, Hq, sum(lengths), D)
    sink_start = torch.tensor([5.0, -1.0, 0.5, 2.0])
    rope = RotaryEmbedding(4, layout="half")
    positions = torch.cat([torch.arange(n) for n in lengths])

    def run(rows, mask, table):
        inputs = [x[:, :, rows].clone().requires_grad_() for x in (q, k, v)]
        sink = sink_start.clone().requires_grad_()
        gains = {"q_gain": q_gain, "k_gain": k_gain}
        out, stats = attention(
            *inputs, **gains, rope=table, mask=mask, sink=sink, stats=True, backend=backend
        )
        grads = torch.autograd.grad(out, [*inputs, sink], upstream[:, :, rows])
        return [out, *grads[:3]], grads[3], stats

    documents = torch.tensor([[3] * 5 + [1] * 9])
    packed, packed_sink, packed_stats = run(
        slice(None), Mask(causal=causal, documents=documents), rope(positions)
    )
    parts = [
        run(rows, Mask(causal=causal), rope(n)) for rows, n in ((slice(0, 5), 5), (slice(5, None), 9))
    ]
    for whole, *split in zip(packed, *(part[0] for part in parts), strict=True):
        assert_close(whole, torch.cat(split, dim=2), atol=1e-5, rtol=1e-5)
    assert_close(packed_sink, sum(part[1] for part in parts), atol=1e-5, rtol=1e-5)
    merged = parts[0][2].merge(parts[1][2])
    for name in ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass"):
        assert_close(getattr(packed_stats, name), getattr(merged, name), atol=1e-5, rtol=1e-5)
    assert packed_stats.row_count == 14


def test_case_18_unknown_arguments_are_refused_and_not_swallowed():
    q, k, v = zero_logits(3)
    with pytest.raises(TypeError, match="s_aux"):
        attention(q, k, v, mask=Mask(), s_aux=torch.zeros(1))
    with pytest.raises(TypeError, match="learnable_sink"):
        logit_stats(q, k, mask=Mask(), learnable_sink=torch.zeros(1))
    with pytest.raises(TypeError, match="sinks"):
        AttentionConfig(dim=8, num_heads=2, sinks=True)
    with pytest.raises(TypeError, match="cu_seqlens"):
        Attention(AttentionConfig(dim=8, num_heads=2))(torch.zeros(1, 2, 8), cu_seqlens=None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["logit", "token"])
@pytest.mark.parametrize("packed", [False, True])
def test_case_18_after_one_step_every_sink_has_a_gradient_and_has_moved(backend, kind, packed):
    torch.manual_seed(1)
    layer = Attention(
        AttentionConfig(dim=16, num_heads=4, num_kv_heads=2, sink=kind, window=3, backend=backend)
    )
    sinks = {name: p for name, p in layer.named_parameters() if name.startswith("sink")}
    assert len(sinks) == (1 if kind == "logit" else 2)
    before = {name: p.detach().clone() for name, p in sinks.items()}
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, 6) if packed else None
    # A sink token's value starts at 0, so its key gets a gradient through the denominator alone.
    out = layer(torch.randn(2, 6, 16), mask=Mask(causal=True, documents=documents))
    out.square().sum().backward()
    for name, p in sinks.items():
        assert (p.grad.abs().flatten(1).amax(1) if p.dim() > 1 else p.grad.abs()).min() > 0, name
    optimizer.step()
    for name, p in sinks.items():
        assert (p.detach() - before[name]).abs().max() > 1e-3, name
        assert optimizer.state[p], name


def split_logits(logits, pieces):
    """q `[1, 1, 1, n]` whose product with unit keys is `logits`, and the keys cut into pieces."""
    n = len(logits)
    return logits[None, None, None], torch.eye(n)[None, None].tensor_split(pieces, dim=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_19_key_splits_merge_by_log_sum_and_the_sink_joins_once(backend):
    torch.manual_seed(2)
    q, keys = split_logits(torch.randn(6) * 3, 3)
    values = torch.randn(1, 1, 6, 5).tensor_split(3, dim=2)
    sink = torch.tensor([1.5])
    options = {"mask": Mask(), "scale": 1.0, "backend": backend}
    whole, whole_stats = attention(
        q, torch.cat(keys, 2), torch.cat(values, 2), sink=sink, stats="rows", **options
    )
    parts = [attention(q, k, v, stats="rows", **options) for k, v in zip(keys, values, strict=True)]
    rows = [stats.rows for _, stats in parts]
    merged = rows[0].merge_keys(*rows[1:])
    out = sum(
        torch.exp(r.key_lse - merged.key_lse)[..., None] * o
        for r, (o, _) in zip(rows, parts, strict=True)
    )
    out = out * torch.exp(merged.key_lse - torch.logaddexp(merged.key_lse, sink))[..., None]
    # 6e-8 for a value of order 1 is half an ulp of fp32; the sum here rounds a few times.
    assert_close(out, whole, atol=3e-7, rtol=0)
    assert_close(merged.entropy_nats, whole_stats.rows.entropy_nats, atol=1e-6, rtol=0)
    assert_close(merged.max_logit, whole_stats.rows.max_logit, atol=0, rtol=0)
    assert merged.visible_keys.item() == 6


def test_case_19_merged_stats_carry_the_sink_of_the_first_part_once():
    torch.manual_seed(3)
    q, keys = split_logits(torch.randn(6) * 3, 3)
    options = {"mask": Mask(), "scale": 1.0, "stats": "rows"}
    sink = torch.tensor([1.5])
    parts = [logit_stats(q, k, sink=sink if i == 0 else None, **options) for i, k in enumerate(keys)]
    merged = parts[0].merge_keys(*parts[1:])
    whole = logit_stats(q, torch.cat(keys, 2), sink=sink, **options)
    assert isinstance(merged, Stats)
    assert isinstance(merged.rows, Rows)
    for name in ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass"):
        assert_close(getattr(merged, name), getattr(whole, name), atol=1e-6, rtol=1e-6)
    assert_close(merged.rows.lse, whole.rows.lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_19_each_head_uses_its_own_slice_of_the_sinks(backend):
    q, k, v = zero_logits(4, heads=2)
    sinks = torch.tensor([0.0, 100.0])
    both = attention(q, k, v, mask=Mask(), sink=sinks, backend=backend)
    assert_close(both[:, 0], torch.full((1, 1, 4), 0.8), atol=1e-6, rtol=0)
    assert (both[:, 1].abs() < 1e-40).all()
    for rank in range(2):
        own = slice(rank, rank + 1)
        part = attention(q[:, own], k[:, own], v[:, own], mask=Mask(), sink=sinks[own], backend=backend)
        assert torch.equal(part, both[:, own])


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_19_no_kind_of_sink_is_dropped(backend):
    """Against ordinary logits each kind moves the output by far more than rounding."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    plain = attention(q, k, v, backend=backend)
    kinds = [
        "off_by_one",
        torch.full((2,), 5.0),
        SinkToken(torch.randn(2, 8), torch.randn(2, 8)),
        RowSink(torch.full((1, 2, 5), 5.0)),
        RowSink(torch.full((1, 2, 5), 5.0), torch.randn(2, 8)),
    ]
    seen = [attention(q, k, v, sink=sink, backend=backend) for sink in kinds]
    for out in seen:
        assert (out - plain).abs().amax((0, 2, 3)).min() > 0.05
    assert_close(seen[1], seen[3], atol=1e-6, rtol=1e-6)
    assert math.isclose(seen[1].norm().item(), seen[3].norm().item(), rel_tol=1e-6)

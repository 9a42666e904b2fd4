"""Public failures (see README.md) about statistics: padding in the maximum, absent keys, memory."""

import math
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, attention, logit_stats, qk_norm_rope
from qknorm.ops import online_softmax

BACKENDS = ["auto", "stock", "reference"]
SOURCES = [*BACKENDS, "logit_stats"]


def stats_of(source, q, k, **options):
    """The statistics by a backend, or by the pass that serves foreign kernels."""
    if source == "logit_stats":
        return logit_stats(q, k, **options)
    return attention(q, k, k, **{"stats": True, **options}, backend=source)[1]


def written_out(logits):
    """q and k `[B, H, T, T]` whose product at scale 1 is `logits`: the keys are unit vectors."""
    return logits, torch.eye(logits.shape[-1]).expand(logits.shape)


def packed_logits():
    """Case 15: documents of 3 and 2 tokens, each padded to 4, two heads; every trap set."""
    logits = torch.linspace(-2.0, 2.5, 64).view(8, 8).clone()
    documents = torch.tensor([0, 0, 0, -1, 1, 1, -1, -1])
    logits[:, documents < 0] = 1000.0
    logits[4, 0] = 50.0
    logits[0, 2] = 70.0
    logits[2, 1] = logits[5, 4] = 2.5
    second_head = logits.clone()
    second_head[documents >= 0] -= 1.0
    return torch.stack((logits, second_head))[None], documents[None]


@pytest.mark.parametrize("source", SOURCES)
def test_case_15_the_maximum_is_over_visible_pairs_of_real_tokens(source):
    logits, documents = packed_logits()
    mask = Mask(causal=True, documents=documents)
    stats = stats_of(source, *written_out(logits), mask=mask, scale=1.0)
    assert_close(stats.max_logit, torch.tensor([2.5, 1.5]), atol=0, rtol=0)
    assert stats.row_count == 5


@pytest.mark.parametrize("source", SOURCES)
def test_case_15_the_answer_is_the_same_unpadded_and_as_padded_batch(source):
    logits, documents = packed_logits()
    padded = stats_of(
        source, *written_out(logits), mask=Mask(causal=True, documents=documents), scale=1.0
    )
    real = (documents[0] >= 0).nonzero().flatten()
    tight = logits[:, :, real][:, :, :, real]
    unpadded = stats_of(
        source, *written_out(tight), mask=Mask(causal=True, documents=documents[:, real]), scale=1.0
    )
    batch = torch.cat((logits[:, :, :4, :4], logits[:, :, 4:, 4:]))
    batch[1, :, 1] += torch.where(batch[1, :, 1] > 900, 5e3, 0.0)
    # A padding query sees real keys here, and must not count.
    batch[0, :, 3, 0] = batch[1, :, 2, 0] = batch[1, :, 3, 1] = 999.0
    rows = stats_of(
        source,
        *written_out(batch),
        mask=Mask(causal=True, key_padding=documents.view(2, 4) >= 0),
        scale=1.0,
    )
    for stats in (unpadded, rows):
        assert stats.row_count == padded.row_count == 5
        for name in ("max_logit", "entropy_nats", "entropy_ratio"):
            assert_close(getattr(stats, name), getattr(padded, name), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_case_16_a_hidden_key_adds_zero_to_the_entropy(source):
    """Logits (0, 0, -inf): documents hide the third key of the last query."""
    q = torch.zeros(1, 1, 3, 4)
    stats = stats_of(source, q, q, mask=Mask(documents=torch.tensor([[0, 9, 0]])))
    assert stats.entropy_nats.item() == pytest.approx(2 / 3 * math.log(2), abs=1e-6)
    one = stats_of(source, q[:, :, :1], q, mask=Mask(documents=torch.tensor([[0, 9, 0]])))
    assert one.entropy_nats.item() == pytest.approx(0.6931, abs=1e-4)
    assert one.entropy_ratio.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_case_16_a_logit_of_minus_infinity_in_effect_is_not_a_nan(source):
    """A visible key so far below that its probability is 0 in any dtype."""
    logits = torch.tensor([0.0, 0.0, -1e30])[None, None, None]
    k = torch.eye(3)[None, None]
    stats = stats_of(source, logits, k, mask=Mask(), scale=1.0)
    assert stats.entropy_nats.item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("source", SOURCES)
def test_case_16_the_length_of_the_buffer_does_not_enter_the_entropy(source):
    """Logits (2, 2) in a buffer of 4096 whose other positions are not written."""
    q = torch.full((1, 1, 1, 4), 1.0)
    k = torch.zeros(1, 1, 4096, 4)
    k[:, :, -2:] = 1.0
    written = torch.zeros(1, 4096, dtype=torch.bool)
    written[:, -2:] = True
    stats = stats_of(source, q, k, mask=Mask(causal=True, key_padding=written), scale=0.5)
    assert stats.max_logit.item() == 2.0
    assert stats.entropy_nats.item() == pytest.approx(0.6931, abs=1e-4)
    assert stats.entropy_ratio.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("sink", ["off_by_one", torch.zeros(1)])
def test_case_16_entropy_is_renormalised_over_the_keys_without_the_sink(source, sink):
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 3, 4)
    stats = stats_of(source, q, k, mask=Mask(), sink=sink)
    assert stats.entropy_nats.item() == pytest.approx(1.0986, abs=1e-4)
    assert stats.sink_mass.item() == pytest.approx(0.25, abs=1e-6)
    assert stats.entropy_ratio.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_case_16_rows_with_one_key_are_left_out_of_the_ratio_alone(source):
    q = torch.zeros(1, 1, 3, 4)
    stats = stats_of(source, q, q, mask=Mask(causal=True))
    assert (stats.row_count, stats.ratio_count) == (3, 2)
    assert stats.entropy_ratio.item() == pytest.approx(1.0, abs=1e-6)
    assert stats.entropy_nats.item() == pytest.approx((math.log(2) + math.log(3)) / 3, abs=1e-6)


def long_inputs():
    torch.manual_seed(0)
    return [torch.randn(1, 2, 4096, 64, requires_grad=True) for _ in range(3)]


def step(stats, **options):
    """Output, gradients, statistics and the sizes of everything kept for the backward pass."""
    q, k, v = long_inputs()
    gains = [torch.linspace(0.5, 2.0, 128).view(2, 64).requires_grad_() for _ in range(2)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append(x.numel()), x)[1], lambda x: x
    ):
        found = attention(q, k, v, q_gain=gains[0], k_gain=gains[1], stats=stats, **options)
    out, measured = found if isinstance(found, tuple) else (found, None)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, *gains))
    return [out.detach(), *grads], measured, saved


@pytest.fixture(scope="module")
def watched_step():
    return step(True)


def test_case_17_no_tensor_of_t_times_t_is_kept_for_the_backward_pass(watched_step):
    _, _, saved = watched_step
    assert saved, "the hook saw nothing"
    assert max(saved) <= 2 * 4096 * 64


def test_case_17_outputs_and_gradients_are_bit_equal_with_telemetry_on_and_off(watched_step):
    watched, _, saved = watched_step
    plain, _, plain_saved = step(False)
    for a, b in zip(watched, plain, strict=True):
        assert torch.equal(a, b)
    assert sum(saved) == sum(plain_saved), "watching keeps something alive"


def test_case_17_no_statistic_carries_a_gradient(watched_step):
    _, stats, _ = watched_step
    for name in ("max_logit", "entropy_sum", "ratio_sum", "sink_sum"):
        assert not getattr(stats, name).requires_grad, name


def test_case_17_the_block_size_does_not_change_the_values(monkeypatch):
    q, k, _ = (x.detach() for x in long_inputs())
    usual = logit_stats(q, k, scale=1.0, stats="rows")
    monkeypatch.setitem(online_softmax.KEY_BLOCK, "cpu", 700)
    monkeypatch.setitem(online_softmax.SCORE_BUDGET, "cpu", 2 * 700 * 555)
    other = logit_stats(q, k, scale=1.0, stats="rows")
    rows, other_rows = usual.rows, other.rows
    assert not torch.equal(rows.entropy_nats, other_rows.entropy_nats), "the sizes were not read"
    assert_close(rows.entropy_nats, other_rows.entropy_nats, atol=1e-5, rtol=0)
    assert_close(rows.key_lse, other_rows.key_lse, atol=1e-5, rtol=0)
    for name in ("max_logit", "entropy_nats", "entropy_ratio"):
        assert_close(getattr(usual, name), getattr(other, name), atol=1e-5, rtol=0)


def test_case_17_the_streamed_values_equal_one_dense_block(watched_step):
    _, stats, _ = watched_step
    q, k, _ = (x.detach() for x in long_inputs())
    gain = torch.linspace(0.5, 2.0, 128).view(2, 64)
    q, k = qk_norm_rope(q, k, q_gain=gain, k_gain=gain)
    logits = (q.double() @ k.double().mT / 8).masked_fill_(
        torch.ones(4096, 4096, dtype=torch.bool).triu(1), -math.inf
    )
    assert_close(stats.max_logit.double(), logits.amax((0, 2, 3)), atol=1e-5, rtol=0)
    p = logits.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    assert_close(stats.entropy_nats.double(), entropy.mean((0, 2)), atol=1e-5, rtol=0)


PEAK = """
import sys, torch, qknorm
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 4096, 64, requires_grad=True) for _ in range(3))
gain = torch.ones(2, 64, requires_grad=True)

def peak_mb():
    # Not ru_maxrss: a child inherits that of the process it was forked from.
    line = next(x for x in open("/proc/self/status") if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

def step(stats):
    found = qknorm.attention(q, k, v, q_gain=gain, k_gain=gain, stats=stats)
    out = found[0] if stats else found
    torch.autograd.grad(out.sum(), (q, k, v, gain))

# A first call on a short input loads whatever is loaded lazily.
short = torch.randn(1, 2, 8, 64)
qknorm.attention(short, short, short, q_gain=gain, k_gain=gain, stats=True)
start = peak_mb()
step(False)
plain = peak_mb()
step(True)
watched = peak_mb()
print(start, plain, watched)
"""


def test_case_17_telemetry_needs_less_than_16_mb_on_top():
    """The full score matrix would be 134 MB."""
    shown = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    start, plain, watched = map(float, shown.stdout.split())
    assert plain - start < 100, "the attention itself is not linear in T"
    assert watched - plain < 16

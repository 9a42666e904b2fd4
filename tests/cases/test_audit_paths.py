"""Public failures of other projects that an auditor can meet, found on the ways through a model. Each
faulty module is found with its code and its evidence; nothing of that code is said about its right twin.

Shapes: B batch, T tokens, H heads (Hk of k and v), D head width, R rotary width.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from audited import (
    Layer,
    Model,
    causal,
    codes_of,
    eager,
    formula_of,
    frequencies,
    grouped,
    model_of,
    normed,
    only,
    rms,
    sdpa,
    tokens,
    turn,
    uneven,
)
from qknorm.auditor import audit

# 7, 8, 25: fast paths ---------------------------------------------------------------------------------


def fused(q, k, v, *, R, broken_above=math.inf):
    """Norm, RoPE and attention at once. Above so many tokens times heads, and only where a part of the
    head is rotated, every head but the first of a group is corrupted."""
    q, k = (turn(rms(x.transpose(1, 2)), frequencies(8), R=R).transpose(1, 2) for x in (q, k))
    if q.shape[0] * q.shape[1] * q.shape[2] > broken_above and q.shape[-1] > R:
        G = q.shape[1] // k.shape[1]
        is_first = torch.arange(q.shape[1]) % G == 0
        q = torch.where(is_first[:, None, None], q, q.flip(-1))
    return eager(q, k, v)


def as_projected(x, gain, side):
    return x


def test_case_07_a_fast_path_that_breaks_above_a_number_of_tokens():
    slow = partial(fused, R=4)

    def report_of(fast, batch):
        attends = {"slow": slow, "fast": fast}
        model = model_of(as_projected, heads=4, kv_heads=2, gains=(None, None), attends=attends)
        return audit(model, tokens(batch, 12))

    broken = partial(fused, R=4, broken_above=64)
    (one,) = only(report_of(broken, 2), "QK015")
    assert one.evidence["path"] == "fast"
    assert one.evidence["difference"] > 1e-2
    assert "QK015" not in codes_of(
        report_of(broken, 1)
    )  # 48 of 64: what is right for few is not for many
    assert "QK015" not in codes_of(report_of(slow, 2))
    # Where the whole head is rotated nothing breaks.
    attends = {"slow": partial(fused, R=8), "fast": partial(fused, R=8, broken_above=64)}
    model = model_of(as_projected, heads=4, kv_heads=2, gains=(None, None), attends=attends)
    assert "QK015" not in codes_of(audit(model, tokens(2, 12)))


def test_case_08_a_fused_pass_that_rotates_the_whole_head():
    x = torch.arange(1.0, 9.0)[None, None, None].expand(1, 2, 1, 8)
    unrotated = torch.tensor([0.9901, 1.1882, 1.3862, 1.5842])
    assert_close(turn(rms(x), frequencies(4), R=4)[0, 1, 0, 4:], unrotated, atol=1e-4, rtol=0)

    def report_of(R):
        attends = {"eager": partial(fused, R=4), "fused": partial(fused, R=R)}
        return audit(model_of(as_projected, gains=(None, None), attends=attends), tokens())

    wrong, right = report_of(8), report_of(4)
    (one,) = only(wrong, "QK015")
    assert one.evidence["path"] == "fused"
    assert one.evidence["difference"] > 1e-3
    for report in (wrong, right):
        assert formula_of(report).rotary_width == 4
    assert "QK015" not in codes_of(right)


class ThreeAxes(Model):
    """Time, height and width turn two pairs each; the path "fused" may take time for all three."""

    drops = True

    def forward(self, tokens, positions=None, path=None):
        if path == "fused" and self.drops:
            positions = positions[:1].expand(3, -1)
        return super().forward(tokens, path, positions=positions)


def test_case_08_a_fused_pass_that_drops_two_of_three_position_axes():
    def hat(x, gain, side, positions):
        parts = rms(x, gain).split(4, -1)
        turned = [turn(y, frequencies(4), positions=p) for y, p in zip(parts, positions, strict=True)]
        return torch.cat(turned, -1)

    def made():
        return Layer(2, 12, hat, gains=(uneven(2, 12), uneven(2, 12)))

    model = ThreeAxes(made, {"eager": eager, "fused": eager}, layers=1)
    T = torch.arange(12)
    inputs = {"tokens": tokens(2, 12), "positions": torch.stack((T, T // 4, T % 4))}
    assert only(audit(model, inputs), "QK015")[0].evidence["path"] == "fused"
    model.drops = False
    assert "QK015" not in codes_of(audit(model, inputs))
    # Of text, whose axes are equal, it is right.
    model.drops = True
    assert "QK015" not in codes_of(audit(model, inputs | {"positions": T.expand(3, 12)}))


def ignoring_strides(x):
    """Reads memory as if it were contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


@pytest.mark.parametrize(
    ("which", "shape"), [("qkv", (84, 3, 3, 64)), ("v", (1, 62, 2, 16))], ids=["all", "v alone"]
)
def test_case_25_a_kernel_that_ignores_strides(which, shape):
    B, T, H, D = shape

    def kernel(q, k, v):
        assert not v.is_contiguous(), "as heads-first views they are permuted"
        made = (
            ignoring_strides(x) if side in which else x for side, x in zip("qkv", (q, k, v), strict=True)
        )
        return eager(*made)

    def copying(q, k, v):
        return kernel(*(x.contiguous().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))

    def self_checked(q, k, v):
        return eager(q.contiguous(), k.contiguous(), v.contiguous())

    def report_of(attend):
        model = model_of(normed, heads=H, D=D, attends={"eager": eager, "kernel": attend})
        return audit(model, tokens(B, T))

    (one,) = only(report_of(kernel), "QK015")
    assert one.evidence["path"] == "kernel"
    assert one.evidence["difference"] > 1e-2
    assert "QK015" not in codes_of(report_of(self_checked))


# 12: a row that sees nothing --------------------------------------------------------------------------

BLIND = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])  # query 1


def naive(q, k, v):
    """Softmax of -inf alone is 0 / 0."""
    k, v = grouped(q, k, v)
    bias = torch.zeros(3, 3).masked_fill(~BLIND, -torch.inf)
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def lowest(q, k, v):
    """The lowest number instead of -inf: hidden keys share the row."""
    k, v = grouped(q, k, v)
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~BLIND, torch.finfo(q.dtype).min)
    return s.softmax(-1) @ v


def neutral(q, k, v):
    k, v = grouped(q, k, v)
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~BLIND, -torch.inf)
    s = torch.where(BLIND.any(-1, keepdim=True), s, 0.0)
    return (s.softmax(-1) * BLIND) @ v


def test_case_12_one_fully_masked_row():
    q = k = v = torch.randn(1, 1, 3, 4)
    assert naive(q, k, v)[0, 0, 1].isnan().all()
    assert_close(lowest(q, k, v)[0, 0, 1], v.mean(2)[0, 0])
    for attend in (neutral, partial(sdpa, visible=BLIND)):
        assert (attend(q, k, v)[0, 0, 1] == 0).all()

    def report_of(attend, layers):
        model = model_of(normed, D=4, layers=layers, attends={"eager": attend})
        return audit(model, tokens(2, 3))

    # In one layer the outputs of other rows are right, and gradients alone are spoilt.
    (one,) = only(report_of(naive, 1), "QK014")
    assert "gradient" in one.message
    assert one.evidence["parameter"] == "layers.0.q_gain"
    (one,) = [f for f in only(report_of(naive, 2), "QK014") if f.layer is None]
    assert one.message == "on eager, tokens that see no key make outputs of others NaN"
    (one,) = only(report_of(lowest, 1), "QK014")
    assert "a later token" in one.message
    assert one.evidence["moved"] > 1e-3
    for layers in (1, 2):
        for attend in (neutral, partial(sdpa, visible=BLIND)):
            assert "QK014" not in codes_of(report_of(attend, layers))


class Padded(Model):
    """Left padding, whose queries see nothing at all."""

    attend = staticmethod(eager)

    def forward(self, tokens, key_padding=None):
        T = tokens.shape[1]
        visible = causal(T) if key_padding is None else causal(T) & key_padding[:, None, None]
        self.attends = {"own": partial(self.attend, visible=visible)}
        return super().forward(tokens)

    paths = None


def test_case_12_padded_queries_that_see_nothing():
    def right(q, k, v, visible):
        seen = visible.any(-1, keepdim=True)
        return sdpa(q, k, v, visible=visible | ~seen) * seen

    def made(attend):
        model = Padded(lambda: Layer(2, 8, normed, gains=(uneven(2, 8), uneven(2, 8))))
        model.attend = attend
        return model

    inputs = {"tokens": tokens(2, 12), "key_padding": torch.ones(2, 12, dtype=torch.bool)}
    inputs["key_padding"][0, :4] = False
    assert any("NaN" in one.message for one in only(audit(made(eager), inputs), "QK014"))
    assert "QK014" not in codes_of(audit(made(right), inputs))
    # Without padding there is no such row, and nothing to find.
    full = inputs | {"key_padding": torch.ones(2, 12, dtype=torch.bool)}
    assert "QK014" not in codes_of(audit(made(eager), full))


# 15: what is not there takes part in no maximum -------------------------------------------------------


class Documents(nn.Module):
    """One layer over one-hot tokens, so that q and k of every token can be chosen."""

    def __init__(self, queries, keys, k_gain, *, hides_padding=True):
        super().__init__()
        T, D = queries.shape
        self.layer = Layer(1, D, normed, gains=(torch.ones(1, D), k_gain), dim=T)
        self.hides_padding = hides_padding
        with torch.no_grad():
            self.layer.q.weight.copy_(queries.mT)
            self.layer.k.weight.copy_(keys.mT)

    def visible(self, documents, key_padding):
        T = documents.shape[1]
        same = causal(T) & (documents[:, :, None] == documents[:, None])
        if self.hides_padding:
            # A padded query sees itself, else its row would be empty.
            same = same & key_padding[:, None] | torch.eye(T, dtype=torch.bool)
        return same[:, None]

    def forward(self, tokens, documents, key_padding):
        attend = partial(eager, scale=1.0, visible=self.visible(documents, key_padding))
        return self.layer(F.one_hot(tokens, self.layer.q.in_features).float(), attend)


def test_case_15_the_largest_logit_is_that_of_visible_pairs_of_real_tokens():
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])  # of 3 and 2 tokens, padded to 4 and 4
    real = torch.tensor([[False, True, True, True, False, False, True, True]])
    queries, keys = torch.randn(8, 4), torch.randn(8, 4)
    queries[:, 3] = keys[:, 3] = 0.0
    # The last entry is loud on padding, on the future pair (1, 3), on the pair (6, 2) across documents.
    queries[[0, 1, 4, 5, 6], 3] = keys[[0, 4, 5], 3] = 40.0
    keys[[2, 3], 3] = 0.3
    k_gain = torch.tensor([[0.4, 0.5, 0.6, 250.0]])
    inputs = {"tokens": torch.arange(8)[None], "documents": documents, "key_padding": real}
    right = Documents(queries, keys, k_gain)
    dots = rms(queries) @ (rms(keys) * k_gain).mT
    visible = right.visible(documents, real)[0, 0] & real[0][:, None]
    wanted = float(dots[visible].max())
    assert wanted < 2.5 < 50 < float(dots[~visible].max())
    assert float(dots[0, 0]) > 500  # a padded query that sees itself
    report = audit(right, inputs)
    (one,) = only(report, "QK022")
    assert math.isclose(one.evidence["measured"], wanted, rel_tol=1e-3)
    assert one.evidence["bound"] > 500
    assert "QK014" not in codes_of(report)
    leaky = audit(Documents(queries, keys, k_gain, hides_padding=False), inputs)
    assert "padding" in only(leaky, "QK014")[0].message


# 18, 19: sinks ----------------------------------------------------------------------------------------


class SinkLayer(Layer):
    """With a sink per head, which a careless path leaves out."""

    def __init__(self, sinks, *, forgets_when_packed=False):
        super().__init__(2, 8, normed, gains=(uneven(2, 8), uneven(2, 8)))
        self.sink = nn.Parameter(torch.tensor(sinks))
        self.forgets = forgets_when_packed

    def forward(self, x, attend=None, documents=None):
        T = x.shape[1]
        visible = causal(T)
        if documents is not None:
            visible = (visible & (documents[:, :, None] == documents[:, None]))[:, None]
        sink = None if self.forgets and documents is not None else self.sink
        return super().forward(x, partial(attend or eager, sink=sink, visible=visible))


class SinkModel(Model):
    def forward(self, tokens, documents=None, path=None):
        return super().forward(tokens, path, documents=documents)


def test_case_18_a_sink_that_packing_leaves_out():
    zeros, ones = torch.zeros(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    for sink, value in ((0.0, 0.75), (100.0, 0.0)):
        out = eager(zeros, zeros, ones, sink=torch.tensor([sink]))
        assert_close(out[0, 0, 2], torch.full((4,), value), atol=1e-6, rtol=0)

    def report_of(*, forgets, packed):
        model = SinkModel(lambda: SinkLayer((5.0, 7.0), forgets_when_packed=forgets))
        inputs = {"tokens": tokens(2, 12)}
        if packed:
            inputs["documents"] = (torch.arange(12) >= 5).long().expand(2, 12)
        return audit(model, inputs)

    wrong = only(report_of(forgets=True, packed=True), "QK013")
    assert [one.evidence["parameter"] for one in wrong] == ["layers.0.sink", "layers.1.sink"]
    right = report_of(forgets=False, packed=True)
    assert "QK013" not in codes_of(right)
    assert formula_of(right).sink
    # Unpacked the fault is not there: what is audited is the path that the inputs take.
    assert "QK013" not in codes_of(report_of(forgets=True, packed=False))


def ring(q, k, v, *, sink=None, visible, keeps_sink=True, parts=3):
    """Parts of the keys apart, merged by their log-sums; then the sink joins once."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -1e30)
    outs, sums = [], []
    for keys, values in zip(s.chunk(parts, -1), v.chunk(parts, 2), strict=True):
        outs.append(keys.softmax(-1) @ values)
        sums.append(keys.logsumexp(-1))
    everything = torch.stack(sums)
    if keeps_sink and sink is not None:
        everything = torch.cat((everything, sink[None, None, :, None].expand(1, *s.shape[:3])))
    weights = torch.stack(sums) - everything.logsumexp(0)
    return (weights.exp()[..., None] * torch.stack(outs)).sum(0)


def first_slice_on_every_rank(q, k, v, *, sink, visible):
    """Heads on two ranks, which both take the sinks of the first."""
    n = q.shape[1] // 2
    parts = [slice(0, n), slice(n, None)]
    outs = [eager(q[:, p], k[:, p], v[:, p], sink=sink[:n], visible=visible) for p in parts]
    return torch.cat(outs, 1)


def test_case_19_a_ring_that_drops_the_sink():
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    told = {"sink": torch.tensor([1.5]), "visible": torch.ones(1, 6, dtype=torch.bool)}
    assert_close(ring(q, k, v, **told), eager(q, k, v, **told), atol=1e-6, rtol=0)

    def report_of(path, sinks):
        return audit(SinkModel(lambda: SinkLayer(sinks), {"whole": eager, "ring": path}), tokens(2, 12))

    dropping = partial(ring, keeps_sink=False)
    large = report_of(dropping, (5.0, 7.0))
    assert only(large, "QK013")[0].evidence == {"parameter": "layers.0.sink", "path": "ring"}
    assert only(large, "QK015")[0].evidence["path"] == "ring"
    # A small sink is below any tolerance of outputs, not below that of its gradient.
    small = report_of(dropping, (-20.0, -19.0))
    assert "QK015" not in codes_of(small)
    assert {one.evidence["path"] for one in only(small, "QK013")} == {"ring"}
    for sinks in ((5.0, 7.0), (-20.0, -19.0)):
        assert not codes_of(report_of(ring, sinks)) & {"QK013", "QK015"}


def test_case_19_a_rank_that_takes_the_sinks_of_another():
    zeros, ones = torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4, 8)
    told = {"sink": torch.tensor([0.0, 100.0]), "visible": causal(4)}
    for attend, second in ((eager, 0.0), (first_slice_on_every_rank, 0.8)):
        out = attend(zeros, zeros, ones, **told)[0, :, 3, 0]
        assert_close(out, torch.tensor([0.8, second]), atol=1e-6, rtol=0)

    def report_of(path):
        made = SinkModel(lambda: SinkLayer((0.0, 100.0)), {"whole": eager, "ranks": path})
        return audit(made, tokens(2, 12))

    assert only(report_of(first_slice_on_every_rank), "QK015")[0].evidence["path"] == "ranks"
    assert "QK015" not in codes_of(report_of(ring))


# 24: compiled models ----------------------------------------------------------------------------------


def test_case_24_a_model_compiled_and_called_before_shows_both_layers():
    torch._dynamo.reset()
    model = model_of(normed, layers=2)
    compiled = torch.compile(model, backend="eager")
    compiled(tokens())
    calls = []
    handle = model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    report = audit(compiled, tokens())
    assert list(report.formulas) == ["_orig_mod.layers.0", "_orig_mod.layers.1"]
    assert len(calls) > 0
    assert not report.codes
    assert "paths: eager, plain" in report.exercised
    handle.remove()
    for layer in model.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    plain = audit(model, tokens())
    for name, formula in plain.formulas.items():
        other = report.formulas[f"_orig_mod.{name}"]
        assert_close(formula.q_gain_values, other.q_gain_values)


def test_case_24_compiled_code_that_is_another_function_is_a_path_that_disagrees():
    def lossy(graph, inputs):
        """A compiler with a bug."""

        def call(*args):
            return tuple(x * 1.01 if torch.is_floating_point(x) else x for x in graph(*args))

        return call

    torch._dynamo.reset()
    model = model_of(normed, layers=2)
    report = audit(torch.compile(model, backend=lossy), tokens())
    found = only(report, "QK015")
    assert {one.evidence["path"] for one in found} == {"eager", "plain"}  # neither is compiled
    assert all(one.evidence["difference"] == pytest.approx(0.01, rel=0.1) for one in found)
    torch._dynamo.reset()

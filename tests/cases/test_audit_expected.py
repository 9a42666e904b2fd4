"""F47: what a model is meant to be, held against what is read back."""

from functools import partial

import pytest
import torch

from audited import causal, eager, frequencies, model_of, normed, only, rms, tokens, turn, uneven
from qknorm.auditor import audit
from qknorm.auditor.testing import assert_qk_norm


def everyone(q, k, v):
    return eager(q, k, v, visible=torch.ones(q.shape[2], q.shape[2], dtype=torch.bool))


def windowed(q, k, v, *, window):
    T = q.shape[2]
    return eager(q, k, v, visible=causal(T).triu(1 - window))


def before(x, gain, side):
    return turn(rms(x, gain), frequencies(8))


def after(x, gain, side):
    return rms(turn(x, frequencies(8)), gain)


def difference(model, expect, **options):
    """What QK024 says, as (found, expected) by key; and what was not probed."""
    report = audit(model, tokens(), expect=expect, **options)
    found = [one for one in report.findings if one.code == "QK024"]
    assert all(one.severity == "error" and one.layer for one in found)
    return {
        one.evidence["key"]: (one.evidence["found"], one.evidence["expected"]) for one in found
    }, report.not_probed


def test_f47_a_language_model_that_is_not_causal_by_mistake():
    wrong, right = (model_of(normed, layers=2, attends={"own": attend}) for attend in (everyone, eager))
    assert not audit(wrong, tokens()).codes, "nothing says that it should be"
    assert [one.layer for one in only(audit(wrong, tokens(), expect={"causal": True}), "QK024")] == [
        "layers.0",
        "layers.1",
    ]
    assert difference(right, {"causal": "yes"}) == ({}, [])
    assert difference(right, {"causal": False}) == ({"causal": ("yes", "no")}, [])
    with pytest.raises(AssertionError, match=r"QK024 layers\.0: causal is expected to be yes and is no"):
        assert_qk_norm(wrong, tokens(), expect={"causal": True})
    assert_qk_norm(right, tokens(), expect={"causal": True})


def test_f47_a_window():
    model = model_of(normed, attends={"own": partial(windowed, window=5)})
    assert difference(model, {"window": 5}) == ({}, [])
    assert difference(model, {"window": "6"})[0] == {"window": ("5", "6")}
    assert difference(model, {"window": "none"})[0] == {"window": ("5", "none")}
    whole = model_of(normed)
    assert difference(whole, {"window": None}) == ({}, [])
    assert difference(whole, {"window": 5})[0] == {"window": ("none", "5")}
    # F55: 12 tokens do not show whether 32 keys are all that is seen.
    found, not_probed = difference(whole, {"window": 32})
    assert not found
    assert not_probed == ["layers.0, expected window=32: the model was called with 12 tokens"]


@pytest.mark.parametrize("equal", [False, True])
def test_f47_the_order_also_where_equal_gains_hide_it(equal):
    gains = (torch.ones(2, 8), torch.ones(2, 8)) if equal else (uneven(2, 8), uneven(2, 8))
    first, last = (model_of(hat, gains=gains) for hat in (before, after))
    state = [p.detach().clone() for p in first.parameters()]
    assert difference(first, {"order": "before_rope"}) == ({}, [])
    assert difference(last, {"order": "before_rope"})[0] == {"order": ("after_rope", "before_rope")}
    assert all(torch.equal(p, was) for p, was in zip(first.parameters(), state, strict=True))
    found, not_probed = difference(model_of(normed), {"order": "before_rope"})
    assert not found
    assert len(not_probed) == 1
    assert "only where there are a gain and RoPE" in not_probed[0]


def test_f47_norm_eps_and_scale():
    model = model_of(normed, heads=4)
    right = {"norm": "head", "eps": 1e-6, "scale": 8**-0.5, "sink": "none"}
    assert difference(model, right) == ({}, [])
    full = model_of(lambda x, gain, side: rms(x, gain, axes=(-2, -1), eps=1e-5), heads=4)
    assert difference(full, right)[0] == {"norm": ("full", "head"), "eps": ("1e-05", "1e-06")}
    bare = model_of(lambda x, gain, side: x, gains=(None, None))
    assert difference(bare, right)[0] == {"norm": ("none", "head"), "eps": ("none", "1e-06")}
    # One side alone is a difference too.
    half = model_of(lambda x, gain, side: rms(x, gain, eps=1e-6 if side == "q" else 1e-5))
    assert difference(half, right)[0] == {"eps": ("1e-06 and 1e-05", "1e-06")}
    alone = model_of(lambda x, gain, side: rms(x, gain) if side == "q" else x)
    assert difference(alone, {"norm": "head"})[0] == {"norm": ("head and none", "head")}
    # F46: muP says what it means.
    mup = model_of(normed, attends={"own": partial(eager, scale=1 / 8)})
    assert difference(mup, {"scale": 0.125}) == ({}, [])
    (one,) = only(audit(mup, tokens()), "QK017")
    assert one.severity == "warning"
    assert "muP" in one.message
    assert "muP" in one.why


class Token(torch.nn.Module):
    """A sink whose logit depends on the query."""

    def __init__(self):
        super().__init__()
        self.key = torch.nn.Parameter(torch.randn(2, 8))

    def forward(self, q, k, v):
        s = (q @ k.mT * 8**-0.5).masked_fill(~causal(q.shape[2]), -torch.inf)
        extra = (q * self.key[:, None]).sum(-1, keepdim=True) * 8**-0.5
        return torch.cat((s, extra), -1).softmax(-1)[..., :-1] @ v


def off_by_one(q, k, v):
    s = (q @ k.mT * 8**-0.5).masked_fill(~causal(q.shape[2]), -torch.inf)
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("kind", ["none", "logit", "zero logit", "off_by_one", "token"])
def test_f47_the_kind_of_a_sink(kind):
    model = model_of(normed)
    (layer,) = model.layers
    if "logit" in kind:
        layer.sink = torch.nn.Parameter(torch.zeros(2) if "zero" in kind else torch.tensor([1.0, 2.0]))
        layer.attend = lambda q, k, v: eager(q, k, v, sink=layer.sink)
    elif kind != "none":
        layer.attend = Token() if kind == "token" else off_by_one
    kind = kind.split()[-1]
    for expected in ("none", "logit", "off_by_one", "token"):
        found, not_probed = difference(model, {"sink": expected})
        assert found == ({} if expected == kind else {"sink": (kind, expected)})
        assert not not_probed


def test_f47_some_of_the_attentions_are_named_by_a_pattern():
    model = model_of(normed, layers=2, attends={"own": partial(windowed, window=5)})
    report = audit(model, tokens(), expect={"*.1:window": 4, "layers.0:window": 5, "*.7:causal": "yes"})
    assert [one.layer for one in only(report, "QK024")] == ["layers.1"]
    assert report.not_probed == ["expected causal=yes: no attention is called *.7"]


def test_f47_what_could_not_be_read_back_is_listed():
    model = model_of(lambda x, gain, side: x.tanh(), gains=(None, None))
    found, not_probed = difference(model, {"norm": "head", "causal": True})
    assert not found
    listed = "\n".join(not_probed)
    assert "layers.0, expected norm=head: it was not read back" in listed
    assert "layers.0, expected causal=yes: it was not read back" in listed
    # Beside padding a window does not show.
    padded = model_of(normed, attends={"own": lambda q, k, v: eager(q, k, v, visible=hidden)})
    hidden = causal(12)[None, None].clone()
    hidden[..., 3] = False
    found, not_probed = difference(padded, {"window": 5})
    assert not found
    assert not_probed == ["layers.0, expected window=5: causality and a window do not explain the mask"]


@pytest.mark.parametrize(
    "expect",
    [
        {"colour": 1},
        {"causal": "perhaps"},
        {"causal": 1},
        {"window": 0},
        {"window": -3},
        {"window": 2.5},
        {"norm": "rms"},
        {"order": True},
        {"eps": "small"},
        {"eps": float("nan")},
        {"eps": 0.0},
        {"sink": "yes"},
        {"*:": 1},
    ],
    ids=str,
)
def test_f47_what_cannot_be_expected_is_refused(expect):
    with pytest.raises(ValueError, match="expected"):
        audit(model_of(normed), tokens(), expect=expect)

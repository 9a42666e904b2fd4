"""Every number by which the auditor decides has a test here that fails once it is halved or doubled.

Each function is named in `thresholds.py` and asks the code that decides, with what lies between the
number and its half or its double. Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qknorm.auditor import (
    auditor,
    expected,
    fit,
    formula,
    gain,
    probes,
    rope,
    rules,
    scores,
    site,
    thresholds,
)
from qknorm.auditor import trace as tracing
from qknorm.auditor.guard import NotUnderstoodError
from qknorm.auditor.subject import Subject
from qknorm.auditor.thresholds import Threshold
from qknorm.auditor.weights import Layer as StoredLayer
from qknorm.auditor.weights import _of_layer

ALL = {name: value for name, value in vars(thresholds).items() if isinstance(value, Threshold)}
D = 8


@pytest.mark.parametrize("name", ALL)
def test_half_of_a_threshold_or_its_double_fails_its_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threshold = ALL[name]
    assert threshold.why
    check = globals()[threshold.test]
    check()
    failed = []
    for factor in (0.5, 2.0):
        monkeypatch.setattr(thresholds, name, threshold * factor)
        try:
            check()
        except (AssertionError, NotUnderstoodError, pytest.fail.Exception):
            failed.append(factor)
    assert failed, f"{threshold.test} holds with half of {name} and with its double"


def test_each_threshold_has_a_test_of_its_own_and_is_used() -> None:
    tests = [threshold.test for threshold in ALL.values()]
    assert len(set(tests)) == len(tests)
    folder = Path(str(thresholds.__file__)).parent
    text = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    assert {name for name in ALL if re.search(rf"\bat\.{name}\b", text)} == set(ALL)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(**fields: Any) -> tracing.SeenAttention:
    x = torch.zeros(1, 1, 4, D)
    return tracing.SeenAttention([], 0, x, x, **fields)


def found(findings: Any) -> set[str]:
    return {one.code for one in findings}


# What is seen of a run.


def a_mask_of_less_hides() -> None:
    rows = probes.blind_rows(attention(logits=torch.full((1, 1, 4, 4), -1500.0)), None)
    assert rows is not None
    assert rows.all()


def sink_of(mass: float, dtype: torch.dtype) -> Tensor | None:
    seen = attention(logits=torch.zeros(1, 1, 4, 4))
    tracing._note_sink(seen, torch.full((1, 1, 4, 4), (1 - mass) / 4, dtype=dtype))
    return seen.sink


def a_small_sink_is_seen() -> None:
    sink = sink_of(1.5e-3, torch.float32)
    assert sink is not None
    assert float(sink[0, 0, 0]) == pytest.approx(math.log(4 * 1.5e-3), abs=0.01)


def rounded_weights_are_no_sink() -> None:
    assert sink_of(0.02, torch.bfloat16) is None


def a_sink_of_almost_0() -> None:
    sink = torch.full((1, 1, 4), 0.015)
    site = Fake(
        module=nn.Identity(),
        q_heads=1,
        raw_shape=lambda side: (1, 1, 1, 1),
        compose=lambda q, k: {},
        rerun=lambda outputs: Fake(sink=sink),
    )
    assert scores._sink(site, 1.0, sink) == "logit"


# Which projections lead to q and k.


class Plain(nn.Module):
    """One head, causal, normed with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        q, k = (nn.functional.rms_norm(y, (D,), eps=1e-6) * self.gain for y in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


def a_plain_layer_is_read() -> None:
    torch.manual_seed(0)
    assert list(auditor.audit(Plain(), torch.randn(2, 6, D)).formulas) == [""]


def an_addend_that_is_scaled() -> None:
    b = noise(3, 4)
    weights = {0: nn.Parameter(torch.zeros(4, 4)), 1: nn.Parameter(torch.zeros(2, 2))}

    def addends(error: float) -> Any:
        other = error * b.norm() * nn.functional.normalize(noise(12, seed=1), dim=0).view(3, 4)
        return site._addends(Fake(parameters=weights), {0: [b, None], 1: [0.5 * (b + other), None]})

    assert addends(0.0)[1] == (0, pytest.approx(0.5))
    assert not addends(1.5e-3)


# Which norm it is.


class Answers:
    """A site of one head whose q is `change(n(raw), raw)`."""

    batch = 1

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor], T: int = 2) -> None:
        self.change, self.T = change, T

    def raw_shape(self, which: str) -> tuple[int, int, int, int]:
        return (1, self.T, 1, D)

    def multiplied(self, which: str, raw: Tensor, *, module: nn.Module | None = None) -> Tensor:
        raw = raw.double()
        return self.change(raw / (raw.square().mean(-1, keepdim=True) + 1e-12).sqrt(), raw)


def noisy(y: Tensor, size: float) -> Tensor:
    """Each entry off by so much of itself, otherwise for each other y."""
    seed = int(y.abs().sum() * 1e6) % 2**31
    return y * (1 + size * noise(*y.shape, seed=seed))


def a_noisy_norm() -> None:
    assert fit.fit(Answers(lambda n, raw: noisy(n, 0.016)), "q").key == ("rms", "head")


def a_norm_with_an_error() -> None:
    side = Fake(fit=Fake(residual=4.5e-5, raw_limit=1.0))
    site = Fake(original=nn.Linear(1, 1))
    assert found(rules.of_precision(Fake(path="x", site=site, normed={"q": side}))) == {"QK008"}


def a_clamp_of_projections() -> None:
    def clamped(n: Tensor, raw: Tensor) -> Tensor:
        raw = raw.clamp(-2.5, 2.5)
        return noisy(raw / raw.square().mean(-1, keepdim=True).sqrt(), 0.9e-3)

    limit = fit.fit(Answers(clamped), "q").raw_limit
    assert limit is not None


def entries_that_are_mixed() -> None:
    with_next = torch.eye(D, dtype=torch.float64) + 0.07 * torch.eye(D, dtype=torch.float64).roll(1, 0)
    with pytest.raises(NotUnderstoodError, match="mixed"):
        fit.fit(Answers(lambda n, raw: n @ with_next), "q")


def few_clamped_entries() -> None:
    x = noise(2000)
    x[:15] = 10.0
    assert fit.limit_of(x) == 10.0


# Gains.


def gain_of(off: float, noise_of_slope: float = 0.0) -> str | None:
    """The kind that is read where entry 1 follows the gain of entry 0 as well, or its slope is noisy."""
    w = nn.Parameter(torch.ones(2 * D))

    def change(n: Tensor, raw: Tensor) -> Tensor:
        y = n.clone()
        slope = 1 + noise_of_slope * torch.tanh(raw[..., 0] * 9).sign()
        moved = float(w[0].detach()) - 1
        y[..., 0] *= 1 + moved * slope
        y[..., 1] += moved * off * n[..., 1] * torch.tanh(raw[..., 2])
        return y

    site = Answers(lambda n, raw: n)
    best = fit.fit(site, "q")
    site.change = change
    return gain.read_gain(site, "q", best, {w: (0,)}).kind


def a_gain_felt_elsewhere() -> None:
    assert gain_of(0.75e-3) == "head"


def a_gain_with_noise() -> None:
    assert gain_of(0.0, noise_of_slope=0.0075) == "head"


def a_length_that_is_almost_1() -> None:
    read = gain.Gain(values=torch.full((1, D), D**-0.5 * 1.0007), kind=None, factor=1.0)
    assert gain.length_or_mean(read, "inside", is_bare=True)[0] == "l2"


def a_gain_that_moved_little() -> None:
    values = torch.ones(1, D, dtype=torch.float64)
    values[0, 0] += 1.5e-4
    side = Fake(gain=Fake(values=values, kind="head"), norm="rms")
    assert not found(rules.of_gains(Fake(path="x", is_trained=True, sides={"q": side})))


# eps.


def eps_findings(eps: float, share: float) -> set[str]:
    side = Fake(eps=eps, eps_place="inside", eps_share=share)
    site = Answers(lambda n, raw: n)
    return found(rules.of_eps(Fake(path="x", site=site, normed={"q": side})))


def eps_of_1e_6_is_fine() -> None:
    assert not eps_findings(1e-6, 0.0)


def eps_beside_small_vectors() -> None:
    assert eps_findings(1e-5, 0.0075) == {"QK007"}


# RoPE.


def turning(*angles: float, T: int = 2, interleaved: bool = False) -> Tensor:
    """`[T, 1, D, D]`, a pair for each angle, by which it turns from token to token."""
    count = len(angles)
    A = torch.zeros(T, 1, 2 * count, 2 * count, dtype=torch.float64)
    for t in range(T):
        for n, angle in enumerate(angles):
            i, j = (2 * n, 2 * n + 1) if interleaved else (n, n + count)
            c, s = math.cos(t * angle), math.sin(t * angle)
            A[t, 0, i, i] = A[t, 0, j, j] = c
            A[t, 0, i, j], A[t, 0, j, i] = -s, s
    return A


def a_pair_that_turns_slowly() -> None:
    assert rope.read_rope(turning(1.0, 3e-5)) == ("half", 4)


def pairs_that_tell_the_layout() -> None:
    assert rope.read_rope(turning(0.07, 0.07, interleaved=True)) == ("interleaved", 4)


def almost_equal_gains() -> None:
    A = turning(math.pi / 4) @ torch.diag(torch.tensor([1.0, 1.0015], dtype=torch.float64))
    assert rope.read_order([Fake(matrices=A, residual=0.0)], "half") == "before"


def rope_findings(error: float, dtype: torch.dtype) -> set[str]:
    q, k = turning(0.3, T=4), turning(0.3, T=4)
    k[2] = turning(error)[1] @ k[2]
    sides = {name: Fake(fit=Fake(matrices=x, residual=0.0)) for name, x in (("q", q), ("k", k))}
    site = Fake(key_of=torch.tensor([0]), original=nn.Linear(1, 1).to(dtype))
    layer = Fake(path="x", site=site, sides=sides, f=Fake(order=None, causal=True))
    return found(rules.of_rope(layer))


def angles_a_little_off() -> None:
    assert rope_findings(3e-3, torch.float32) == {"QK023"}


def bf16_tables() -> None:
    assert rope_findings(0.045, torch.bfloat16) == {"QK023"}


class Tokens(nn.Module):
    """Outputs `[B, T, 1]`, 1 and a little of what the test says."""

    def __init__(self, little: Callable[..., Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.little = little

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return 1 + self.little(tokens, positions)[..., None].double()

    def subject(self, **paths: Callable[..., Tensor]) -> Subject:
        tokens = torch.arange(8).view(1, 8)
        return Subject(self, {"tokens": tokens}, "tokens", {"own": self} | paths, [])


def shift_findings(moved: float, dtype: torch.dtype) -> set[str]:
    model = Tokens(lambda tokens, positions: moved / 7 * (positions - 7), dtype)
    return found(probes.find_shifts(model.subject()))


def shifted_outputs() -> None:
    assert shift_findings(1.5e-3, torch.float32) == {"QK023"}


def shifted_outputs_in_bf16() -> None:
    assert shift_findings(0.045, torch.bfloat16) == {"QK023"}


# Precision, scale and V.


def lengths_that_err() -> None:
    error = 0.3 * torch.finfo(torch.bfloat16).eps * 3**0.5  # in one of three draws

    class Low(Answers):
        original = nn.Linear(1, 1).bfloat16()

        def multiplied(self, which: str, raw: Tensor, *, module: nn.Module | None = None) -> Tensor:
            is_large = module is not None and float(raw.abs().max()) > 100
            return super().multiplied(which, raw) * (1 + error * is_large)

    side = Fake(fit=Fake(residual=0.0, raw_limit=None))
    layer = Fake(path="x", site=Low(lambda n, raw: n), normed={"q": side})
    assert found(rules.of_precision(layer)) == {"QK008"}


def a_scale_close_to_that_of_mup() -> None:
    columns = Fake(product=torch.zeros(1, D, dtype=torch.int64))
    site = Fake(
        columns=lambda side: columns,
        parameters={0: torch.zeros(D, D)},
        outputs={0: torch.zeros(1, 1, D)},
    )
    f = Fake(scale=1.03 / D, head_dim=D, q_heads=1)
    assert not found(rules.of_scale(Fake(path="x", site=site, f=f)))


def v_that_grows_by_half() -> None:
    grows = math.log(3) / math.log(4)  # 3 times where 4 times is projected
    site = Fake(outputs={0: noise(1, 2, D).abs()}, rerun=lambda outputs: Fake(v=outputs[0].pow(grows)))
    assert not formula._is_v_normed(site)


# Logits.


def logits_that_are_almost_a_line() -> None:
    dots = 5 * noise(10_000)
    scale, cap, limit = scores._line(dots, 0.3 * dots + 0.7e-4 * 1.5 * noise(10_000, seed=1))
    assert scale == pytest.approx(0.3, rel=1e-3)
    assert (cap, limit) == (None, None)


def almost_a_softcap() -> None:
    dots = 5 * noise(10_000)
    logits = 2.0 * (0.3 * dots / 2.0).tanh()
    logits = logits + 1.5e-3 * logits.square().mean().sqrt() * noise(10_000, seed=1)
    _, cap, _ = scores._line(dots, logits)
    assert cap == pytest.approx(2.0, rel=0.05)


def few_clamped_logits() -> None:
    dots = noise(10_000).clamp(-2, 2)
    dots[:15] = torch.linspace(4.0, 5.0, 15, dtype=torch.float64)
    assert scores._line(dots, dots.clamp(max=3.0))[2] == 3.0


# The whole model.


def path_findings(difference: float, dtype: torch.dtype) -> set[str]:
    model = Tokens(lambda tokens, positions: 0.0 * tokens, dtype)
    other = Tokens(lambda tokens, positions: difference + 0.0 * tokens)
    return found(probes.find_disagreement(model.subject(other=other), []))


def paths_that_almost_agree() -> None:
    assert path_findings(3e-4, torch.float32) == {"QK015"}


def paths_that_almost_agree_in_fp64() -> None:
    assert path_findings(1.5e-8, torch.float64) == {"QK015"}


def paths_that_almost_agree_in_bf16() -> None:
    assert path_findings(0.09, torch.bfloat16) == {"QK015"}


def leak_findings(size: float) -> set[str]:
    """A token sees the next one."""
    model = Tokens(lambda tokens, positions: size * (tokens.roll(-1, 1) % 2).double())
    return found(probes.find_leaks(model.subject(), []))


def a_small_leak() -> None:
    assert leak_findings(1.5e-6) == {"QK014"}


def most_tokens_are_causal() -> None:
    assert leak_findings(1.0) == {"QK014"}


class Clipped(Tokens):
    def qk_clip_(self, limit: float) -> None:
        self.weight.fill_(1.0)
        self.little = lambda tokens, positions: 0.015 + 0.0 * tokens


def a_clip_that_does_little() -> None:
    model = Clipped(lambda tokens, positions: 0.0 * tokens)
    assert not found(probes.find_useless_clip(model.subject()))


def a_long_context() -> None:
    model = Fake(config=Fake(max_position_embeddings=40_000))
    assert found(auditor._long_context(model, {"": Fake(q_norm="rms", sink=None)})) == {"QK021"}


# What was expected.


def a_scale_almost_as_expected() -> None:
    assert not expected._is_same(expected.Expected("*", "scale", 0.25), 0.25 * 1.015)


def an_eps_almost_as_expected() -> None:
    assert not expected._is_same(expected.Expected("*", "eps", 1e-6), 1.08e-6)


# Files of weights.


def gains_that_are_small() -> None:
    values = torch.linspace(0.05, 0.3, D)
    layer = StoredLayer(rows={"q": 64, "k": 64}, gains={"q": values, "k": values})
    assert not found(_of_layer("x", layer))


def a_gain_wider_than_any_head() -> None:
    values = 0.5 + torch.rand(768)
    layer = StoredLayer(rows={"q": 768, "k": 768}, gains={"q": values, "k": values})
    assert found(_of_layer("x", layer)) == {"QK004"}

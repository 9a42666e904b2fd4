"""The gains of QK-norms that others wrote, under any name, and the bound that they imply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.monitor import LayerRecord, Monitor
from qknorm.nn import QKNorm

B, T, C, H, D = 2, 7, 16, 2, 8
SCALE = 0.3


class Normed(nn.Module):
    """Projections, a pair of norms under some names, and SDPA."""

    def __init__(self, names: tuple[str, str], make: Callable[[], nn.Module], *, full: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, H * D)
        self.names, self.full = names, full
        for name in names:
            self.add_module(name, make())

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        pair = [getattr(self, name) for name in self.names]
        if self.full:
            q, k = (f(t) for f, t in zip(pair, (q, k), strict=True))
        q, k = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in (q, k))
        if not self.full:
            q, k = (f(t) for f, t in zip(pair, (q, k), strict=True))
        return F.scaled_dot_product_attention(q, k, k, scale=SCALE)


def record_of(model: nn.Module, **options: Any) -> LayerRecord:
    with Monitor.attach(model, every=1) as monitor:
        model(torch.randn(B, T, C, **options))
        (record,) = monitor.step()
    (layer,) = record.layers.values()
    return layer


def spread(*gains: Tensor) -> None:
    """Unequal gains; one of q is negative and the largest, in the second head where there are two."""
    with torch.no_grad():
        for gain in gains:
            gain.uniform_(0.5, 1.5)
        gains[0].view(-1)[-1] = -2.5


@pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("norm_q", "norm_k"), ("query_ln", "key_ln")])
@pytest.mark.parametrize("kind", ["rms", "layer", "plain", "full"])
def test_f71_a_bound_whoever_wrote_the_norm(kind: str, names: tuple[str, str]) -> None:
    makers: dict[str, Callable[[], nn.Module]] = {
        "rms": lambda: nn.RMSNorm(D),
        "layer": lambda: nn.LayerNorm(D, bias=False),
        "plain": lambda: nn.RMSNorm(D, elementwise_affine=False),
        "full": lambda: nn.RMSNorm(H * D),
    }
    model = Normed(names, makers[kind], full=kind == "full")
    q, k = (getattr(model, name).weight for name in names)
    if kind == "plain":
        q = k = torch.ones(D)
    else:
        spread(q, k)
    found = record_of(model)
    q, k = q.detach().double().abs(), k.detach().double().abs()
    assert found.note is None
    assert found.gain_max == pytest.approx((float(q.max()), float(k.max())), rel=1e-6)
    # Of a statistic over all heads one of them may hold everything.
    q, k = (gain.view(-1, D).amax(-1) for gain in (q, k))
    bound = SCALE * D * len(q) * float((q * k).max())
    assert found.bound == pytest.approx(bound, rel=1e-6)
    assert 0 < found.top <= bound


def test_a_bias_is_not_bounded_by_gains() -> None:
    model = Normed(("q_norm", "k_norm"), lambda: nn.LayerNorm(D), full=False)
    nn.init.constant_(model.q_norm.bias, 0.5)
    found = record_of(model)
    assert found.gain_max == pytest.approx((1.0, 1.0))
    assert found.bound is None


class Both(nn.Module):
    """`QKNorm` in a layer of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, H * D)
        self.norm = QKNorm(H, H, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k))
        q, k = self.norm(q, k)
        return F.scaled_dot_product_attention(q, k, k, scale=SCALE)


def test_f71_qknorm_in_a_layer_of_somebody_else() -> None:
    model = Both()
    spread(model.norm.q_gain, model.norm.k_gain)
    found = record_of(model)
    q, k = (g.detach().abs().amax(-1) for g in (model.norm.q_gain, model.norm.k_gain))
    assert found.gain_max == (float(q.max()), float(k.max()))
    assert found.bound == pytest.approx(SCALE * D * float((q * k).max()), rel=1e-6)
    assert 0 < found.top <= found.bound


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, scale=SCALE)


class Outer(nn.Module):
    """As torchtitan has it: the norms belong to the module around the one that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, H * D)
        self.q_norm, self.k_norm, self.inner = nn.RMSNorm(D), nn.RMSNorm(D), Inner()

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k))
        return self.inner(self.q_norm(q), self.k_norm(k))


def test_f64_norms_of_the_module_around() -> None:
    model = Outer()
    spread(model.q_norm.weight, model.k_norm.weight)
    q, k = (norm.weight.detach().abs().max() for norm in (model.q_norm, model.k_norm))
    found = record_of(model)
    assert found.gain_max == pytest.approx((float(q), float(k)), rel=1e-6)
    assert found.bound == pytest.approx(SCALE * D * float(q * k), rel=1e-6)


class Handwritten(nn.Module):
    """As many projects have it: neither torch's class nor torch's name for the gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gamma


class RMS(Handwritten):
    """Of which only the class says a little."""


class Pair(nn.Module):
    """A module that holds both norms, as in Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class Spelled(nn.Module):
    """Attention in a block with norms of its own, RoPE behind the norms of q and k."""

    def __init__(self, norms: nn.Module, apply: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)  # of the input, inside the attention
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, H * D)
        for name, norm in norms.named_children():
            self.add_module(name, norm)
        self.sub_norm = nn.RMSNorm(D)  # of the output, per head
        self.apply_norms = apply

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k))
        q, k = self.apply_norms(self, q, k)
        angle = torch.arange(T, dtype=q.dtype)[:, None] * 0.1
        q, k = (
            torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
            for a, b in (t.chunk(2, -1) for t in (q, k))
        )
        return self.sub_norm(F.scaled_dot_product_attention(q, k, k, scale=SCALE)).sum()


def holding(**norms: nn.Module) -> nn.Module:
    holder = nn.Module()
    for name, norm in norms.items():
        holder.add_module(name, norm)
    return holder


def by(q_name: str, k_name: str) -> Callable[[Any, Tensor, Tensor], Any]:
    return lambda m, q, k: (m.get_submodule(q_name)(q), m.get_submodule(k_name)(k))


SPELLINGS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Any]]] = {
    **{
        q: (lambda q=q, k=k: holding(**{q: nn.RMSNorm(D), k: nn.RMSNorm(D)}), by(q, k))
        for q, k in (
            ("q_norm", "k_norm"),
            ("norm_q", "norm_k"),
            ("ln_q", "ln_k"),
            ("qn", "kn"),
            ("query_norm", "key_norm"),
            ("qNorm", "kNorm"),
            ("first", "second"),
        )
    },
    "foreign class": (lambda: holding(qn=Handwritten(D), kn=Handwritten(D)), by("qn", "kn")),
    "class says it": (lambda: holding(a=RMS(D), b=RMS(D)), by("a", "b")),
    "one for both": (lambda: holding(qk_norm=nn.RMSNorm(D)), by("qk_norm", "qk_norm")),
    "one, unnamed": (lambda: holding(shared=nn.RMSNorm(D)), by("shared", "shared")),
    "once for both": (
        lambda: holding(qk_norm=nn.RMSNorm(D)),
        lambda m, q, k: m.qk_norm(torch.cat((q, k))).chunk(2),
    ),
    "a list": (
        lambda: holding(norms=nn.ModuleList((nn.RMSNorm(D), nn.RMSNorm(D)))),
        by("norms.0", "norms.1"),
    ),
    "a list per head": (
        lambda: holding(
            **{f"{t}_norms": nn.ModuleList(nn.RMSNorm(D) for _ in range(H)) for t in ("q", "k")}
        ),
        lambda m, q, k: tuple(
            torch.stack([norm(t[:, i]) for i, norm in enumerate(norms)], 1)
            for t, norms in ((q, m.q_norms), (k, m.k_norms))
        ),
    ),
    "a module of both": (lambda: holding(pair=Pair()), lambda m, q, k: m.pair(q, k)),
    "a norm called so": (lambda: holding(qk=Pair()), lambda m, q, k: m.qk(q, k)),
    "behind a projection": (
        lambda: holding(
            to_q=nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D)),
            to_k=nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D)),
        ),
        by("to_q", "to_k"),
    ),
    "beside one of v": (
        lambda: holding(v_norm=nn.RMSNorm(D), q_norm=nn.RMSNorm(D), k_norm=nn.RMSNorm(D)),
        lambda m, q, k: (m.v_norm(q), m.q_norm(q), m.k_norm(k))[1:],
    ),
    "without bias": (
        lambda: holding(
            q_ln=nn.LayerNorm(D, bias=False),
            k_ln=nn.LayerNorm(D, bias=False),
        ),
        by("q_ln", "k_ln"),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_f71_norms_are_found_by_being_called(spelling: str) -> None:
    make, apply = SPELLINGS[spelling]
    norms = make()
    gains = [
        p for n, p in norms.named_parameters() if p.dim() == 1 and "bias" not in n and "v_norm" not in n
    ]
    with torch.no_grad():
        for i, gain in enumerate(gains):
            gain.uniform_(0.8, 1.2)[i % D] = 1.3 + i / 8
    model = Spelled(norms, apply)
    found = record_of(model)
    tops = [float(gain.max()) for gain in gains]
    half = len(tops) // 2 or 1
    q, k = max(tops[:half]), max(tops[-half:])
    if spelling == "a list per head":
        bound = max(a * b for a, b in zip(tops[:half], tops[half:], strict=True))
    else:
        bound = q * k
    assert found.gain_max == pytest.approx((q, k), rel=1e-5)
    assert found.bound == pytest.approx(SCALE * D * bound, rel=1e-5)
    assert found.is_normed
    assert 0 < found.top <= found.bound


NOT_NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Any]]] = {
    "no norm": (holding, lambda m, q, k: (q, k)),
    "identities": (
        lambda: holding(q_norm=nn.Identity(), k_norm=nn.Identity()),
        by("q_norm", "k_norm"),
    ),
    "of something else": (
        lambda: holding(first=nn.RMSNorm(D), second=nn.RMSNorm(D)),
        lambda m, q, k: (m.first(q), m.second(k), q, k)[2:],
    ),
    "only q": (lambda: holding(q_norm=nn.RMSNorm(D)), lambda m, q, k: (m.q_norm(q), k)),
}


@pytest.mark.parametrize("case", NOT_NORMS)
def test_f71_what_made_neither_q_nor_k_gives_no_bound(case: str) -> None:
    make, apply = NOT_NORMS[case]
    found = record_of(Spelled(make(), apply))
    assert found.bound is found.gain_max is found.note is None
    assert not found.is_normed


def test_f71_what_stretches_behind_the_norm_takes_the_bound_away() -> None:
    apply = by("q_norm", "k_norm")
    found = record_of(
        Spelled(
            holding(q_norm=nn.RMSNorm(D), k_norm=nn.RMSNorm(D)),
            lambda m, q, k: tuple(1.1 * t for t in apply(m, q, k)),
        )
    )
    assert found.gain_max == pytest.approx((1.0, 1.0))
    assert found.bound is None
    assert found.is_normed


def test_f71_a_norm_that_no_module_holds_is_seen_in_the_rms() -> None:
    gain = torch.rand(1)
    found = record_of(
        Spelled(holding(), lambda m, q, k: tuple(gain * F.rms_norm(t, (D,)) for t in (q, k)))
    )
    assert found.is_normed
    assert found.bound is found.gain_max is None
    assert "no module tells its gains" in found.note


def test_f71_compiled_and_checkpointed_it_is_the_same() -> None:
    torch.manual_seed(1)
    make, apply = SPELLINGS["a list"]
    model = Spelled(make(), apply)
    x = torch.randn(B, T, C)
    found = []
    for run in (
        model,
        torch.compile(model, backend="aot_eager"),
        lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    ):
        with Monitor.attach(model, every=1) as monitor:
            run(x).backward()
            (record,) = monitor.step()
        found.append(record.layers[""])
    assert [one.bound for one in found] == [pytest.approx(SCALE * D)] * 3


class Odd(nn.RMSNorm):
    """Does not answer to a vector of the shape of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[:3] == (B, H, T)
        return super().forward(x)


def test_f20_what_does_not_answer_is_not_known_and_said() -> None:
    model, x = Normed(("q_norm", "k_norm"), lambda: Odd(D), full=False), torch.randn(B, T, C)
    expected = model(x)
    with Monitor.attach(model, every=1) as monitor:
        assert torch.equal(model(x), expected)
        (record,) = monitor.step()
    (layer,) = record.layers.values()
    assert layer.rows == B * T
    assert layer.gain_max is layer.bound is None
    assert "its norm does not tell its gains: AssertionError" in layer.note


def test_f20_gains_are_those_of_the_forward_and_nothing_is_read_after_it() -> None:
    """As a wrapper does that frees parameters: after the forward their storage is gone."""
    model = Normed(("q_norm", "k_norm"), lambda: nn.RMSNorm(D), full=False)
    spread(model.q_norm.weight, model.k_norm.weight)
    largest = float(model.q_norm.weight.detach().abs().max())
    with Monitor.attach(model, every=1) as monitor, torch.no_grad():
        model(torch.randn(B, T, C))
        for norm in (model.q_norm, model.k_norm):
            norm.weight.untyped_storage().resize_(0)
        (record,) = monitor.step()
    assert record.layers[""].gain_max[0] == pytest.approx(largest, rel=1e-6)


def test_gains_are_read_once_a_step_and_anew_in_the_next() -> None:
    model = Normed(("q_norm", "k_norm"), lambda: nn.RMSNorm(D), full=False)
    asked: list[int] = []
    model.q_norm.register_forward_pre_hook(lambda *_: asked.append(1))
    found = []
    with Monitor.attach(model, every=1) as monitor, torch.no_grad():
        for step in range(2):
            for _ in range(3):
                model(torch.randn(B, T, C))
            found.append(monitor.step()[0].layers[""].gain_max[0])
            model.q_norm.weight.fill_(3.0 + step)
    assert found == [1.0, 3.0]
    assert len(asked) == 6, "the hooks of the user see a question"

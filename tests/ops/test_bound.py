"""The bound from the gains: no adversary exceeds it, and where it claims to be exact one attains it.

Shapes: B batch, T positions, Hq / Hk heads, D head width, R rotary width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qknorm
from qknorm import Mask, Rope

D = 8


def gains(seed: int, Hq: int = 4, Hk: int = 2, spread: float = 0.8) -> tuple[Tensor, Tensor]:
    """Unequal over heads and entries, some negative, in fp64 so that only mathematics is tested."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(Hq, D, generator=generator, dtype=torch.float64) * spread + 1
    k = torch.randn(Hk, D, generator=generator, dtype=torch.float64) * spread + 1
    return q, k


def table(positions: Tensor, R: int, layout: str, base: float = 50.0) -> Rope:
    angle = positions.double()[..., None] * base ** -(torch.arange(R // 2) / (R / 2))
    return Rope(angle.cos(), angle.sin(), layout)


def largest_logit(
    q_gain: Tensor, k_gain: Tensor, positions: Tensor | None, R: int, layout: str, steps: int = 800
) -> Tensor:
    """`[Hq]`: the largest |logit| that gradient ascent on the inputs finds at any two positions.

    Each pair of positions and each query head has its own inputs, its own batch row: the heads of a
    group would otherwise have to agree on one key.
    """
    Hq, Hk = q_gain.shape[0], k_gain.shape[0]
    rope = None
    pairs = 4  # restarts, if there are no positions to tell them apart
    if positions is not None and R:
        two = torch.cartesian_prod(positions, positions)  # [pairs, 2]: key's token, query's token
        pairs = len(two)
        rope = table(two.repeat_interleave(Hq, 0), R, layout)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(pairs * Hq, H, 2, D, generator=generator, dtype=torch.float64) for H in (Hq, Hk))
    q.requires_grad_()
    k.requires_grad_()
    head = torch.arange(Hq).repeat(pairs)
    optimizer = torch.optim.Adam([q, k], lr=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / steps) + 1e-3
        q_hat, k_hat = qknorm.qk_norm_rope(q, k, q_gain=q_gain, k_gain=k_gain, rope=rope)
        k_hat = k_hat.repeat_interleave(Hq // Hk, 1)
        rows = torch.arange(pairs * Hq)
        logit = D**-0.5 * (q_hat[rows, head, 1] * k_hat[rows, head, 0]).sum(-1)
        optimizer.zero_grad()
        (-logit).sum().backward()
        optimizer.step()
    # The operator itself must see what the search found.
    stats = qknorm.logit_stats(
        q[:, :, 1:], k, q_gain=q_gain, k_gain=k_gain, rope=rope, mask=Mask(), stats="rows"
    )
    found = stats.rows.max_logit[rows, head, 0].unflatten(0, (pairs, Hq)).amax(0)
    assert (found >= logit.detach().unflatten(0, (pairs, Hq)).amax(0) - 1e-2).all()
    return found


POSITIONS = {
    "consecutive": torch.arange(4),
    "far": torch.tensor([3, 4, 90, 1007]),
    "one": torch.tensor([17]),
    "unsorted": torch.tensor([40, 2, 9]),
}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("R", [2, 4, 8])
@pytest.mark.parametrize("where", POSITIONS)
def test_exact_bound_is_attained_and_never_exceeded(where: str, R: int, layout: str) -> None:
    positions = POSITIONS[where]
    q_gain, k_gain = gains(seed=R)
    bound = qknorm.logit_bound(q_gain, k_gain, rope=table(positions, R, layout))
    found = largest_logit(q_gain, k_gain, positions, R, layout)
    assert (found <= bound * (1 + 1e-9)).all()
    assert (found >= bound * (1 - 1e-3)).all()


@pytest.mark.parametrize("seed", range(4))
def test_bound_without_rotation_is_attained(seed: int) -> None:
    q_gain, k_gain = gains(seed)
    bound = qknorm.logit_bound(q_gain, k_gain, rotary_dim=0)
    torch.testing.assert_close(bound, D**0.5 * (q_gain * k_gain.repeat_interleave(2, 0)).abs().amax(-1))
    found = largest_logit(q_gain, k_gain, None, 0, "half")
    assert (found <= bound * (1 + 1e-9)).all()
    assert (found >= bound * (1 - 1e-3)).all()


@pytest.mark.parametrize(("Hq", "Hk"), [(3, 3), (4, 1), (6, 2)])
def test_bound_uses_the_gain_of_the_key_head_of_the_group(Hq: int, Hk: int) -> None:
    q_gain, k_gain = gains(11, Hq, Hk)
    k_gain[-1] *= 5
    positions = POSITIONS["consecutive"]
    bound = qknorm.logit_bound(q_gain, k_gain, rope=table(positions, 4, "half"))
    found = largest_logit(q_gain, k_gain, positions, 4, "half")
    assert bound.shape == (Hq,)
    assert (found <= bound * (1 + 1e-9)).all()
    assert (found >= bound * (1 - 1e-3)).all()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("R", [2, 4, 6, 8])
@pytest.mark.parametrize("seed", range(8))
def test_more_knowledge_never_loosens_the_bound(seed: int, R: int, layout: str) -> None:
    q_gain, k_gain = gains(seed, spread=1.5)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 5000, (1 + seed, 3), generator=generator)
    exact = qknorm.logit_bound(q_gain, k_gain, rope=table(positions, R, layout))
    pair = qknorm.logit_bound(q_gain, k_gain, rotary_dim=R, layout=layout)
    any_rotation = qknorm.logit_bound(q_gain, k_gain)
    unrotated = qknorm.logit_bound(q_gain, k_gain, rotary_dim=0)
    assert (unrotated <= exact * (1 + 1e-12)).all(), "a token and itself are not rotated"
    assert (exact <= pair * (1 + 1e-12)).all()
    assert (pair <= any_rotation * (1 + 1e-12)).all()
    assert (exact < any_rotation).any(), "the gains are too equal to tell the bounds apart"


def test_exact_bound_equals_the_pair_bound_where_a_quarter_turn_occurs() -> None:
    q_gain = torch.tensor([[3.0, 1.0, 0.5, 0.5]], dtype=torch.float64)
    k_gain = torch.tensor([[1.0, 2.0, 0.5, 0.5]], dtype=torch.float64)
    # The first pair turns a quarter between tokens 0 and 1, so entry 0 of q meets entry 1 of k.
    angle = torch.tensor([[0.0], [torch.pi / 2]], dtype=torch.float64)
    rope = Rope(angle.cos(), angle.sin(), "interleaved")
    expected = torch.tensor([4**0.5 * 6.0], dtype=torch.float64)
    torch.testing.assert_close(qknorm.logit_bound(q_gain, k_gain, rope=rope), expected)
    pair = qknorm.logit_bound(q_gain, k_gain, rotary_dim=2, layout="interleaved")
    torch.testing.assert_close(pair, expected)
    # In the other layout the same entries are not a pair: 0 turns with 1 only in both if R = 2.
    still = Rope(torch.ones(2, 1), torch.zeros(2, 1), "interleaved")
    torch.testing.assert_close(
        qknorm.logit_bound(q_gain, k_gain, rope=still),
        torch.tensor([4**0.5 * 3.0], dtype=torch.float64),
    )


def test_layouts_pair_different_entries() -> None:
    q_gain = torch.tensor([[3.0, 0.1, 0.1, 0.1]], dtype=torch.float64)
    k_gain = torch.tensor([[0.1, 2.0, 0.1, 0.1]], dtype=torch.float64)
    # Entries 0 and 1 are a pair when interleaved, 0 and 2 in halves.
    both = {
        layout: float(qknorm.logit_bound(q_gain, k_gain, rotary_dim=4, layout=layout))
        for layout in ("half", "interleaved")
    }
    assert both["interleaved"] == pytest.approx(2 * 6.0)
    assert both["half"] == pytest.approx(2 * 0.3)


def test_table_per_row_takes_the_worst_row() -> None:
    q_gain, k_gain = gains(5)
    rows = torch.tensor([[3, 4, 5], [0, 40, 7], [9, 9, 9]])
    together = qknorm.logit_bound(q_gain, k_gain, rope=table(rows, 8, "half"))
    alone = [qknorm.logit_bound(q_gain, k_gain, rope=table(row, 8, "half")) for row in rows]
    torch.testing.assert_close(together, torch.stack(alone).amax(0))


@pytest.mark.parametrize("scale", [1.0, 0.01, 10.0])
def test_bound_is_proportional_to_the_scale(scale: float) -> None:
    q_gain, k_gain = gains(2)
    options: dict[str, Any] = {"rope": table(torch.arange(5), 4, "half")}
    default = qknorm.logit_bound(q_gain, k_gain, **options)
    torch.testing.assert_close(
        qknorm.logit_bound(q_gain, k_gain, scale=scale, **options), default * D**0.5 * scale
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_widens_the_bound_by_its_rounding(dtype: torch.dtype) -> None:
    # One entry carries the whole head, so x_hat is sqrt(D) * gain and both roundings can go up.
    generator = torch.Generator().manual_seed(0)
    Hq = 256
    q_gain, k_gain = (1 + torch.rand(Hq, D, generator=generator) for _ in range(2))
    q_gain[:, 0] += 1
    k_gain[:, 0] += 1
    x = torch.zeros(1, Hq, 1, D, dtype=dtype)
    x[..., 0] = 100.0
    stats = qknorm.logit_stats(x, x, q_gain=q_gain, k_gain=k_gain, mask=Mask())
    plain = qknorm.logit_bound(q_gain, k_gain, rotary_dim=0)
    wide = qknorm.logit_bound(q_gain, k_gain, rotary_dim=0, dtype=dtype)
    assert (stats.max_logit > plain).any(), "no rounding went up: the test shows nothing"
    assert (stats.max_logit <= wide).all()
    ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(wide, plain * (1 + ulp) ** 3)


def test_measured_maximum_of_random_inputs_stays_below_the_bound() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q_gain, k_gain = (g.float() for g in gains(7))
        rope = table(torch.arange(50), 4, "interleaved")
        q = torch.randn(2, 4, 50, D).to(dtype)
        k = 30 * torch.randn(2, 2, 50, D).to(dtype)
        stats = qknorm.logit_stats(q, k, q_gain=q_gain, k_gain=k_gain, rope=rope)
        bound = qknorm.logit_bound(q_gain, k_gain, rope=rope, dtype=dtype)
        assert (stats.max_logit <= bound).all()
        assert (stats.max_logit > 0.2 * bound).all(), "the bound is far from what happens"


def test_bound_carries_no_gradient() -> None:
    q_gain, k_gain = gains(0)
    assert not qknorm.logit_bound(q_gain.requires_grad_(), k_gain).requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"rotary_dim": 3, "layout": "half"},
        {"rotary_dim": D + 2, "layout": "half"},
        {"rotary_dim": 4},
        {"rotary_dim": -2, "layout": "half"},
    ],
)
def test_impossible_rotary_width_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rotary_dim"):
        qknorm.logit_bound(*gains(0), **options)


def test_gains_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="gains"):
        qknorm.logit_bound(torch.ones(4, D), torch.ones(3, D))


@pytest.mark.parametrize("backend", ["reference", "stock", "cpu"])
@pytest.mark.parametrize("D", [8, 64, 128, 256])
def test_f13_rounding_does_not_carry_a_logit_past_the_bound(D: int, backend: str) -> None:
    """q along k with constant gains attains the bound, so that every rounding upwards shows."""
    generator = torch.Generator().manual_seed(D)
    passed_exact = 0
    for draw in range(60):
        q = torch.randn(1, 1, 32, D, generator=generator) * 10.0 ** (draw % 7 - 3)
        q = q.sign() if draw % 3 == 0 else q
        gain = torch.full((1, D), 0.1 + 4 * float(torch.rand((), generator=generator)))
        k = q if draw % 2 else -q
        options = {"q_gain": gain, "k_gain": gain, "mask": Mask(), "scale": 1.0 if draw % 2 else -1.0}
        _, stats = qknorm.attention(q, k, k, **options, stats=True, eps=1e-12, backend=backend)
        bound = qknorm.logit_bound(gain, gain, scale=options["scale"])
        assert stats.max_logit <= bound
        passed_exact += float(stats.max_logit) > D * float(gain[0, 0].double()) ** 2
    assert passed_exact > 0, "nothing was rounded upwards: the draws test nothing"

"""The conformance suite: any function with the signature of `qknorm.attention` against the oracle.

`check(attention_fn, problem, dtype)` compares out, every gradient and every statistic.

Tolerances come from the problem, not from taste. The oracle's formula is run a second time in low
precision (`storage=`), which gives the error that an honest kernel makes on these very numbers.
Where in a tensor that error may fall is taken from running magnitudes: the same formula with
absolute values, so that a small entry next to large ones is held to its own size. Rounding of q_hat
and k_hat is discontinuous (an fp32 norm may land on the other side of a tie), so each entry near a
tie widens the logits that it touches, and no others.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk heads, G = Hq / Hk, D head width, Dv value
width, R rotary width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oracle
from problems import Inputs, Problem, make_inputs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# A backend may err this many times as much as the low precision run of the oracle ...
BUDGET_FACTOR = 3.0
# ... plus this many units in the last place of the running magnitude, for the order of sums. In
# float64 the low precision run is the oracle itself, so there the floor stands alone.
FLOOR_ULPS = 2.0
FLOOR_ULPS_FLOAT64 = 32.0
# fp32 norm, rotation and rounding of one entry, and accumulation of one logit, in ulps.
HAT_ULPS = 8.0
DOT_ULPS = 8.0
# exp, log and the sums of a row, in ulps of 1 + |value|.
ROW_ULPS = 16.0


def _smallest_step(dtype: torch.dtype) -> float:
    """Below the normal range fp16 keeps a fixed step; CPUs may flush the wider types to zero there."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps if dtype == torch.float16 else info.tiny


@dataclass(frozen=True)
class Expected:
    """What the oracle says, and how far from it an honest run may be."""

    values: dict[str, Tensor]
    tolerances: dict[str, Tensor]
    stats: dict[str, Any]
    stat_tolerances: dict[str, Tensor]
    budget_ulps: dict[str, float]


@functools.lru_cache(maxsize=128)
def expected(problem: Problem, dtype: torch.dtype) -> Expected:
    inputs = make_inputs(problem, dtype)
    trace: dict[str, Any] = {}
    values, stats = _differentiate(
        functools.partial(oracle.attention, round_to=dtype, trace=trace), inputs
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    low_values, _ = _differentiate(
        functools.partial(oracle.attention, round_to=dtype, arith=wide, storage=dtype),
        make_inputs(problem, dtype),
    )
    with torch.no_grad():
        magnitudes, spread = _magnitudes(problem, inputs, trace, dtype)
        stat_tolerances = _stat_tolerances(stats, trace, spread, wide)
    ulp = torch.finfo(dtype).eps
    floor = FLOOR_ULPS_FLOAT64 if dtype == torch.float64 else FLOOR_ULPS
    budget, tolerances = {}, {}
    for name, value in values.items():
        magnitude = magnitudes[name] + torch.finfo(dtype).tiny
        budget[name] = float(((low_values[name] - value).abs() / magnitude).amax()) / ulp
        tolerances[name] = (BUDGET_FACTOR * budget[name] + floor) * ulp * magnitude
        tolerances[name] += 4 * _smallest_step(dtype)
    return Expected(values, tolerances, stats, stat_tolerances, budget)


def _differentiate(fn: Callable[..., Any], inputs: Inputs) -> tuple[dict[str, Tensor], Any]:
    """out and all gradients in float64, and the statistics."""
    out, stats = fn(inputs.q, inputs.k, inputs.v, **inputs.options, stats="rows")
    gradients = torch.autograd.grad(
        out, list(inputs.leaves.values()), inputs.d_out.to(out.dtype), allow_unused=True
    )
    values = {"out": out.detach().double()}
    for (name, leaf), gradient in zip(inputs.leaves.items(), gradients, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        values[f"d_{name}"] = gradient.double()
    return values, stats


def _rotate_magnitude(x_BHTD: Tensor, inputs: Inputs, side: str) -> Tensor:
    """|cos| |a| + |sin| |b| for each entry: the same for the rotation and for its transpose."""
    rope = inputs.options.get("rope")
    if rope is None:
        return x_BHTD
    cos, sin, layout = oracle.table_of(rope, x_BHTD.shape[2], side, torch.float64, 0)
    cos, sin = cos.abs(), sin.abs()
    # A rotation by -angle flips one sign, which absolute values do not see.
    forward = oracle._rotate(x_BHTD, cos, sin, layout)
    backward = oracle._rotate(x_BHTD, cos, -sin, layout)
    return torch.maximum(forward.abs(), backward.abs())


def _magnitudes(
    problem: Problem, inputs: Inputs, trace: dict[str, Any], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Running magnitudes of out and of every gradient; and the uncertainty of each logit."""
    p, o = problem, inputs.options
    ulp = torch.finfo(dtype).eps
    lost = _smallest_step(dtype) / ulp  # probabilities that vanish when they are stored
    wide_ulp = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    scale = abs(p.D**-0.5 if p.scale is None else p.scale)
    group, G = trace["group"], p.Hq // p.Hk

    def ungroup(x: Tensor) -> Tensor:
        """Sum over the query heads of a key head, axis 1."""
        return x.unflatten(1, (p.Hk, G)).sum(2)

    def normed(x: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """|x_hat| before RoPE, |x / rms| and 1 / rms."""
        x = x.detach().double()
        if gain is None:
            return x.abs(), None, None
        inverse = (x.square().mean(-1, keepdim=True) + p.eps) ** -0.5
        unit = (x * inverse).abs()
        return unit * gain.detach().double().abs()[:, None], unit, inverse

    def through_norm(
        dy: Tensor, gain: Tensor | None, unit: Tensor | None, inverse: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Magnitudes of the gradients of the input and of the gain `[H, D]`."""
        if gain is None or unit is None or inverse is None:
            return dy, None
        pulled = dy * gain.detach().double().abs()[:, None]
        dx = inverse * (pulled + unit * (pulled * unit).mean(-1, keepdim=True))
        return dx, (dy * unit).sum((0, 2))

    gq, gk = o.get("q_gain"), o.get("k_gain")
    yq, uq, rq = normed(inputs.q, gq)
    yk, uk, rk = normed(inputs.k, gk)
    q_hat, k_hat = trace["q_hat"].abs(), trace["k_full"].abs()

    def flip(value: Tensor, size: Tensor) -> Tensor:
        """How far one entry moves when fp32 arithmetic lands on the other side of a tie."""
        off = HAT_ULPS * wide_ulp * size
        up, down = ((value + sign * off).to(dtype).double() for sign in (1, -1))
        return (up - down).abs() + off * (dtype == torch.float32) + off * (dtype == torch.float64)

    if gq is None and gk is None and "rope" not in o:
        flip_q, flip_k = torch.zeros_like(q_hat), torch.zeros_like(k_hat)
    else:
        exact: dict[str, Any] = {}
        # The values before the rounding decide which are near a tie.
        oracle.attention(inputs.q, inputs.k, inputs.v, **o, trace=exact)
        flip_q = flip(exact["q_hat"], _rotate_magnitude(yq, inputs, "q"))
        flip_k = flip(exact["k_full"], _rotate_magnitude(yk, inputs, "k")[:, group])
    dot = q_hat @ k_hat.mT
    spread = flip_q @ k_hat.mT + q_hat @ flip_k.mT + flip_q @ flip_k.mT
    spread = scale * (spread + DOT_ULPS * wide_ulp * dot)

    P, visible = trace["p"].detach(), trace["visible"]
    spread = torch.where(visible, torch.expm1(spread.clamp(max=20.0)), 0.0)
    v_full = trace["v_full"].abs()
    sink_logit, P_sink = trace["sink_logit"], trace["p_sink"]
    sink_value = torch.zeros(p.Hq, p.Dv, dtype=torch.float64)
    sink_spread = torch.zeros_like(P[..., 0])
    if P_sink is None:
        P_sink = torch.zeros_like(sink_spread)
    elif "sink_key" in inputs.leaves:
        sink_value = trace["sink_value"].abs()
        sq, tok = trace["sink_q"].abs(), trace["token"][:, group].abs()
        exact = {}
        oracle.attention(inputs.q, inputs.k, inputs.v, **o, trace=exact)
        flip_sq = flip(exact["sink_q"], sq) if gq is not None else torch.zeros_like(sq)
        flip_t = flip(exact["token"][:, group], tok) if gk is not None else torch.zeros_like(tok)
        moved = flip_sq * tok + sq * flip_t + flip_sq * flip_t
        sink_spread = scale * (moved + DOT_ULPS * wide_ulp * sq * tok).sum(-1)
    else:
        sink_spread = wide_ulp * sink_logit.abs()
    sink_spread = torch.expm1(sink_spread.clamp(max=20.0))

    # Relative errors of the logits, in ulps, move the probabilities; the denominator shares them.
    shared = (P * spread).sum(-1) + P_sink * sink_spread
    weight = P * (1 + (spread + shared[..., None]) / ulp) + lost * visible
    sink_weight = P_sink * (1 + (sink_spread + shared) / ulp)
    d_out = inputs.d_out.double().abs()
    out = weight @ v_full + sink_weight[..., None] * sink_value[:, None]
    dP = d_out @ v_full.mT
    delta = (d_out * out).sum(-1)
    dS = weight * (dP + delta[..., None]) + lost * visible
    d_sink = sink_weight * ((d_out * sink_value[:, None]).sum(-1) + delta)
    dq_turned = scale * dS @ k_hat
    dk_turned = ungroup(scale * dS.mT @ q_hat)
    dq_hat = _rotate_magnitude(dq_turned, inputs, "q")
    dk_hat = _rotate_magnitude(dk_turned, inputs, "k")

    found = {"out": out, "d_v": ungroup(weight.mT @ d_out)}
    if "sink" in inputs.leaves:
        found["d_sink"] = d_sink.sum((0, 2))
    token_gain = 0.0
    if "sink_key" in inputs.leaves:
        found["d_sink_value"] = ungroup((sink_weight[..., None] * d_out).sum(2)).sum(0)
        dq_hat = dq_hat + scale * d_sink[..., None] * tok
        d_token = ungroup((scale * d_sink[..., None] * sq).sum(2, keepdim=True)).sum(0)[None]
        key = inputs.leaves["sink_key"][None, :, None]
        _, ut, rt = normed(key, gk)
        d_key, token_gain = through_norm(d_token, gk, ut, rt)
        found["d_sink_key"] = d_key[0, :, 0]
    found["d_q"], q_gain = through_norm(dq_hat, gq, uq, rq)
    found["d_k"], k_gain = through_norm(dk_hat, gk, uk, rk)
    if q_gain is not None and k_gain is not None:
        found["d_q_gain"], found["d_k_gain"] = q_gain, k_gain + token_gain
    return found, {"logit": spread, "sink": sink_spread}


def _stat_tolerances(
    stats: dict[str, Any], trace: dict[str, Any], spread: dict[str, Tensor], wide: torch.dtype
) -> dict[str, Tensor]:
    """First order in the uncertainty e of each logit; plus ulps of the row's arithmetic.

    d lse = sum p e, d max <= max e, d H = -sum p (ln p + H) e, d mass = mass (1 - mass) (e_sink - e).
    A tie that falls the other way in half precision makes e large enough for the second order of H.
    """
    row_ulps = ROW_ULPS * torch.finfo(wide).eps
    rows, visible, e = stats["rows"], trace["visible"], spread["logit"]
    s = torch.where(visible, trace["s"], -torch.inf)
    sees = visible.any(-1)
    log_p = torch.where(visible, s - torch.where(sees, s.logsumexp(-1), 0.0)[..., None], 0.0)
    keys_p = torch.where(visible, log_p.exp(), 0.0)
    mass = stats["mass"]
    H = torch.where(sees, -(keys_p * log_p).sum(-1), 0.0)
    d_lse = (keys_p * e).sum(-1)
    steep = (log_p + H[..., None]).abs()
    finite = torch.where(sees, s.amax(-1), 0.0)
    found = {
        "rows.max_logit": e.amax(-1) + row_ulps * finite.abs(),
        "rows.entropy_nats": (keys_p * (steep * e + (1 + steep) * e.square())).sum(-1)
        + row_ulps * (1 + H),
    }
    lse = torch.where(rows["lse"] == -torch.inf, 0.0, rows["lse"])
    found["rows.lse"] = d_lse + spread["sink"] + row_ulps * (1 + lse.abs() + finite.abs())
    d_mass = mass * (1 - mass) * (d_lse + spread["sink"] + row_ulps * (1 + finite.abs()))
    d_mass = d_mass + row_ulps * mass + 4 * torch.finfo(wide).tiny
    # The oracle's own exp(sink - lse), in float64, rounds both before they cancel.
    d_mass = d_mass + 2 * torch.finfo(torch.float64).eps * lse.abs() * mass
    counted, choice = stats["counted"], stats["choice"]

    def mean(x: Tensor, where: Tensor) -> Tensor:
        total = torch.where(where, x, 0.0).sum((0, 2))
        return total / where.sum((0, 2)).clamp(min=1)

    log_keys = rows["visible_keys"][:, None].clamp(min=2).double().log()
    found["max_logit"] = torch.where(counted, found["rows.max_logit"], 0.0).amax((0, 2))
    found["entropy_nats"] = mean(found["rows.entropy_nats"], counted)
    found["entropy_ratio"] = mean(found["rows.entropy_nats"] / log_keys, choice)
    found["sink_mass"] = mean(d_mass, counted)
    return found


def _get(stats: Any, name: str) -> Tensor:
    for part in name.split("."):
        stats = stats[part] if isinstance(stats, dict) else getattr(stats, part)
    return stats


def compare(name: str, actual: Tensor, wanted: Tensor, tolerance: Tensor) -> None:
    """Raise AssertionError with the worst entry. NaN and infinities must stand where they should."""
    assert actual.shape == wanted.shape, f"{name}: shape {actual.shape}, expected {wanted.shape}"
    actual = actual.detach().double()
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())
    bad = ~((actual - wanted).abs() <= tolerance) & ~same
    if bad.any():
        excess = torch.where(bad, (actual - wanted).abs() / tolerance, 0.0)
        excess = torch.where(excess.isnan(), torch.inf, excess)
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{name}{list(at)} is {actual[at]:.10g}, the oracle says {wanted[at]:.10g} "
            f"(tolerance {tolerance.expand(wanted.shape)[at]:.3g}, {int(bad.sum())} entries off, "
            f"worst {float(excess.amax()):.3g} times the tolerance)"
        )


def check(attention_fn: Callable[..., Any], problem: Problem, dtype: torch.dtype) -> None:
    """Raise AssertionError if `attention_fn` is not `qknorm.attention` on this problem."""
    want = expected(problem, dtype)
    inputs = make_inputs(problem, dtype)
    out, _ = probe = attention_fn(inputs.q, inputs.k, inputs.v, **inputs.options, stats="rows")
    assert out.dtype == dtype, f"out is {out.dtype}, expected {dtype}"
    values, stats = _differentiate(lambda *_, **__: probe, inputs)
    for name, wanted in want.values.items():
        compare(name, values[name], wanted, want.tolerances[name])
    for name, tolerance in want.stat_tolerances.items():
        actual = _get(stats, name)
        assert not actual.requires_grad, f"{name} carries a gradient"
        compare(name, actual, _get(want.stats, name), tolerance)
    zero = torch.zeros(())
    for name in ("row_count", "ratio_count", "rows.visible_keys", "rows.is_real"):
        wanted, actual = _get(want.stats, name), _get(stats, name)
        compare(name, actual.expand(wanted.shape), wanted.double(), zero)


def as_attention_fn(fault: str | None = None) -> Callable[..., Any]:
    """The oracle, faulty if asked, in the clothes of a backend."""

    def fn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        out, stats = oracle.attention(q, k, v, **options, round_to=q.dtype, fault=fault)
        return out.to(q.dtype), stats

    return fn

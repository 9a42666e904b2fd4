"""The formula of an attention, read back from how q and k answer to raw projections.

At every token the entries of a head are `q = A n(y) + b`: n is the norm without its gain, A holds the
gain and the rotation. A is found by least squares for each norm that comes into question; the norm with
the smallest residual is the one, and A tells gain, rotation and their order.

Shapes: M samples, B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qknorm.auditor.norms import NORMS, Key, axes_of, by_share, normalized, shares
from qknorm.auditor.scores import Scores, read_scores
from qknorm.auditor.site import NotUnderstoodError, Site

SPREAD = 8.0  # standard deviation of raw entries, beside which no sensible eps counts
SMALL = 0.25  # that which no clamp of projections reaches
KNOWN = 0.02  # the residual below which a norm is recognised
EXACT = 3e-5  # that of fp32 arithmetic
RANK = 1e-9  # below this share of the largest a singular value is 0
CONSECUTIVE = 8  # tokens at the start of which A is found
STEP = 0.5  # by which a parameter is moved to see what follows
TURNED = 2e-5  # the share of a pair's other entry above which it is rotated
MIXED = 0.05  # the same at the first token, above which it is no rounding
SCALES = [10.0 ** (-k / 2) for k in range(1, 29)]


@dataclass(frozen=True, kw_only=True)
class Side:
    """What was read of q or of k.

    Attributes:
        norm: None, "rms", "layer", or "l2", whose root mean square is 1 / sqrt(D).
        statistic: as in `Formula`.
        residual: relative, of the best fit in fp32.
        matrices: A of the first CONSECUTIVE tokens and of the last, `[tokens, H, D, D]`.
        gain: effective, `[H, D]`; None without a norm.
        gain_kind: None, "head", "shared", "full" or "scalar".
        gain_parameters: on which q or k depends.
        factor: by which q or k is multiplied beside norm and gain, such as an amplitude of RoPE.
        eps, eps_place: of the norm.
        limit: at which its entries, or the raw ones ("raw_limit"), are clamped.
    """

    norm: str | None
    statistic: str | None
    residual: float
    matrices: Tensor
    gain: Tensor | None
    gain_kind: str | None
    gain_parameters: list[nn.Parameter]
    factor: float
    eps: float | None
    eps_place: str | None
    limit: float | None
    raw_limit: float | None


@dataclass(frozen=True, kw_only=True)
class Formula:
    """How one attention computes, as it was read back.

    Attributes:
        q_norm, k_norm: None, "rms", "layer" (the mean is taken off) or "l2" (unit length).
        statistic: None, "head", "full" (over all heads), "heads" (over heads, per entry), or "2 heads"
            and the like (over so many heads at a time).
        gain, k_gain: None, "head" `[H, D]`, "shared" `[D]`, "full" `[H * D]`, "scalar".
        q_gain_values, k_gain_values: effective, `[H, D]`; None without a norm.
        eps, eps_place: "inside", "outside" or "clamp".
        order: of the gain against RoPE: None, "before", "after", "not identifiable".
        rope: None, "half", "interleaved".
        rotary_width: R, 0 without RoPE.
        v_norm: whether V is normed.
        scale: of q.k, whatever multiplies q, k or their product included; None if not identified.
        softcap, window, sink, causal: as observed at this length.
        q_heads, kv_heads, head_dim: Hq, Hk, D.
    """

    q_norm: str | None
    k_norm: str | None
    statistic: str | None
    gain: str | None
    k_gain: str | None
    q_gain_values: Tensor | None
    k_gain_values: Tensor | None
    eps: float | None
    eps_place: str | None
    order: str | None
    rope: str | None
    rotary_width: int
    v_norm: bool
    scale: float | None
    softcap: float | None
    window: int | None
    sink: bool
    causal: bool
    q_heads: int
    kv_heads: int
    head_dim: int


def read_side(site: Site, side: str) -> Side | None:
    """Read q or k back; None if no norm in question explains it."""
    raw_limit = None
    found = _fit(site, side, SPREAD)
    if found is None or found[1] > EXACT:
        # A clamp of raw entries acts on large ones only.
        small = _fit(site, side, SMALL)
        if small is not None and small[1] < 1e-3 and (found is None or found[1] > 10 * small[1]):
            found, raw_limit = small, _raw_limit(site, side)
    if found is None or found[1] > KNOWN:
        return None
    (norm, statistic), residual, matrices, limit = found
    first = torch.diagonal(matrices[0], dim1=-2, dim2=-1)  # [H, D]
    mixed = float((matrices[0] - torch.diag_embed(first)).abs().max() / first.abs().max())
    if mixed > MIXED and limit is None:
        raise NotUnderstoodError(f"entries of {side} are rotated or mixed at the first token already")
    parameters = _gain_parameters(site, side)
    spread = SPREAD if raw_limit is None else SMALL
    gain, kind, factor = _gain(site, side, first, (norm, statistic), parameters, spread, limit)
    eps = place = None
    if norm is not None:
        eps, place = _eps(site, side, (norm, statistic), spread, limit)
        if norm == "rms" and statistic == "head" and gain is not None:
            norm, gain, factor = _length(gain, factor, place, is_bare=not parameters)
    return Side(
        norm=norm,
        statistic=statistic,
        residual=residual,
        matrices=matrices,
        gain=gain,
        gain_kind=kind,
        gain_parameters=parameters,
        factor=factor,
        eps=eps,
        eps_place=place,
        limit=limit,
        raw_limit=raw_limit,
    )


def _length(gain: Tensor, factor: float, place: str, *, is_bare: bool) -> tuple[str, Tensor, float]:
    """Norm, gain and factor where what is divided by may be the length: two of three speak for it, no
    parameter, a clamp of the length, a factor of 1 / sqrt(D)."""
    unit = gain.shape[-1] ** -0.5
    if is_bare:
        factor = float(gain.mean())
        if float((gain / factor - 1).abs().max()) > 1e-3 or abs(factor - 1) < 1e-3:
            return "rms", gain, 1.0
        gain = gain / factor
    is_clamped, is_unit = place == "clamp", abs(factor / unit - 1) < 1e-3
    if is_bare + is_clamped + is_unit >= 2:
        return "l2", gain * unit, factor / unit
    return ("rms", gain * factor, 1.0) if is_bare else ("rms", gain, factor)


def answers(site: Site, side: str, raw: Tensor, *, module: nn.Module | None = None) -> Tensor:
    """q or k `[B, T, H, D]` in fp64 for raw ones of the same shape."""
    q, k = site.q_and_k(**{side: raw}, module=module)
    return (q if side == "q" else k).double()


def _samples(site: Site, side: str, spread: float, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Raw and answered, `[M, tokens, H, D]` in fp64."""
    shape = site.raw_shape(side)
    count = math.ceil((1.5 * shape[3] + 8) / shape[0])
    generator = torch.Generator().manual_seed(3)
    raws, found = [], []
    for _ in range(count):
        raw = spread * torch.randn(shape, generator=generator)
        raws.append(raw[:, tokens].double())
        found.append(answers(site, side, raw)[:, tokens])
    return torch.cat(raws), torch.cat(found)


def _fit(site: Site, side: str, spread: float) -> tuple[Key, float, Tensor, float | None] | None:
    """The best norm, its residual, A of some tokens, and the limit at which answers are clamped."""
    # Consecutive tokens, to compare distances, and the last, at which the slowest pair has turned most.
    T = site.raw_shape(side)[1]
    raw, found = _samples(site, side, spread, sorted({*range(min(T, CONSECUTIVE)), T - 1}))
    if not bool(found.isfinite().all()):
        return None
    limit = _limit(found)
    ends = sorted({0, raw.shape[1] - 1})
    residuals: dict[Key, float] = {}
    for key in (*NORMS, *shares(raw.shape[2])):
        if key not in NORMS and min(residuals.values()) < KNOWN:
            break  # one statistic for some of the heads is rare
        x = normalized(raw[:, ends], key)
        if bool(x.isfinite().all()):
            residuals[key] = _solve(x, found[:, ends], limit)[1]
    best = min(residuals, key=lambda key: residuals[key])
    matrices, residual = _solve(normalized(raw, best), found, limit)
    return best, residual, matrices, limit


def _solve(x: Tensor, y: Tensor, limit: float | None) -> tuple[Tensor, float]:
    """A and the relative residual of `y = A x + b` for each token and head, without clamped answers."""
    M, T, H, D = x.shape
    x_THMD = torch.cat((x, torch.ones(M, T, H, 1, dtype=x.dtype)), -1).permute(1, 2, 0, 3)
    y_THMD = y.permute(1, 2, 0, 3)
    if limit is None:
        solution = _least_squares(x_THMD, y_THMD)
        error = (x_THMD @ solution - y_THMD).square().sum() / y_THMD.square().sum().clamp(min=1e-30)
        return _sparse(solution[..., :D, :].mT, x), float(error.sqrt())
    free = (y_THMD.abs() < limit * (1 - 1e-6)).double()
    # One weighted problem for each entry of the answer.
    weighted = x_THMD[:, :, None] * free.mT[..., None]  # [T, H, D, M, D + 1]
    solution = torch.linalg.pinv(weighted, rtol=RANK) @ (y_THMD * free).mT[..., None]
    error = (weighted @ solution - (y_THMD * free).mT[..., None]).square().sum()
    total = (y_THMD * free).square().sum().clamp(min=1e-30)
    return _sparse(solution[..., :D, 0], x), float((error / total).sqrt())


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """By normal equations: drawn at random, x is far from singular, but for directions of no size that a
    centred norm leaves, in which the ridge keeps the answer small."""
    gram = x.mT @ x
    ridge = RANK * torch.diagonal(gram, dim1=-2, dim2=-1).mean(-1)
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge[..., None].expand(gram.shape[:-1])))
    return torch.cholesky_solve(x.mT @ y, factor)


def _sparse(matrices: Tensor, x: Tensor) -> Tensor:
    """Of centred x a constant in a row of A means nothing: the one that leaves most entries at 0."""
    if float(x.mean(-1).abs().max()) > 1e-9 * float(x.abs().max()):
        return matrices
    return matrices - matrices.median(-1, keepdim=True).values


def _limit(found: Tensor) -> float | None:
    """The largest |entry| if many entries share it."""
    size = found.abs()
    top = float(size.max())
    share = float((size >= top * (1 - 1e-6)).double().mean())
    return top if share > 0.005 and top > 0 else None


def _raw_limit(site: Site, side: str) -> float:
    """Where raw entries stop to count: the raw value beyond which a growing entry changes nothing."""
    base = torch.full(site.raw_shape(side), 0.1)
    last, last_value = None, 0.0
    for value in [0.1 * 1.1**i for i in range(80)]:
        raw = base.clone()
        raw[..., 0] = value
        answer = answers(site, side, raw)[:, 0]
        if last is not None and float((answer - last).abs().max()) < 1e-6 * float(answer.abs().max()):
            return last_value
        last, last_value = answer, value
    return math.inf


def _gain_parameters(site: Site, side: str) -> list[nn.Parameter]:
    """Parameters beside the projections on which q or k depends."""
    with torch.enable_grad():
        attention = site.ask()
        x = attention.q if side == "q" else attention.k
        if not x.requires_grad:
            return []
        parameters = [p for p in site.module.parameters() if p.requires_grad and p.is_floating_point()]
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        grads = torch.autograd.grad((x * weight).sum(), parameters, allow_unused=True)
    return [p for p, g in zip(parameters, grads, strict=True) if g is not None and bool(g.any())]


def _gain(
    site: Site,
    side: str,
    first: Tensor,
    key: Key,
    parameters: list[nn.Parameter],
    spread: float,
    limit: float | None,
) -> tuple[Tensor | None, str | None, float]:
    """The effective gain `[H, D]`, what it is shared by, and the factor beside it.

    q depends on a stored gain w by `a (w + o)`: its derivative gives the factor a.
    """
    norm, statistic = key
    if norm is None:
        return None, None, float(first.median())
    H, D = first.shape
    raw = torch.cat([_random(site, side, spread, seed) for seed in range(5, 9)])  # [4 B, T, H, D]
    n = normalized(raw.double(), key)[:, 0]  # [4 B, H, D]

    def ask() -> Tensor:
        return torch.cat([answers(site, side, part)[:, 0] for part in raw.split(site.batch)])

    base = ask()
    for parameter in parameters:
        with _nudged(parameter, STEP):
            after = ask()
        slope = (after - base) / STEP / n
        free = torch.ones_like(slope, dtype=torch.bool)
        if limit is not None:
            free = torch.maximum(base.abs(), after.abs()) < limit * (1 - 1e-6)
        slope = torch.where(free, slope, torch.nan)
        size = slope.abs().nanmean(0).nan_to_num()
        moved = size > 1e-3 * float(size.max())
        # A gain changes an entry in proportion to itself; a bias does not.
        chosen = slope[:, moved]
        middle = chosen.nanmedian(0).values
        spreads = (chosen - middle).abs().nan_to_num().amax(0)
        if chosen.numel() == 0 or float(spreads.max()) > 2e-2 * float(middle.abs().max()):
            continue
        heads, entries = int(moved.any(1).sum()), int(moved.any(0).sum())
        if entries > 1:
            kind = "scalar"
        elif heads > 1 or parameter.numel() == D:
            kind = "shared" if heads == H else "head"
        else:
            kind = "full" if statistic == "full" else "head"
        factor = float(middle.abs().median())
        return first / factor, kind, factor
    return first, None, 1.0


def _random(site: Site, side: str, spread: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(site.raw_shape(side), generator=generator)


@contextmanager
def _nudged(parameter: nn.Parameter, step: float) -> Iterator[None]:
    """Its first entry moved, and put back to the bit."""
    with torch.no_grad():
        at = (0,) * parameter.dim()
        before = parameter[at].clone()
        parameter[at] += step
        try:
            yield
        finally:
            parameter[at] = before


def _eps(site: Site, side: str, key: Key, spread: float, limit: float | None) -> tuple[float, str]:
    """eps and its place, from answers to ever smaller raw vectors. 0 if none was felt."""
    raw = _random(site, side, SMALL, 7)

    def ask(factor: float) -> Tensor:
        return by_share(answers(site, side, factor * raw)[:, 0], key)

    full, rest = ask(1.0 if spread == SMALL else 256.0), ask(0.0).nan_to_num()
    axes = axes_of(key)
    centered = by_share(raw.double()[:, 0], key)
    if key[0] == "layer":
        centered = centered - centered.mean(axes, keepdim=True)
    size = centered.square().mean(axes, keepdim=True).sqrt()
    width = 1
    for axis in axes:
        width *= centered.shape[axis]
    felt: dict[str, list[Tensor]] = {"inside": [], "outside": [], "clamp": []}
    free = torch.ones_like(full) if limit is None else (full.abs() < limit * (1 - 1e-6)).double()
    span = ((full - rest) * free).square().sum(axes, keepdim=True)
    for c in SCALES:
        ratio = ((ask(c) - rest) * (full - rest) * free).sum(axes, keepdim=True) / span
        if not bool(ratio.isfinite().all()) or float(ratio.median()) < 0.01:
            break
        if 0.05 < float(ratio.median()) < 0.95:
            s = c * size
            felt["inside"].append(s.square() * (ratio.clamp(max=1).pow(-2) - 1))
            felt["outside"].append(s * (1 / ratio.clamp(max=1) - 1))
            felt["clamp"].append(s / ratio)
    if not felt["inside"]:
        return 0.0, "inside"
    spreads = {}
    for place, values in felt.items():
        logs = torch.stack(values).clamp(min=1e-30).log()
        spreads[place] = (float(logs.std()) if logs.numel() > 1 else 0.0, float(logs.median().exp()))
    place = min(spreads, key=lambda name: spreads[name][0])
    value = spreads[place][1]
    if place == "clamp":  # `F.normalize` clamps the length, not the root mean square
        value *= width**0.5
    return value, place


def read(site: Site) -> tuple[Formula, dict[str, Side], Scores]:
    """Read one attention back: the formula, and what it was made from.

    Raises NotUnderstoodError where no formula fits.
    """
    sides = {}
    for name in ("q", "k"):
        side = read_side(site, name)
        if side is None:
            raise NotUnderstoodError(f"{name} is no norm, gain and rotation of a projection")
        sides[name] = side
    q, k = sides["q"], sides["k"]
    scores = read_scores(site, normed=q.norm is not None and k.norm is not None)
    normed = q if q.norm is not None else k
    rope, width = _rope(q.matrices)
    formula = Formula(
        q_norm=q.norm,
        k_norm=k.norm,
        statistic=normed.statistic,
        gain=q.gain_kind,
        k_gain=k.gain_kind,
        q_gain_values=q.gain,
        k_gain_values=k.gain,
        eps=normed.eps,
        eps_place=normed.eps_place,
        order=_order([side for side in (q, k) if side.norm is not None], rope),
        rope=rope,
        rotary_width=width,
        v_norm=_is_v_normed(site),
        scale=None if scores.scale is None else scores.scale * q.factor * k.factor,
        softcap=scores.softcap,
        window=scores.window,
        sink=scores.sink,
        causal=scores.causal,
        q_heads=site.q_heads,
        kv_heads=site.kv_heads,
        head_dim=site.head_dim,
    )
    return formula, sides, scores


def _rope(matrices: Tensor) -> tuple[str | None, int]:
    """Layout and width of the rotation."""
    T, _, D, _ = matrices.shape
    size = torch.diagonal(matrices[0], dim1=-2, dim2=-1).abs()  # [H, D]
    scale = (size[:, :, None] * size[:, None, :]).sqrt().clamp(min=1e-12)
    off = (matrices.abs() / scale).amax((0, 1))
    off = off - torch.diag_embed(torch.diagonal(off))
    turned = off.amax(0) > TURNED
    if T < 2 or not bool(turned.any()):
        return None, 0
    partners = off.argmax(0)
    sure = (off.amax(0) > 0.05).nonzero().flatten()
    distance = int((partners[sure] - sure).abs().mode().values) if len(sure) else D // 2
    last = int(turned.nonzero().max()) + 1
    if distance == 1 and not (D == 2 and len(sure) == 2):
        return "interleaved", last + last % 2
    # Pairs (i, i + R/2) where all of them turn; some models let only some of a longer half turn.
    count = int(turned.sum())
    return "half", 2 * distance if count > distance else count


def _order(sides: list[Side], rope: str | None) -> str | None:
    """Of gain and rotation: which of the two factorings of A leaves a rotation."""
    if not sides or rope is None:
        return None
    verdicts = set()
    for side in sides:
        A = side.matrices[1:]
        g = torch.diagonal(side.matrices[0], dim1=-2, dim2=-1)  # [H, D]
        if bool((g.abs() < 1e-6).any()):
            continue
        before, after = A / g[None, :, None, :], A / g[None, :, :, None]
        eye = torch.eye(A.shape[-1], dtype=A.dtype)
        error = {
            "before": float((before @ before.mT - eye).abs().max()),
            "after": float((after @ after.mT - eye).abs().max()),
        }
        low = max(1e-3, 20 * side.residual)
        if max(error.values()) < low:
            verdicts.add("not identifiable")
        else:
            verdicts.add(min(error, key=lambda name: error[name]))
    for verdict in ("after", "before"):
        if verdict in verdicts:
            return verdict
    return "not identifiable" if verdicts else None


def _is_v_normed(site: Site) -> bool:
    small, large = (site.ask({i: f * y for i, y in site.outputs.items()}).v for f in (0.05, 0.2))
    assert small is not None
    assert large is not None
    before, after = small.detach().double().norm(), large.detach().double().norm()
    return bool(after < 2 * before)

"""From the formula of one attention to findings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qknorm.auditor.findings import Finding, finding
from qknorm.auditor.formula import CONSECUTIVE, EXACT, Formula, Side, answers
from qknorm.auditor.scores import Scores
from qknorm.auditor.site import Site

LOW_EPS = 0.9e-6  # 1e-6 as far as it can be measured
MOST_STEPS = 3  # of CONSECUTIVE tokens: within a row, to the next row, and from text to an image
NOT_RELATIVE = {False: 2e-3, True: 3e-2}  # in fp32; where tables of cos and sin came in low precision


def of_norms(path: str, f: Formula, q: Side, k: Side) -> Iterator[Finding]:
    """Which norms there are, over what, with which gains."""
    if f.q_norm is None and f.k_norm is None:
        yield finding("QK001", path, "q and k are not normed")
        return
    if f.q_norm is None or f.k_norm is None:
        normed, bare = ("k", "q") if f.q_norm is None else ("q", "k")
        yield finding("QK016", path, f"{normed} is normed and {bare} is not")
    if f.statistic != "head":
        what = {"full": "all heads together", "heads": "the same entry of all heads"}.get(
            str(f.statistic), f"{f.statistic} at a time, as by ranks that do not reduce it"
        )
        yield finding("QK004", path, f"the statistic is taken over {what}", statistic=str(f.statistic))
    sides = [(name, side) for name, side in (("q", q), ("k", k)) if side.norm is not None]
    bare_sides = [name for name, side in sides if side.gain_kind is None]
    if bare_sides:
        yield finding("QK005", path, f"no gain follows the norm of {' and '.join(bare_sides)}")
    if "shared" in (f.gain, f.k_gain) and max(f.q_heads, f.kv_heads) > 1:
        yield finding("QK006", path, "all heads share one gain")
    if f.order == "after":
        yield finding("QK002", path, "the gain comes after RoPE and differs inside rotated pairs")


def of_eps(path: str, site: Site, sides: dict[str, Side]) -> Iterator[Finding]:
    """QK007, once for a layer."""
    for name, side in sides.items():
        if side.norm is None:
            continue
        assert side.eps is not None
        zero = answers(site, name, torch.zeros(site.raw_shape(name)))
        words = []
        if side.eps < LOW_EPS or side.eps_place != "inside":
            where = {"clamp": ", a clamp of the length", "outside": ", outside the root"}
            words.append(f"eps of {name} is {side.eps:.1e}{where.get(str(side.eps_place), '')}")
        if not bool(zero.isfinite().all()):
            words.append(f"a zero {name} gives NaN")
        if words:
            yield finding("QK007", path, "; ".join(words), eps=side.eps, place=str(side.eps_place))
            return


def of_precision(
    path: str, site: Site, sides: dict[str, Side], original: nn.Module
) -> Iterator[Finding]:
    """QK008: in fp32 by what the best norm leaves unexplained; in the model's own low dtype by how much
    the length of an answer differs from that of the fp32 norm, which is shared by all its entries."""
    for name, side in sides.items():
        if side.norm is None:
            continue
        if side.residual > EXACT:
            # Where a clamp of projections acts, large ones are no question of precision.
            lost = _lost_when_large(site, name) if side.raw_limit is None else 0.0
            error = max(side.residual, lost)
            text = f"{name} differs from an exact norm by {error:.1e}"
            yield finding("QK008", path, text, error=error)
            return
        dtype = next((p.dtype for p in original.parameters() if p.is_floating_point()), torch.float32)
        if dtype not in (torch.bfloat16, torch.float16):
            continue
        error = _error_of_length(site, name, original, dtype)
        if error > 0.2 * torch.finfo(dtype).eps:
            text = f"in {dtype}, lengths of {name} err by {error:.1e}".replace("torch.", "")
            yield finding("QK008", path, text, error=error, dtype=str(dtype))
            return


def _lost_when_large(site: Site, name: str) -> float:
    """How far answers to raw vectors around 300, whose squares overflow in fp16, are from usual ones."""
    raw = torch.randn(site.raw_shape(name), generator=torch.Generator().manual_seed(0))
    usual, large = answers(site, name, raw), answers(site, name, 300 * raw)
    if not bool(large.isfinite().all()):
        return 1.0
    return float(((large * usual).sum(-1) / usual.square().sum(-1) - 1).abs().max())


def _error_of_length(site: Site, name: str, original: nn.Module, dtype: torch.dtype) -> float:
    """Root mean square of the relative error of the lengths of answers, large raw vectors included."""
    errors = []
    for seed, spread in enumerate((1.0, 3.0, 300.0)):
        raw = spread * torch.randn(site.raw_shape(name), generator=torch.Generator().manual_seed(seed))
        raw = raw.to(dtype).float()
        exact = answers(site, name, raw)
        low = answers(site, name, raw, module=original)
        if not bool(low.isfinite().all()):
            return 1.0
        ratio = (low * exact).sum(-1) / exact.square().sum(-1)
        errors.append((ratio - ratio.median()).flatten() if spread < 100 else (ratio - 1).flatten())
    return float(torch.cat(errors).square().mean().sqrt())


def of_limits(path: str, sides: dict[str, Side], scores: Scores) -> Iterator[Finding]:
    """QK011."""
    for name, side in sides.items():
        for limit, what in (
            (side.limit, f"entries of {name}"),
            (side.raw_limit, f"the projection of {name}"),
        ):
            if limit is not None:
                yield finding("QK011", path, f"{what} are clamped at {limit:.3g}", limit=limit)
                return
    if scores.limit is not None:
        yield finding("QK011", path, f"logits are clamped at {scores.limit:.3g}", limit=scores.limit)


def of_scale(path: str, site: Site, f: Formula) -> Iterator[Finding]:
    """QK017, QK018."""
    if f.scale is None:
        return
    D = f.head_dim
    product = int(site.columns("q").product[0, 0])
    hidden = site.parameters[product].numel() // site.outputs[product].shape[-1]
    other = hidden / f.q_heads
    if abs(f.scale * D - 1) < 0.02:
        yield finding("QK017", path, f"q.k is multiplied by {f.scale:.4g} = 1/{D}", scale=f.scale)
    elif other > 1 and other != D and abs(f.scale * other**0.5 - 1) < 0.02:
        text = f"q.k is multiplied by 1/sqrt({hidden} / {f.q_heads}), but heads are {D} wide"
        yield finding("QK018", path, text, scale=f.scale)


def of_rope(path: str, site: Site, f: Formula, q: Side, k: Side, is_low: bool) -> Iterator[Finding]:
    """QK023: whether A_q' A_k at two positions depends on their distance alone."""
    if f.order == "after":
        return
    T = min(q.matrices.shape[0], k.matrices.shape[0], CONSECUTIVE)
    A, C = _rotation(q)[:T], _rotation(k)[:T, site.key_of]
    worst = _not_relative(A, C)
    low = max(NOT_RELATIVE[is_low], 30 * max(q.residual, k.residual))
    if worst > low and (f.causal or not _is_on_a_grid(A, C, low)):
        text = f"logits of the same distance differ by {worst:.1e} between positions"
        yield finding("QK023", path, text, difference=worst)


def _not_relative(A: Tensor, C: Tensor) -> float:
    """How much of A' C differs between pairs of the same distance, head by head."""
    worst = size = 0.0
    for a, c in zip(A.unbind(1), C.unbind(1), strict=True):
        M = torch.einsum("tij,sik->tsjk", a, c)
        size = max(size, float(M.abs().max()))
        if len(a) > 1:
            worst = max(worst, float((M[1:, 1:] - M[:-1, :-1]).abs().max()))
    return worst / size if size else 0.0


def _is_on_a_grid(A: Tensor, C: Tensor, low: float) -> bool:
    """Whether tokens lie on the grid of an image, and not on a line: q and k of a token turn alike, and
    from token to token by few different steps, along a row or to the next one."""
    if float((A - C).abs().max()) > low:
        return False
    if float((A @ A.mT - torch.eye(A.shape[-1], dtype=A.dtype)).abs().max()) > low:
        return False
    steps: list[Tensor] = []
    for step in A[:-1].mT @ A[1:]:
        if not any(float((step - other).abs().max()) <= low for other in steps):
            steps.append(step)
    return len(steps) <= MOST_STEPS


def _rotation(side: Side) -> Tensor:
    """A without the gain, which precedes it."""
    first = torch.diagonal(side.matrices[0], dim1=-2, dim2=-1)
    return side.matrices / torch.where(first.abs() < 1e-6, 1.0, first)[None, :, None, :]


def of_gains(path: str, sides: dict[str, Side], is_trained: bool) -> Iterator[Finding]:
    """QK020."""
    for name, side in sides.items():
        if not is_trained or side.gain is None or side.gain_kind is None:
            continue
        stored = side.gain * (side.gain.shape[-1] ** 0.5 if side.norm == "l2" else 1.0)
        value = float(stored.mean())
        is_one = abs(value - 1) < 1e-4
        if float((stored - value).abs().max()) < 1e-4 * max(1.0, abs(value)) and (
            is_one or side.gain_kind != "scalar"
        ):
            text = f"every gain of {name} is {value:.4g} in a trained model"
            yield finding("QK020", path, text, value=value)
            return


def of_optimizer(
    path: str, sides: dict[str, Side], optimizer: torch.optim.Optimizer
) -> Iterator[Finding]:
    """QK010."""
    gains = {id(p): name for name, side in sides.items() for p in side.gain_parameters}
    is_matrix = "muon" in type(optimizer).__name__.lower()
    for group in optimizer.param_groups:
        here = sorted({gains[id(p)] for p in group["params"] if id(p) in gains})
        if not here:
            continue
        decay = float(group.get("weight_decay", 0.0))
        whose = " and ".join(here)
        orthogonal = group.get("use_muon", is_matrix and "use_muon" not in group)
        if orthogonal:
            yield finding("QK010", path, f"gains of {whose} are in a matrix optimizer")
            return
        if decay > 0:
            yield finding("QK010", path, f"gains of {whose} decay by {decay:g}", weight_decay=decay)
            return


def of_bound(path: str, site: Site, f: Formula, measured: float) -> Iterator[Finding]:
    """QK022: the bound of the gains beside what was seen."""
    if f.q_gain_values is None or f.k_gain_values is None or f.scale is None or f.statistic != "head":
        return
    lengths = []
    for name, gains in (("q", f.q_gain_values), ("k", f.k_gain_values)):
        # What zeros become is the bias of the norm.
        rest = answers(site, name, torch.zeros(site.raw_shape(name))).nan_to_num()
        bias = rest.norm(dim=-1).amax((0, 1))  # [H]
        lengths.append(f.head_dim**0.5 * gains.abs().amax(1) + bias)
    bound = abs(f.scale) * float((lengths[0] * lengths[1][site.key_of]).max())
    text = f"logits are at most {bound:.3g}; the largest seen is {measured:.3g}"
    yield finding("QK022", path, text, bound=bound, measured=measured)

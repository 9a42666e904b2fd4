"""From the formula of one attention to findings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qknorm.audit.findings import Finding, finding
from qknorm.audit.formula import CONSECUTIVE, EXACT, Formula, Side, answers
from qknorm.audit.scores import Scores
from qknorm.audit.site import Site

LOW_EPS = 0.9e-6  # 1e-6 as far as it can be measured
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
        what = "all heads together" if f.statistic == "full" else "the same entry of all heads"
        yield finding("QK004", path, f"the statistic is taken over {what}", statistic=str(f.statistic))
    sides = [(name, side) for name, side in (("q", q), ("k", k)) if side.norm is not None]
    bare_sides = [name for name, side in sides if side.gain_kind is None]
    if bare_sides:
        yield finding("QK005", path, f"{' and '.join(bare_sides)} has a norm without a gain")
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
        if side.eps < LOW_EPS:
            words.append(f"eps of {name} is {side.eps:.1e}")
        if side.eps_place != "inside":
            words.append(f"eps of {name} is {side.eps_place} the root, at {side.eps:.1e}")
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
            text = f"{name} differs from an exact norm by {side.residual:.1e}"
            yield finding("QK008", path, text, error=side.residual)
            return
        dtype = next((p.dtype for p in original.parameters() if p.is_floating_point()), torch.float32)
        if dtype not in (torch.bfloat16, torch.float16):
            continue
        error = _error_of_length(site, name, original, dtype)
        if error > 0.2 * torch.finfo(dtype).eps:
            text = f"in {dtype}, lengths of {name} err by {error:.1e}".replace("torch.", "")
            yield finding("QK008", path, text, error=error, dtype=str(dtype))
            return


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


def of_rope(path: str, f: Formula, q: Side, k: Side, is_low: bool) -> Iterator[Finding]:
    """QK023: whether A_q' A_k at two positions depends on their distance alone."""
    if f.order == "after":
        return
    A, C = (_rotation(side) for side in (q, k))
    T = min(A.shape[0], CONSECUTIVE)
    G = A.shape[1] // C.shape[1]
    C = C.repeat_interleave(G, 1)
    M = torch.einsum("thij,shik->tshjk", A[:T], C[:T])
    size = float(M.abs().max())
    worst = max(
        float((M[t + 1, s + 1] - M[t, s]).abs().max()) / size for t in range(T - 1) for s in range(T - 1)
    )
    if worst > max(NOT_RELATIVE[is_low], 30 * max(q.residual, k.residual)):
        text = f"logits of the same distance differ by {worst:.1e} between positions"
        yield finding("QK023", path, text, difference=worst)


def _rotation(side: Side) -> Tensor:
    """A without the gain, which precedes it."""
    first = torch.diagonal(side.matrices[0], dim1=-2, dim2=-1)
    return side.matrices / torch.where(first.abs() < 1e-6, 1.0, first)[None, :, None, :]


def of_gains(path: str, sides: dict[str, Side], is_trained: bool) -> Iterator[Finding]:
    """QK020."""
    for name, side in sides.items():
        if not is_trained or side.gain is None or side.gain_kind is None:
            continue
        if float((side.gain - 1).abs().max()) < 1e-4:
            yield finding("QK020", path, f"every gain of {name} is 1 in a trained model")
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


def of_bound(path: str, f: Formula, measured: float) -> Iterator[Finding]:
    """QK022: the bound of the gains beside what was seen."""
    if f.q_gain_values is None or f.k_gain_values is None or f.scale is None or f.statistic != "head":
        return
    G = f.q_heads // f.kv_heads
    tops = f.q_gain_values.abs().amax(1) * f.k_gain_values.abs().amax(1).repeat_interleave(G)
    bound = abs(f.scale) * f.head_dim * float(tops.max())
    text = f"logits are at most {bound:.3g}; the largest seen is {measured:.3g}"
    yield finding("QK022", path, text, bound=bound, measured=measured)

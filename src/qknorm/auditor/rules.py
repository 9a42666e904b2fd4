"""The rules of one attention: each compares a part of its formula with what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.findings import Finding, finding
from qknorm.auditor.fit import CONSECUTIVE, Fit
from qknorm.auditor.formula import Formula, Side
from qknorm.auditor.rope import is_on_a_grid, not_relative
from qknorm.auditor.scores import Scores
from qknorm.auditor.site import Site

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AuditedLayer:
    """An attention whose formula was read.

    Attributes:
        path: the path of its module.
        site: the attention and its module.
        f: the formula.
        sides: the parts of the formula that belong to "q" and to "k".
        scores: what lies between q.k and the softmax.
        real: bool `[B, T]`, False for padding; None if the inputs do not mark padding.
        is_trained: whether the weights come from training.
        optimizer: the optimizer of the model; None if it is not known.
    """

    path: str
    site: Site
    f: Formula
    sides: dict[str, Side]
    scores: Scores
    real: Tensor | None
    is_trained: bool
    optimizer: torch.optim.Optimizer | None

    @property
    def normed(self) -> dict[str, Side]:
        """The sides that have a norm."""
        return {name: side for name, side in self.sides.items() if side.norm is not None}


def of_norms(layer: AuditedLayer) -> Iterator[Finding]:
    """QK001, QK002, QK004, QK005, QK006, QK016: the norms, their statistics and their gains."""
    path, f, sides = layer.path, layer.f, layer.normed
    if not sides:
        yield finding("QK001", path, "q and k are not normed")
        return
    if len(sides) == 1:
        normed, bare = ("k", "q") if f.q_norm is None else ("q", "k")
        yield finding("QK016", path, f"{normed} is normed and {bare} is not")
    if f.statistic != "head":
        what = {"full": "all heads together", "heads": "the same entry of all heads"}.get(
            str(f.statistic), f"{f.statistic} at a time, as by ranks that do not reduce it"
        )
        yield finding("QK004", path, f"the statistic is taken over {what}", statistic=str(f.statistic))
    gainless = [name for name, side in sides.items() if side.gain.kind is None and _is_constant(side)]
    if gainless:
        yield finding("QK005", path, f"no gain follows the norm of {' and '.join(gainless)}")
    if "shared" in (f.gain, f.k_gain) and max(f.q_heads, f.kv_heads) > 1:
        yield finding("QK006", path, "all heads share one gain")
    if f.order == "after":
        yield finding("QK002", path, "the gain comes after RoPE and differs inside rotated pairs")


def _is_constant(side: Side) -> bool:
    """Whether the gain is a constant, wherever its values may be stored."""
    assert side.gain.values is not None
    middle = float(side.gain.values.median())
    return float((side.gain.values - middle).abs().max()) < at.PROPORTIONAL * abs(middle)


def of_values(layer: AuditedLayer) -> Iterator[Finding]:
    """QK003: V is normed."""
    if layer.f.v_norm:
        yield finding("QK003", layer.path, "V does not grow with its projection")


def of_eps(layer: AuditedLayer) -> Iterator[Finding]:
    """QK007: eps is missing, too small or in another place. Reported once for a layer."""
    for name, side in layer.normed.items():
        assert side.eps is not None
        zero = layer.site.multiplied(name, drawn(layer.site.raw_shape(name), 0, 0.0))
        words = []
        if side.eps < at.LEAST_EPS or side.eps_place != "inside":
            where = {"clamp": ", a clamp of the length", "outside": ", outside the root"}
            words.append(f"eps of {name} is {side.eps:.1e}{where.get(str(side.eps_place), '')}")
        if side.eps_share > at.EPS_SHARE:
            words.append(
                f"eps of {name} is {side.eps:.1e}, {side.eps_share:.1%} of the number under the root"
            )
        if not bool(zero.isfinite().all()):
            words.append(f"a zero {name} gives NaN")
        if words:
            numbers: dict[str, float | str] = {"eps": side.eps, "place": str(side.eps_place)}
            if side.eps_share > at.EPS_SHARE:
                numbers["share"] = side.eps_share
            yield finding("QK007", layer.path, "; ".join(words), **numbers)
            return


def of_precision(layer: AuditedLayer) -> Iterator[Finding]:
    """QK008: the statistic has a low precision.

    In fp32 the residual of the fit shows it. In the model's own low dtype the length of q or k shows it:
    an error of the statistic scales all entries of a vector alike, which rounding does not.
    """
    site = layer.site
    for name, side in layer.normed.items():
        if side.fit.residual > at.EXACT:
            # Where a clamp of projections acts, large ones are no question of precision.
            lost = _lost_when_large(site, name) if side.fit.raw_limit is None else 0.0
            error = max(side.fit.residual, lost)
            text = f"{name} differs from an exact norm by {error:.1e}"
            yield finding("QK008", layer.path, text, error=error)
            return
        dtype = dtype_of(site.original)
        if dtype not in LOW:
            continue
        error = _error_of_length(site, name, dtype)
        if error > at.LENGTH * torch.finfo(dtype).eps:
            text = f"in {dtype}, lengths of {name} err by {error:.1e}".replace("torch.", "")
            yield finding("QK008", layer.path, text, error=error, dtype=str(dtype))
            return


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, fp32 without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _lost_when_large(site: Site, name: str) -> float:
    """Return the relative error of q or k for raw entries around 300, whose squares overflow in fp16."""
    raw = drawn(site.raw_shape(name), 0)
    usual, large = site.multiplied(name, raw), site.multiplied(name, 300 * raw)
    if not bool(large.isfinite().all()):
        return 1.0
    return float(((large * usual).sum(-1) / usual.square().sum(-1) - 1).abs().max())


def _error_of_length(site: Site, name: str, dtype: torch.dtype) -> float:
    """Return the RMS of the relative error of the lengths of q or k, also for large raw vectors."""
    errors = []
    for seed, spread in enumerate((1.0, 3.0, 300.0)):
        raw = drawn(site.raw_shape(name), seed, spread).to(dtype).float()
        exact = site.multiplied(name, raw)
        low = site.multiplied(name, raw, module=site.original)
        if not bool(low.isfinite().all()):
            return 1.0
        ratio = (low * exact).sum(-1) / exact.square().sum(-1)
        errors.append((ratio - ratio.median()).flatten() if spread < 100 else (ratio - 1).flatten())
    return float(torch.cat(errors).square().mean().sqrt())


def of_limits(layer: AuditedLayer) -> Iterator[Finding]:
    """QK011: entries or logits are clamped."""
    limits: dict[str, float | None] = {}
    for name, side in layer.sides.items():
        limits[f"entries of {name}"] = side.fit.limit
        limits[f"the projection of {name}"] = side.fit.raw_limit
    what, limit = next(((w, limit) for w, limit in limits.items() if limit is not None), ("", None))
    if limit is not None:
        yield finding("QK011", layer.path, f"{what} are clamped at {limit:.3g}", limit=limit)
    if layer.scores.limit is not None:
        limit = layer.scores.limit
        yield finding("QK011", layer.path, f"logits are clamped at {limit:.3g}", limit=limit)


def of_scale(layer: AuditedLayer) -> Iterator[Finding]:
    """QK017, QK018: the scale is 1/D, or belongs to another width."""
    site, f, D = layer.site, layer.f, layer.f.head_dim
    if f.scale is None:
        return
    product = int(site.columns("q").product[0, 0])
    hidden = site.parameters[product].numel() // site.outputs[product].shape[-1]
    other = hidden / f.q_heads
    if abs(f.scale * D - 1) < at.SCALE:
        text = f"q.k is multiplied by {f.scale:.4g} = 1/{D}: as muP has it, or 1/sqrt({D}) twice"
        yield finding("QK017", layer.path, text, scale=f.scale)
    elif other > 1 and other != D and abs(f.scale * other**0.5 - 1) < at.SCALE:
        text = f"q.k is multiplied by 1/sqrt({hidden} / {f.q_heads}), but heads are {D} wide"
        yield finding("QK018", layer.path, text, scale=f.scale)


def of_rope(layer: AuditedLayer) -> Iterator[Finding]:
    """QK023: A_q' A_k at two positions depends on more than their distance."""
    if layer.f.order == "after":
        return
    q, k = layer.sides["q"].fit, layer.sides["k"].fit
    T = min(len(q.matrices), len(k.matrices), CONSECUTIVE)
    A, C = _rotation(q)[:T], _rotation(k)[:T, layer.site.key_of]
    worst = not_relative(A, C)
    rounding = at.RELATIVE_LOW if dtype_of(layer.site.original) in LOW else at.RELATIVE
    low = max(rounding, 30 * max(q.residual, k.residual))
    if worst > low and (layer.f.causal or not is_on_a_grid(A, C, low)):
        text = f"logits of the same distance differ by {worst:.1e} between positions"
        yield finding("QK023", layer.path, text, difference=worst)


def _rotation(side: Fit) -> Tensor:
    """Return A without the gain, which is applied before the rotation."""
    first = torch.diagonal(side.matrices[0], dim1=-2, dim2=-1)
    return side.matrices / torch.where(first.abs() < 1e-6, 1.0, first)[None, :, None, :]


def of_gains(layer: AuditedLayer) -> Iterator[Finding]:
    """QK020: a gain of a trained model is at its initial value."""
    for name, side in layer.sides.items():
        values = side.gain.values
        if not layer.is_trained or values is None or side.gain.kind is None:
            continue
        stored = values * (values.shape[-1] ** 0.5 if side.norm == "l2" else 1.0)
        value = float(stored.mean())
        is_one = abs(value - 1) < at.AT_INITIAL
        if float((stored - value).abs().max()) < at.AT_INITIAL * max(1.0, abs(value)) and (
            is_one or side.gain.kind != "scalar"
        ):
            text = f"every gain of {name} is {value:.4g} in a trained model"
            yield finding("QK020", layer.path, text, value=value)
            return


def of_optimizer(layer: AuditedLayer) -> Iterator[Finding]:
    """QK010: the optimizer decays a gain, or treats it as a matrix."""
    optimizer = layer.optimizer
    if optimizer is None:
        return
    # The formula may have been read from a copy in fp32.
    names = {p: name for name, p in layer.site.module.named_parameters()}
    originals = dict(layer.site.original.named_parameters())
    gains = {originals[names[p]]: name for name, side in layer.sides.items() for p in side.parameters}
    is_matrix = "muon" in type(optimizer).__name__.lower()
    for group in optimizer.param_groups:
        whose = " and ".join(sorted({gains[p] for p in group["params"] if p in gains}))
        decay = float(group.get("weight_decay", 0.0))
        if whose and group.get("use_muon", is_matrix and "use_muon" not in group):
            yield finding("QK010", layer.path, f"gains of {whose} are in a matrix optimizer")
            return
        if whose and decay > 0:
            text = f"gains of {whose} decay by {decay:g}"
            yield finding("QK010", layer.path, text, weight_decay=decay)
            return


def of_bound(layer: AuditedLayer) -> Iterator[Finding]:
    """QK022: state the bound that the gains imply, and the largest logit of real tokens."""
    site, f, logits = layer.site, layer.f, layer.site.attention.logits
    if f.q_gain_values is None or f.k_gain_values is None or f.scale is None or f.statistic != "head":
        return
    if logits is None or layer.scores.has_bias:
        return
    visible = logits > at.HIDDEN
    if layer.real is not None and layer.real.shape == logits.shape[::2]:
        visible = visible & layer.real[:, None, :, None]
    if not bool(visible.any()):
        return
    lengths = []
    for name, gains in (("q", f.q_gain_values), ("k", f.k_gain_values)):
        # What zeros become is the bias of the norm.
        rest = site.multiplied(name, drawn(site.raw_shape(name), 0, 0.0)).nan_to_num()
        bias = rest.norm(dim=-1).amax((0, 1))  # [H]
        lengths.append(f.head_dim**0.5 * gains.abs().amax(1) + bias)
    bound = abs(f.scale) * float((lengths[0] * lengths[1][site.key_of]).max())
    measured = float(logits[visible].max())
    text = f"logits are at most {bound:.3g}; the largest seen is {measured:.3g}"
    yield finding("QK022", layer.path, text, bound=bound, measured=measured)


RULES_OF_A_LAYER = (
    of_norms,
    of_values,
    of_eps,
    of_precision,
    of_limits,
    of_scale,
    of_rope,
    of_gains,
    of_optimizer,
    of_bound,
)

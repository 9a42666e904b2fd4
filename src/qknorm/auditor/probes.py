"""Probes of the whole model: who sees whom, do all paths agree, what does nothing.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qknorm.auditor.findings import Finding, finding
from qknorm.auditor.site import Site
from qknorm.auditor.subject import DOCUMENTS, Subject, output
from qknorm.auditor.trace import HIDDEN

AGREE = {torch.float64: 1e-8, torch.float32: 2e-4}
AGREE_LOW = 6e-2
MOVED = 1e-6


def _dtype(subject: Subject) -> torch.dtype:
    return next((p.dtype for p in subject.model.parameters() if p.is_floating_point()), torch.float32)


def _other_token(tokens: Tensor) -> Tensor:
    """Another id that is in use, for every token."""
    ids = tokens.unique()
    return ids[(torch.searchsorted(ids, tokens) + 1) % len(ids)]


def apart(found: Tensor, base: Tensor) -> Tensor:
    """How far two outputs differ at each token, relative to the largest entry, in fp64: 0 where neither
    is finite, infinite where one is."""
    size = float(base.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
    rows = []
    # Row by row: outputs may be logits over a large vocabulary.
    for one, other in zip(torch.atleast_2d(found), torch.atleast_2d(base), strict=True):
        difference = (one.double() - other.double()).abs().amax(-1) / size
        finite = one.isfinite().all(-1), other.isfinite().all(-1)
        unequal = torch.where(finite[0] == finite[1], 0.0, torch.inf)
        rows.append(torch.where(finite[0] & finite[1], difference, unequal).cpu())
    return torch.stack(rows)


class Leaks:
    """Which outputs move when a token that they must not see is another one."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.not_probed: list[str] = []

    def find(self) -> Iterator[tuple[str, str, float]]:
        """(path, what leaks, relative size)."""
        s = self.subject
        if s.tokens is None or len(s.inputs[s.tokens].unique()) < 2:
            self.not_probed.append("leaks: the model takes no tokens")
            return
        for path in s.paths:
            if path == "decode":
                continue  # a decoded token has no later ones
            base = s.run(path)
            if base.dim() < 3 or base.shape[:2] != s.inputs[s.tokens].shape:
                self.not_probed.append(f"leaks of {path}: its output has no row per token")
                continue
            real = s.real()
            if not bool((base if real is None else base[real.to(base.device)]).isfinite().all()):
                self.not_probed.append(f"leaks of {path}: its outputs are not finite")
            for what, size in self._of(path, base):
                if size > MOVED:
                    yield path, what, size

    def _of(self, path: str, base: Tensor) -> Iterator[tuple[str, float]]:
        s = self.subject
        assert s.tokens is not None
        tokens: Tensor = s.inputs[s.tokens]
        other = _other_token(tokens)
        T = tokens.shape[1]
        known = s.real()
        real = torch.ones(tokens.shape, dtype=torch.bool) if known is None else known
        documents = s.name_of(DOCUMENTS)

        def moved(changed: Tensor, among: Tensor) -> Tensor:
            assert s.tokens is not None
            return torch.where(among, apart(s.run(path, {s.tokens: changed}), base), 0.0)

        influence = {}
        for t in {T - 1, T // 2}:
            changed = tokens.clone()
            changed[:, t] = other[:, t]
            influence[t] = moved(changed, real)[:, :t]
        hidden = torch.cat([(m <= MOVED).double().flatten() for m in influence.values()])
        if s.has_decode or float(hidden.mean()) > 0.5:
            yield "a later token", max(float(m.max()) for m in influence.values() if m.numel())
        if documents is not None:
            ids: Tensor = s.inputs[documents]
            changed = torch.where(ids == ids[:, :1], other, tokens)
            yield "another document", float(moved(changed, (ids != ids[:, :1]).cpu() & real).max())
        if not bool(real.all()):
            changed = torch.where(real.to(tokens.device), tokens, other)
            yield "padding", float(moved(changed, real).max())


def find_leaks(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """QK014 on the path that the model takes by itself, QK019 on another that leaks what it does not."""
    leaks = Leaks(subject)
    found = list(leaks.find())
    not_probed += leaks.not_probed
    default = next(iter(subject.paths))
    own = {what for path, what, _ in found if path == default}
    for path, what, size in found:
        is_finite = size < torch.inf
        how = f"moves outputs by {size:.1e} of their size" if is_finite else "makes outputs NaN"
        evidence = {"moved": size} if is_finite else {}
        if path == default:
            yield finding("QK014", None, f"{what} {how}", **evidence)
        elif what not in own:
            yield finding("QK019", None, f"under {path}, {what} {how}", **evidence, path=path)


def find_disagreement(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """QK015: outputs of real tokens that differ between paths."""
    default, *others = subject.paths
    tolerance = AGREE.get(_dtype(subject), AGREE_LOW)
    base, real = subject.run(default), subject.real()
    for path in others:
        try:
            found = subject.run(path)
        except Exception as error:
            not_probed.append(f"path {path} raised {type(error).__name__}: {str(error)[:200]}")
            continue
        if found.shape != base.shape:
            not_probed.append(f"path {path} returns another shape than {default}")
            continue
        difference = apart(found, base)
        if real is not None and difference.shape == real.shape:
            difference = torch.where(real, difference, 0.0)
        worst = float(difference.max())
        if worst == torch.inf:
            yield finding("QK015", None, f"one of {path} and {default} is not finite", path=path)
        elif worst >= tolerance:
            text = f"{path} and {default} differ by {worst:.1e} of the outputs' size"
            yield finding("QK015", None, text, difference=worst, path=path)


def is_relative(subject: Subject) -> float | None:
    """How far outputs move when all positions shift; None if the model takes no positions."""
    name = subject.positions()
    if name is None or subject.tokens is None:
        return None
    tokens = subject.inputs[subject.tokens]
    given = subject.inputs.get(name)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    positions = positions if given is None else given
    base = subject.run(None, {name: positions})
    return float(apart(subject.run(None, {name: positions + 7}), base).max())


def _of_attention(subject: Subject, layers: Iterable[str]) -> dict[nn.Parameter, str]:
    """Parameters of attention by layer path."""
    found: dict[nn.Parameter, str] = {}
    for path in layers:
        for parameter in subject.model.get_submodule(path).parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                found.setdefault(parameter, path)
    return found


@dataclass(frozen=True)
class _Slope:
    """Of a gradient, whether it is there and not 0, and whether it is finite."""

    moves: bool = False
    is_finite: bool = True


def _slopes(
    subject: Subject, parameters: Iterable[nn.Parameter], path: str, rows: Tensor | None
) -> dict[nn.Parameter, _Slope]:
    """Of a random sum of the outputs of the last token, or of chosen rows `[B, T]`. Each gradient is
    looked at and dropped: together they are as large as the attentions of the model. The graph holds
    what these parameters need and no more."""
    found = dict.fromkeys(parameters, _Slope())
    own = {p: p.grad for p in found}
    others = [p for p in subject.model.parameters() if p.requires_grad and p not in found]

    def look(p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        assert p.grad is not None
        found[p] = _Slope(bool(p.grad.any()), bool(p.grad.isfinite().all()))
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(look) for p in found]
    try:
        for p in found:
            p.grad = None
        for p in others:
            p.requires_grad_(False)
        with torch.enable_grad():
            x = output(subject.paths[path](**subject.inputs))
            if rows is not None:
                x = x[rows.to(x.device)]
            elif x.dim() == 3:
                x = x[:, -1]
            weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
            torch.autograd.backward((x * weight).sum(), inputs=list(found))
    finally:
        for handle in handles:
            handle.remove()
        for p in others:
            p.requires_grad_(True)
        for p, grad in own.items():
            p.grad = grad
    return found


def blind_rows(site: Site, others: Tensor | None) -> Tensor | None:
    """`[B, T]`, the tokens that see no key here, and those of other layers."""
    logits = site.attention.logits
    if logits is None:
        return others
    rows = (logits <= HIDDEN).all(-1).any(1).cpu()
    return rows if others is None or others.shape != rows.shape else others | rows


def find_poison(
    subject: Subject, layers: Iterable[str], blind: Tensor | None, not_probed: list[str]
) -> Iterator[Finding]:
    """QK014: rows whose softmax is 0 / 0, since they see no key, and what they reach."""
    if blind is None or not bool(blind.any()):
        return
    real = subject.real()
    rows = ~blind if real is None or real.shape != blind.shape else ~blind & real
    parameters = _of_attention(subject, layers)
    names = {p: name for name, p in subject.model.named_parameters()}
    for path in subject.paths:
        if path == "decode":
            continue
        base = subject.run(path)
        if base.dim() < 3 or base.shape[:2] != rows.shape:
            not_probed.append(f"rows that see no key, on {path}: its output has no row per token")
            continue
        what = f"on {path}, tokens that see no key make"
        if not bool(base[rows.to(base.device)].isfinite().all()):
            yield finding("QK014", None, f"{what} outputs of others NaN", path=path)
            continue
        try:
            slopes = _slopes(subject, parameters, path, rows) if parameters else {}
        except RuntimeError as error:
            not_probed.append(f"gradients through {path}: {str(error).splitlines()[0][:200]}")
            continue
        spoilt = next((p for p, slope in slopes.items() if not slope.is_finite), None)
        if spoilt is not None:
            name = names[spoilt]
            text = f"{what} the gradient of {name} NaN, though others alone are in the loss"
            yield finding("QK014", parameters[spoilt], text, parameter=name, path=path)


def find_idle(
    subject: Subject, layers: Mapping[str, tuple[int, int]], not_probed: list[str]
) -> Iterator[Finding]:
    """QK009: parameters that do nothing; QK013: sinks that do nothing on some path.

    `layers` holds heads and head width of each layer, the last at the end.
    """
    names = {p: name for name, p in subject.model.named_parameters()}
    parameters = _of_attention(subject, layers)
    default = next(iter(subject.paths))
    # Under decoding an earlier layer acts through the cached keys too.
    decoding = [p for p, layer in parameters.items() if layer in list(layers)[-1:]]
    said: set[tuple[str, str]] = set()
    for path in subject.paths if parameters else ():
        try:
            slopes = _slopes(subject, decoding if path == "decode" else parameters, path, None)
        except RuntimeError as error:
            not_probed.append(f"gradients through {path}: {str(error).splitlines()[0][:200]}")
            continue
        for parameter in (p for p, slope in slopes.items() if not slope.moves):
            layer = parameters[parameter]
            heads, width = layers[layer]
            is_sink = parameter.numel() == heads and heads != width
            code = "QK013" if is_sink else "QK009"
            if code == "QK009" and path != default:
                continue
            if (code, layer) not in said:
                said.add((code, layer))
                text = f"{names[parameter]} moves no output on the path {path}"
                yield finding(code, layer, text, parameter=names[parameter], path=path)


def find_useless_clip(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """QK012: `model.qk_clip_(max_logit)` in a model whose norms undo it."""
    if not callable(getattr(subject.model, "qk_clip_", None)):
        return
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        before = output(model(**subject.inputs))
        try:
            model.qk_clip_(1e-3)  # type: ignore[operator]
        except Exception as error:  # it is another's, with other arguments
            not_probed.append(f"qk_clip_ raised {type(error).__name__}: {str(error)[:200]}")
            return
        weights = any(
            not torch.equal(a, b)
            for a, b in zip(model.parameters(), subject.model.parameters(), strict=True)
        )
        moved = float(apart(output(model(**subject.inputs)), before).max())
    if weights and moved < 1e-2:
        text = f"clipping logits to 0.001 moves outputs by {moved:.1e} only"
        yield finding("QK012", None, text, moved=moved)

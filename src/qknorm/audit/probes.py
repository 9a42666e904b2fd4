"""Probes of the whole model: who sees whom, do all paths agree, what does nothing.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qknorm.audit.findings import Finding, finding
from qknorm.audit.site import Site
from qknorm.audit.subject import DOCUMENTS, PADDING, Subject, output

AGREE = {torch.float64: 1e-8, torch.float32: 2e-4}
AGREE_LOW = 6e-2
MOVED = 1e-6


def _dtype(subject: Subject) -> torch.dtype:
    return next((p.dtype for p in subject.model.parameters() if p.is_floating_point()), torch.float32)


def _other_token(tokens: Tensor) -> Tensor:
    """Another id that is in use, for every token."""
    ids = tokens.unique()
    return ids[(torch.searchsorted(ids, tokens) + 1) % len(ids)]


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
            if base.shape[:2] != s.inputs[s.tokens].shape:
                self.not_probed.append(f"leaks of {path}: its output has no row per token")
                continue
            for what, size in self._of(path, base):
                if size > MOVED:
                    yield path, what, size

    def _of(self, path: str, base: Tensor) -> Iterator[tuple[str, float]]:
        s = self.subject
        assert s.tokens is not None
        tokens: Tensor = s.inputs[s.tokens]
        other = _other_token(tokens)
        T = tokens.shape[1]
        size = float(base.abs().max())
        real = torch.ones(tokens.shape, dtype=torch.bool)
        padding, documents = s.name_of(PADDING), s.name_of(DOCUMENTS)
        if padding is not None:
            real = s.inputs[padding].bool().cpu()
        influence = {}
        for t in {T - 1, T // 2}:
            changed = tokens.clone()
            changed[:, t] = other[:, t]
            moved = (s.run(path, {s.tokens: changed}) - base).abs().amax(-1).cpu() / size
            influence[t] = torch.where(real, moved, 0.0)[:, :t]
        hidden = torch.cat([(m <= MOVED).double().flatten() for m in influence.values()])
        if s.has_decode or float(hidden.mean()) > 0.5:
            yield "a later token", max(float(m.max()) for m in influence.values() if m.numel())
        if documents is not None:
            ids: Tensor = s.inputs[documents]
            changed = torch.where(ids == ids[:, :1], other, tokens)
            moved = (s.run(path, {s.tokens: changed}) - base).abs().amax(-1).cpu() / size
            yield (
                "another document",
                float(torch.where((ids != ids[:, :1]).cpu() & real, moved, 0.0).max()),
            )
        if padding is not None and not bool(real.all()):
            changed = torch.where(real.to(tokens.device), tokens, other)
            moved = (s.run(path, {s.tokens: changed}) - base).abs().amax(-1).cpu() / size
            yield "padding", float(torch.where(real, moved, 0.0).max())


def find_leaks(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """QK014 on the path that the model takes by itself, QK019 on another that leaks what it does not."""
    leaks = Leaks(subject)
    found = list(leaks.find())
    not_probed += leaks.not_probed
    default = next(iter(subject.paths))
    own = {what for path, what, _ in found if path == default}
    for path, what, size in found:
        if path == default:
            yield finding("QK014", None, f"{what} moves outputs by {size:.1e} of their size", moved=size)
        elif what not in own:
            yield finding(
                "QK019", None, f"under {path}, {what} moves outputs by {size:.1e}", moved=size, path=path
            )


def find_disagreement(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """QK015: outputs of real tokens that differ between paths."""
    default, *others = subject.paths
    tolerance = AGREE.get(_dtype(subject), AGREE_LOW)
    base = subject.run(default)
    padding = subject.name_of(PADDING)
    for path in others:
        try:
            found = subject.run(path)
        except Exception as error:
            not_probed.append(f"path {path} raised {type(error).__name__}: {str(error)[:200]}")
            continue
        if found.shape != base.shape:
            not_probed.append(f"path {path} returns another shape than {default}")
            continue
        apart = (found - base).abs().amax(-1) / base.abs().max()
        if padding is not None and apart.shape == subject.inputs[padding].shape:
            apart = torch.where(subject.inputs[padding].bool(), apart, 0.0)
        worst = float(apart.max())
        if not worst < tolerance:
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
    return float((subject.run(None, {name: positions + 7}) - base).abs().max() / base.abs().max())


def idle_parameters(subject: Subject, sites: list[Site], path: str) -> dict[nn.Parameter, str]:
    """Parameters of attention, by layer path, on which the last token's output does not depend."""
    candidates: dict[nn.Parameter, str] = {}
    for site in sites:
        module = subject.model.get_submodule(site.path)
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                candidates.setdefault(parameter, site.path)
    if not candidates:
        return {}
    with torch.enable_grad():
        x = output(subject.paths[path](**subject.inputs))
        x = x[:, -1] if x.dim() == 3 else x
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
        grads = torch.autograd.grad((x * weight).sum(), list(candidates), allow_unused=True)
    return {
        p: layer
        for (p, layer), g in zip(candidates.items(), grads, strict=True)
        if g is None or not bool(g.any())
    }


def find_idle(subject: Subject, sites: list[Site], not_probed: list[str]) -> Iterator[Finding]:
    """QK009: parameters that do nothing; QK013: sinks that do nothing on some path."""
    names = {p: name for name, p in subject.model.named_parameters()}
    heads = {site.path: site.q_heads for site in sites}
    shapes = {site.path: site.head_dim for site in sites}
    default = next(iter(subject.paths))
    last = sites[-1].path if sites else None
    said: set[tuple[str, str]] = set()
    for path in subject.paths:
        try:
            idle = idle_parameters(subject, sites, path)
        except RuntimeError as error:
            not_probed.append(f"gradients through {path}: {str(error).splitlines()[0][:200]}")
            continue
        for parameter, layer in idle.items():
            is_sink = parameter.numel() == heads[layer] and heads[layer] != shapes[layer]
            code = "QK013" if is_sink else "QK009"
            if code == "QK009" and path != default:
                continue
            if path == "decode" and layer != last:
                continue  # an earlier layer acts through the cached keys
            if (code, layer) not in said:
                said.add((code, layer))
                text = f"{names[parameter]} moves no output on the path {path}"
                yield finding(code, layer, text, parameter=names[parameter], path=path)


def find_useless_clip(subject: Subject) -> Iterator[Finding]:
    """QK012: `model.qk_clip_(max_logit)` in a model whose norms undo it."""
    if not callable(getattr(subject.model, "qk_clip_", None)):
        return
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        before = output(model(**subject.inputs)).double()
        model.qk_clip_(1e-3)  # type: ignore[operator]
        weights = any(
            not torch.equal(a, b)
            for a, b in zip(model.parameters(), subject.model.parameters(), strict=True)
        )
        moved = float(
            (output(model(**subject.inputs)).double() - before).abs().max() / before.abs().max()
        )
    if weights and moved < 1e-2:
        text = f"clipping logits to 0.001 moves outputs by {moved:.1e} only"
        yield finding("QK012", None, text, moved=moved)

"""Probes of the whole model: which tokens an output depends on, whether all paths agree, what is unused.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.findings import Finding, finding
from qknorm.auditor.guard import Guarded, NotUnderstoodError
from qknorm.auditor.rules import LOW, dtype_of
from qknorm.auditor.subject import DOCUMENTS, Subject, output
from qknorm.auditor.trace import SeenAttention


def _other_token(tokens: Tensor) -> Tensor:
    """Replace every token id by another one that occurs in the inputs."""
    ids = tokens.unique()
    return ids[(torch.searchsorted(ids, tokens) + 1) % len(ids)]


def apart(found: Tensor, base: Tensor) -> Tensor:
    """Return by how much two outputs differ at each token, in fp64, relative to the largest entry.

    The difference is 0 where neither output is finite, and infinite where one of the two is.
    """
    size = float(base.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
    rows = []
    # Row by row: outputs may be logits over a large vocabulary.
    for one, other in zip(torch.atleast_2d(found), torch.atleast_2d(base), strict=True):
        difference = (one.double() - other.double()).abs().amax(-1) / size
        finite = one.isfinite().all(-1), other.isfinite().all(-1)
        unequal = torch.where(finite[0] == finite[1], 0.0, torch.inf)
        rows.append(torch.where(finite[0] & finite[1], difference, unequal).cpu())
    return torch.stack(rows)


def find_leaks(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """Find outputs that change with a token that they must not see.

    QK014 if that happens on the path that the model takes by default, QK019 if another path leaks what
    the default path does not.
    """
    if subject.tokens is None or len(subject.inputs[subject.tokens].unique()) < 2:
        not_probed.append("leaks: the model takes no tokens")
        return
    shape, real = subject.inputs[subject.tokens].shape, subject.real()
    default, known = next(iter(subject.paths)), set()
    for path in subject.paths:
        if path == "decode":
            continue  # there are no later tokens when a token is decoded
        with Guarded(not_probed, f"leaks of {path}"):
            base = subject.run(path)
            if base.dim() < 3 or base.shape[:2] != shape:
                raise NotUnderstoodError("its output has no row for each token")
            if not bool((base if real is None else base[real.to(base.device)]).isfinite().all()):
                not_probed.append(f"leaks of {path}: its outputs are not finite")
            for what, size in _leaks_of(subject, path, base):
                if size <= at.MOVED:
                    continue
                is_finite = size < torch.inf
                how = f"moves outputs by {size:.1e} of their size" if is_finite else "makes outputs NaN"
                evidence: dict[str, float] = {"moved": size} if is_finite else {}
                if path == default:
                    known.add(what)
                    yield finding("QK014", None, f"{what} {how}", **evidence)
                elif what not in known:
                    yield finding("QK019", None, f"under {path}, {what} {how}", **evidence, path=path)


def _leaks_of(s: Subject, path: str, base: Tensor) -> Iterator[tuple[str, float]]:
    name = str(s.tokens)
    tokens: Tensor = s.inputs[name]
    other = _other_token(tokens)
    T = tokens.shape[1]
    known = s.real()
    real = torch.ones(tokens.shape, dtype=torch.bool, device="cpu") if known is None else known
    documents = s.name_of(DOCUMENTS)

    def moved(changed: Tensor, among: Tensor) -> Tensor:
        return torch.where(among, apart(s.run(path, {name: changed}), base), 0.0)

    influence = {}
    for t in {T - 1, T // 2}:
        changed = tokens.clone()
        changed[:, t] = other[:, t]
        influence[t] = moved(changed, real)[:, :t]
    hidden = torch.cat([(m <= at.MOVED).double().flatten() for m in influence.values()])
    if "decode" in s.paths or float(hidden.mean()) > at.IS_CAUSAL:
        yield "a later token", max(float(m.max()) for m in influence.values() if m.numel())
    if documents is not None:
        ids: Tensor = s.inputs[documents]
        changed = torch.where(ids == ids[:, :1], other, tokens)
        yield "another document", float(moved(changed, (ids != ids[:, :1]).cpu() & real).max())
    if not bool(real.all()):
        changed = torch.where(real.to(tokens.device), tokens, other)
        yield "padding", float(moved(changed, real).max())


def find_disagreement(subject: Subject, not_probed: list[str]) -> Iterator[Finding]:
    """QK015: find outputs of real tokens that differ between paths."""
    default, *others = subject.paths
    dtype = dtype_of(subject.model)
    tolerance = at.AGREE if dtype == torch.float32 else at.AGREE_LOW
    tolerance = at.AGREE_WIDE if dtype == torch.float64 else tolerance
    base, real = subject.run(default), subject.real()
    for path in others:
        with Guarded(not_probed, f"path {path}"):
            found = subject.run(path)
            if found.shape != base.shape:
                raise NotUnderstoodError(f"it returns another shape than {default}")
            difference = apart(found, base)
            if real is not None and difference.shape == real.shape:
                difference = torch.where(real, difference, 0.0)
            worst = float(difference.max())
            if worst == torch.inf:
                yield finding("QK015", None, f"one of {path} and {default} is not finite", path=path)
            elif worst >= tolerance:
                text = f"{path} and {default} differ by {worst:.1e} of the outputs' size"
                yield finding("QK015", None, text, difference=worst, path=path)


def find_shifts(subject: Subject) -> Iterator[Finding]:
    """QK023: find outputs that change when all positions are shifted by the same number."""
    name = subject.positions()
    if name is None or subject.tokens is None:
        return
    tokens = subject.inputs[subject.tokens]
    given = subject.inputs.get(name)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    positions = positions if given is None else given
    base = subject.run(None, {name: positions})
    moved = float(apart(subject.run(None, {name: positions + 7}), base).max())
    if moved > (at.SHIFTED_LOW if dtype_of(subject.model) in LOW else at.SHIFTED):
        yield finding("QK023", None, f"shifting all positions moves outputs by {moved:.1e}", moved=moved)


def _of_attention(subject: Subject, layers: Iterable[str]) -> dict[nn.Parameter, str]:
    """Return the parameters of the attention layers, each with the path of its layer."""
    found: dict[nn.Parameter, str] = {}
    for path in layers:
        for parameter in subject.model.get_submodule(path.split(" #")[0]).parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                found.setdefault(parameter, path)
    return found


def _slopes(
    subject: Subject, parameters: Iterable[nn.Parameter], path: str, rows: Tensor | None = None
) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return the parameters whose gradient is 0, and those whose gradient is not finite.

    The gradient is that of a random sum of the outputs of the last token, or of `rows` `[B, T]` if they
    are given. Each gradient is dropped as soon as it was examined, since all of them together are as
    large as the attention layers. The graph holds only what these parameters need.
    """
    found = list(parameters)
    idle, spoilt = set(found), set()
    grads = {p: p.grad for p in found}
    others = [p for p in subject.model.parameters() if p.requires_grad and p not in idle]

    def look(p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        assert p.grad is not None
        if bool(p.grad.any()):
            idle.discard(p)
        if not bool(p.grad.isfinite().all()):
            spoilt.add(p)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(look) for p in found]
    try:
        for p in found:
            p.grad = None
        for p in others:
            p.requires_grad_(False)
        with torch.enable_grad():
            x = subject.run(path)
            if rows is not None:
                x = x[rows.to(x.device)]
            elif x.dim() == 3:
                x = x[:, -1]
            if x.requires_grad:
                torch.autograd.backward((x * drawn(x.shape, 2).to(x)).sum(), inputs=found)
    finally:
        for handle in handles:
            handle.remove()
        for p in others:
            p.requires_grad_(True)
        for p, grad in grads.items():
            p.grad = grad
    return idle, spoilt


@contextmanager
def _awake(model: nn.Module, idle: Collection[nn.Parameter]) -> Iterator[None]:
    """Put noise into the other parameters that are all 0, since no gradient passes through them.

    LoRA and the last projection of many blocks start at 0.
    """
    zeros = [p for p in model.parameters() if p.is_floating_point() and p not in idle and not p.any()]
    before = [p.detach().clone() for p in zeros]
    with torch.no_grad():
        for n, p in enumerate(zeros):
            p.copy_(drawn(p.shape, n, 0.1))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(zeros, before, strict=True):
                p.copy_(value)


def blind_rows(attention: SeenAttention, others: Tensor | None) -> Tensor | None:
    """Return the tokens `[B, T]` that see no key in this attention or in `others`."""
    if attention.logits is None:
        return others
    rows = (attention.logits <= at.HIDDEN).all(-1).any(1).cpu()
    return rows if others is None or others.shape != rows.shape else others | rows


def find_poison(
    subject: Subject, layers: Iterable[str], blind: Tensor | None, not_probed: list[str]
) -> Iterator[Finding]:
    """QK014: find rows that see no key, whose softmax is 0 / 0, and the outputs that they make NaN."""
    if blind is None or not bool(blind.any()):
        return
    real = subject.real()
    rows = ~blind if real is None or real.shape != blind.shape else ~blind & real
    parameters = _of_attention(subject, layers)
    names = {p: name for name, p in subject.model.named_parameters()}
    for path in subject.paths:
        if path == "decode":
            continue
        with Guarded(not_probed, f"rows that see no key, on {path}"):
            base = subject.run(path)
            if base.dim() < 3 or base.shape[:2] != rows.shape:
                raise NotUnderstoodError("its output has no row for each token")
            what = f"on {path}, tokens that see no key make"
            if not bool(base[rows.to(base.device)].isfinite().all()):
                yield finding("QK014", None, f"{what} outputs of others NaN", path=path)
                continue
            spoilt = _slopes(subject, parameters, path, rows)[1] if parameters else set()
            for parameter in [p for p in parameters if p in spoilt][:1]:
                name = names[parameter]
                text = f"{what} the gradient of {name} NaN, though others alone are in the loss"
                yield finding("QK014", parameters[parameter], text, parameter=name, path=path)


def find_idle(
    subject: Subject, layers: Mapping[str, tuple[int, int]], not_probed: list[str]
) -> Iterator[Finding]:
    """QK009: find parameters on which no output depends. QK013: find sinks that a path ignores.

    `layers` holds heads and head width of each layer, the last at the end.
    """
    names = {p: name for name, p in subject.model.named_parameters()}
    parameters = _of_attention(subject, layers)
    default = next(iter(subject.paths))
    # Under decoding an earlier layer acts through the cached keys too.
    decoding = [p for p, layer in parameters.items() if layer in list(layers)[-1:]]
    said: set[tuple[str, str]] = set()
    for path in subject.paths if parameters else ():
        idle: set[nn.Parameter] = set()
        with Guarded(not_probed, f"gradients through {path}"):
            asleep, _ = _slopes(subject, decoding if path == "decode" else parameters, path)
            if asleep:
                with _awake(subject.model, asleep):
                    idle, _ = _slopes(subject, asleep, path)
        for parameter in (p for p in parameters if p in idle):
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


def find_useless_clip(subject: Subject) -> Iterator[Finding]:
    """QK012: find a `model.qk_clip_(max_logit)` whose effect the norms undo."""
    if not callable(getattr(subject.model, "qk_clip_", None)):
        return
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        before = output(model(**subject.inputs))
        model.qk_clip_(1e-3)  # type: ignore[operator]
        pairs = zip(model.parameters(), subject.model.parameters(), strict=True)
        is_felt = any(not torch.equal(a, b) for a, b in pairs)
        moved = float(apart(output(model(**subject.inputs)), before).max())
    if is_felt and moved < at.CLIPPED:
        text = f"clipping logits to 0.001 moves outputs by {moved:.1e} only"
        yield finding("QK012", None, text, moved=moved)

"""The audit: run the model once, find its attentions, ask each for its formula, probe the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from qknorm.auditor import probes
from qknorm.auditor import thresholds as at
from qknorm.auditor.exact import exact_products
from qknorm.auditor.expected import Expected, check, parse, unchecked
from qknorm.auditor.findings import Finding, Report, checked_reasons, finding
from qknorm.auditor.formula import Formula, read
from qknorm.auditor.guard import Guarded
from qknorm.auditor.rules import RULES_OF_A_LAYER, Layer, dtype_of
from qknorm.auditor.site import find_sites
from qknorm.auditor.subject import Subject, audited, called
from qknorm.auditor.trace import Trace, plainly, run


def audit(
    model: nn.Module,
    inputs: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    trained: bool = False,
    expect: Mapping[str, object] | None = None,
    suppress: Mapping[str, str] | None = None,
) -> Report:
    """Find the invisible mistakes of QK-norm in a model, by probing it.

    Args:
        model: any, in any mode; it is left as it was, to the bit.
        inputs: what it is called with: a tensor, a tuple, or keyword arguments. None for a Hugging Face
            model, which gets random tokens or pixels.
        optimizer: to see in which groups the gains are.
        trained: the weights come from training, so that no gain may sit at its initial value.
        expect: what the attentions are meant to be, such as `{"causal": True, "window": 32}`; see
            docs/audit.md. What is read back otherwise is a finding.
        suppress: reasons by code for findings that are known and wanted.

    Raises:
        ValueError: the model cannot be called so, or shows no attention.
    """
    reasons, expected = checked_reasons(suppress), parse(expect or {})
    # Neither the caller's mode nor his choice of a faster product may change what is found.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        exact_products(),
        audited(model, inputs) as subject,
    ):
        report = _audit(subject, optimizer, trained, expected)
    return report.suppressing(reasons)


def _audit(
    subject: Subject,
    optimizer: torch.optim.Optimizer | None,
    is_trained: bool,
    expected: list[Expected],
) -> Report:
    model, default = subject.model, next(iter(subject.paths))
    trace = Trace(model)
    called(model, lambda: run(trace, subject.paths[default], (), subject.inputs))
    if trace.replaced - {"reference"} or any(map(_is_compiled, model.modules())):
        subject.paths["plain"] = _plainly(subject.paths[default])
    hidden = [f"{path}: {name} does not show what it does" for path, name in trace.opaque.items()]
    not_probed = [*trace.failed, *hidden]
    if not trace.attentions:
        raise ValueError(
            f"{type(model).__name__} showed no attention: no softmax over a product of two "
            "activations, and no call of F.scaled_dot_product_attention"
            + "".join(f"; {sentence}" for sentence in not_probed)
        )
    real, blind, batch = subject.real(), None, 0
    refused: dict[str, list[str]] = {}
    layers: dict[str, tuple[int, int]] = {}  # heads and their width
    findings: list[Finding] = []
    formulas: dict[str, Formula] = {}
    for site in find_sites(trace.attentions, refused):
        path = site.path
        layers[path] = (site.q_heads, site.head_dim)
        batch = batch or site.batch
        blind = probes.blind_rows(site.attention, blind)
        with Guarded(not_probed, path):
            layer = Layer(path, site, *read(site), real, is_trained, optimizer)
            formulas[path] = layer.f
            for rule in RULES_OF_A_LAYER:
                with Guarded(not_probed, f"{path}, {rule.__name__.replace('_', ' ')}"):
                    findings.extend(rule(layer))
            findings.extend(check(expected, layer, not_probed))
            if layer.f.scale is None:
                not_probed.append(f"{path}: what its logits are of q.k, so neither scale nor bound")
    not_probed += [f"{path}: {why}" for path, reasons in refused.items() for why in reasons]
    not_probed += unchecked(expected, formulas, {*layers, *refused})
    # A layer that could not be asked may be one whose parameters do nothing.
    silent = [one for one in trace.attentions if one.path and one.path in refused]
    layers = {one.path: (one.q.shape[1], one.q.shape[-1]) for one in silent} | layers
    has_rope = any(f.rope is not None for f in formulas.values())
    of_the_whole: dict[str, Callable[[], Iterable[Finding]]] = {
        "leaks": lambda: probes.find_leaks(subject, not_probed),
        "paths": lambda: probes.find_disagreement(subject, not_probed),
        "rows that see no key": lambda: probes.find_poison(subject, layers, blind, not_probed),
        "positions": lambda: probes.find_shifts(subject) if has_rope else (),
        "what does nothing": lambda: probes.find_idle(subject, layers, not_probed),
        "qk_clip_": lambda: probes.find_useless_clip(subject),
        "context": lambda: _long_context(model, formulas),
    }
    for what, probe in of_the_whole.items():
        known = {one.code for one in findings}
        with Guarded(not_probed, what):
            if what != "positions" or not known & {"QK002", "QK023"}:
                findings.extend(probe())
    length = int(trace.attentions[0].q.shape[2])
    not_probed += [
        f"a window of {window} keys: the model was called with {length} tokens"
        for window in subject.windows
        if window >= length
    ]
    exercised = [
        f"{len(formulas)} of {len(trace.attentions)} attentions asked for their formula",
        f"paths: {', '.join(subject.paths)}",
        f"dtype: {dtype_of(model)}".replace("torch.", ""),
        f"batch and length: {(batch or trace.attentions[0].q.shape[0], length)}",
    ]
    return Report(
        findings=_once(findings), formulas=formulas, exercised=exercised, not_probed=not_probed
    )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _plainly(call: Callable[..., Any]) -> Callable[..., Any]:
    """The model as it was traced."""

    def plain(**inputs: Any) -> Any:
        with plainly():
            return call(**inputs)

    return plain


def _long_context(model: nn.Module, formulas: Mapping[str, Formula]) -> list[Finding]:
    length = getattr(getattr(model, "config", None), "max_position_embeddings", 0) or 0
    normed = [f for f in formulas.values() if f.q_norm is not None]
    if length >= at.LONG and normed and not any(f.sink for f in normed):
        return [finding("QK021", None, f"{length} tokens of context and no sink", tokens=float(length))]
    return []


def _once(findings: list[Finding]) -> list[Finding]:
    seen: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        seen.setdefault((one.code, one.layer, *map(one.evidence.get, ("path", "key"))), one)
    return list(seen.values())

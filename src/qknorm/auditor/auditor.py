"""Audit a model: run it, find its attentions, read the formula of each, and probe the whole model."""

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
from qknorm.auditor.rules import RULES_OF_A_LAYER, AuditedLayer, dtype_of
from qknorm.auditor.site import find_sites
from qknorm.auditor.subject import Subject, audited, called
from qknorm.auditor.trace import SeenAttention, Trace, plainly, run


def audit(
    model: nn.Module,
    inputs: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    trained: bool = False,
    expect: Mapping[str, object] | None = None,
    suppress: Mapping[str, str] | None = None,
) -> Report:
    """Find mistakes of QK-norm that raise no error, by running a model with chosen values.

    Args:
        model: any module, in training or evaluation mode. It is restored to the bit.
        inputs: the arguments of the model: a tensor, a tuple of positional arguments, or a mapping of
            keyword arguments. None is allowed for a Hugging Face model, which gets random tokens or
            pixels.
        optimizer: the optimizer of the model. It is checked that no group decays the gains or treats
            them as matrices.
        trained: whether the weights come from training. If they do, a gain at its initial value is a
            finding.
        expect: the formula that the attentions are meant to have, such as
            `{"causal": True, "window": 32}`; see docs/audit.md. A difference is a finding.
        suppress: reasons by code for findings that are known and accepted.

    Returns:
        The report.

    Raises:
        ValueError: the model cannot be called with these inputs, no attention was found in it, or an
            expectation or a code is unknown.
    """
    reasons, expected = checked_reasons(suppress), parse(expect or {})
    # The result depends neither on the inference mode nor on the precision that the caller has set.
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
    hidden = [
        f"{path}: {name} may compute attention, which cannot be seen from outside"
        for path, name in trace.opaque.items()
    ]
    not_probed = [*trace.failed, *hidden]
    if not trace.attentions:
        raise ValueError(
            f"no attention was found in {type(model).__name__}: it computes no softmax over a product "
            "of two activations and does not call F.scaled_dot_product_attention"
            + "".join(f"; {sentence}" for sentence in not_probed)
        )
    real, blind, batch, found = subject.real(), None, 0, 0
    refused: list[SeenAttention] = []
    layers: dict[str, tuple[int, int]] = {}  # the number of heads and their width, by path
    findings: list[Finding] = []
    formulas: dict[str, Formula] = {}
    for site in find_sites(trace.attentions, refused, not_probed):
        path = site.path
        layers[path] = (site.q_heads, site.head_dim)
        batch, found = batch or site.batch, found + 1
        blind = probes.blind_rows(site.attention, blind)
        with Guarded(not_probed, path):
            layer = AuditedLayer(path, site, *read(site), real, is_trained, optimizer)
            formulas[path] = layer.f
            for rule in RULES_OF_A_LAYER:
                with Guarded(not_probed, f"{path}, {rule.__name__.replace('_', ' ')}"):
                    findings.extend(rule(layer))
            findings.extend(check(expected, layer, not_probed))
            if layer.f.scale is None:
                not_probed.append(
                    f"{path}: the scale and the bound, since its logits are no known function of q.k"
                )
    # The probe for parameters without an effect also needs the layers whose formula was not read.
    layers = {one.path: (one.q.shape[1], one.q.shape[-1]) for one in refused if one.path} | layers
    not_probed += unchecked(expected, formulas, layers)
    of_the_whole: dict[str, Callable[[], Iterable[Finding]]] = {
        "leaks": lambda: probes.find_leaks(subject, not_probed),
        "paths": lambda: probes.find_disagreement(subject, not_probed),
        "rows that see no key": lambda: probes.find_poison(subject, layers, blind, not_probed),
        "positions": lambda: _shifts(subject, formulas, findings),
        "what does nothing": lambda: probes.find_idle(subject, layers, not_probed),
        "qk_clip_": lambda: probes.find_useless_clip(subject),
        "context": lambda: _long_context(model, formulas),
    }
    for what, probe in of_the_whole.items():
        with Guarded(not_probed, what):
            findings.extend(probe())
    length = int(trace.attentions[0].q.shape[2])
    not_probed += [
        f"a window of {window} keys: the model was called with {length} tokens"
        for window in subject.windows
        if window >= length
    ]
    exercised = [
        f"the formula of {len(formulas)} of {found + len(refused)} attentions",
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
    """Return the path on which the formula was read: eager code, without kernels, see `plainly`."""

    def plain(**inputs: Any) -> Any:
        with plainly():
            return call(**inputs)

    return plain


def _shifts(
    subject: Subject, formulas: Mapping[str, Formula], known: list[Finding]
) -> Iterable[Finding]:
    """Probe whether outputs change when all positions shift.

    This is skipped without RoPE, and where a finding of a layer already explains such a change.
    """
    is_known = any(one.code in ("QK002", "QK023") for one in known)
    has_rope = any(f.rope is not None for f in formulas.values())
    return probes.find_shifts(subject) if has_rope and not is_known else ()


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

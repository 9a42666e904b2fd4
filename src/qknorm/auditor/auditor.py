"""The audit: run the model once, find its attentions, ask each for its formula, probe the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.auditor import probes, rules
from qknorm.auditor.findings import Finding, Report, checked_reasons, finding
from qknorm.auditor.formula import Formula, read
from qknorm.auditor.site import NotUnderstoodError, Site, find_sites
from qknorm.auditor.subject import Subject, audited, called
from qknorm.auditor.trace import HIDDEN, Trace, plainly, run

LONG = 32_768  # tokens of context


def audit(
    model: nn.Module,
    inputs: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    trained: bool = False,
    suppress: Mapping[str, str] | None = None,
) -> Report:
    """Find the invisible mistakes of QK-norm in a model, by probing it.

    Args:
        model: any, in any mode; it is left as it was, to the bit.
        inputs: what it is called with: a tensor, a tuple, or keyword arguments. None for a Hugging Face
            model, which gets random tokens or pixels.
        optimizer: to see in which groups the gains are.
        trained: the weights come from training, so that no gain may sit at its initial value.
        suppress: reasons by code for findings that are known and wanted.

    Raises:
        ValueError: the model cannot be called so, or shows no attention.
    """
    reasons = checked_reasons(suppress)
    with torch.no_grad(), audited(model, inputs) as subject:
        report = _audit(subject, optimizer, trained)
    return report.suppressing(reasons)


def _audit(subject: Subject, optimizer: torch.optim.Optimizer | None, trained: bool) -> Report:
    trace = Trace(subject.model)
    called(subject.model, lambda: run(trace, subject.model, (), subject.inputs))
    if trace.replaced - {"reference"} or any(map(_is_compiled, subject.model.modules())):
        subject.paths["plain"] = _plainly(subject.model)
    opaque = [f"{path}: {name} does not show what it computes" for path, name in trace.opaque.items()]
    if not trace.attentions:
        raise ValueError(
            f"{type(subject.model).__name__} showed no attention: no softmax over a product of two "
            "activations, and no call of F.scaled_dot_product_attention"
            + "".join(f"; {sentence}" for sentence in opaque)
        )
    not_probed = opaque
    refused: dict[str, str] = {}
    layers: dict[str, tuple[int, int]] = {}  # heads and their width
    blind: Tensor | None = None
    shape = ""
    findings: list[Finding] = []
    formulas: dict[str, Formula] = {}
    dtype = next((p.dtype for p in subject.model.parameters() if p.is_floating_point()), torch.float32)
    is_low = dtype in (torch.float16, torch.bfloat16)
    for site in find_sites(trace.attentions, refused):
        path = site.path
        layers[path] = (site.q_heads, site.head_dim)
        blind = probes.blind_rows(site, blind)
        shape = shape or str(tuple(site.attention.q.shape[::2]))
        try:
            f, sides, scores = read(site)
        except NotUnderstoodError as error:
            not_probed.append(f"{path}: {error}")
            continue
        formulas[path] = f
        q, k = sides["q"], sides["k"]
        original = subject.model.get_submodule(path)
        findings += rules.of_norms(path, f, q, k)
        findings += rules.of_eps(path, site, sides)
        findings += rules.of_precision(path, site, sides, original)
        findings += rules.of_limits(path, sides, scores)
        findings += rules.of_scale(path, site, f)
        findings += rules.of_rope(path, site, f, q, k, is_low)
        findings += rules.of_gains(path, sides, trained)
        if f.v_norm:
            findings.append(finding("QK003", path, "V does not grow with its projection"))
        if optimizer is not None:
            own = _own_gains(site.module, original, sides)
            findings += rules.of_optimizer(path, own, optimizer)
        seen = _visible_logits(site, subject.real())
        if f.scale is None:
            not_probed.append(f"{path}: what its logits are of q.k, so neither scale nor bound")
        elif seen.numel() and not scores.has_bias:
            findings += rules.of_bound(path, site, f, float(seen.max()))
    not_probed += [f"{path}: {why}" for path, why in refused.items()]
    findings += probes.find_leaks(subject, not_probed)
    findings += probes.find_disagreement(subject, not_probed)
    findings += probes.find_poison(subject, layers, blind, not_probed)
    if any(f.rope is not None for f in formulas.values()):
        moved = probes.is_relative(subject)
        known = {one.code for one in findings}
        low = 3e-2 if is_low else 1e-3
        if moved is not None and moved > low and not known & {"QK002", "QK023"}:
            text = f"shifting all positions moves outputs by {moved:.1e}"
            findings.append(finding("QK023", None, text, moved=moved))
    # A layer that could not be asked may be one whose parameters do nothing.
    silent = [one for one in trace.attentions if one.path and one.path in refused]
    layers = {one.path: (one.q.shape[1], one.q.shape[-1]) for one in silent} | layers
    findings += probes.find_idle(subject, layers, not_probed)
    findings += probes.find_useless_clip(subject, not_probed)
    findings += _long_context(subject, formulas)
    exercised = [
        f"{len(formulas)} of {len(trace.attentions)} attentions asked for their formula",
        f"paths: {', '.join(subject.paths)}",
        f"dtype: {dtype}".replace("torch.", ""),
        f"batch and length: {shape}",
    ]
    return Report(
        findings=_once(findings), formulas=formulas, exercised=exercised, not_probed=not_probed
    )


def _visible_logits(site: Site, real: Tensor | None) -> Tensor:
    """Those of the queries that are real tokens, flat."""
    logits = site.attention.logits
    if logits is None:
        return torch.zeros(0)
    visible = logits > HIDDEN
    if real is not None and real.shape == logits.shape[::2]:
        visible = visible & real[:, None, :, None].to(logits.device)
    return logits[visible]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _plainly(model: nn.Module) -> Callable[..., Any]:
    """The model as it was traced."""

    def call(**inputs: Any) -> Any:
        with plainly():
            return model(**inputs)

    return call


def _own_gains(module: nn.Module, original: nn.Module, sides: Any) -> Any:
    """The gains of the model itself, where the formula was read from a copy in fp32."""
    if module is original:
        return sides
    names = {id(p): name for name, p in module.named_parameters()}
    own = dict(original.named_parameters())
    return {
        key: replace(side, gain_parameters=[own[names[id(p)]] for p in side.gain_parameters])
        for key, side in sides.items()
    }


def _long_context(subject: Subject, formulas: Mapping[str, Formula]) -> list[Finding]:
    config = getattr(subject.model, "config", None)
    length = getattr(config, "max_position_embeddings", 0) or 0
    normed = [f for f in formulas.values() if f.q_norm is not None]
    if length >= LONG and normed and not any(f.sink for f in normed):
        return [finding("QK021", None, f"{length} tokens of context and no sink", tokens=float(length))]
    return []


def _once(findings: list[Finding]) -> list[Finding]:
    seen: dict[tuple[str, str | None, object], Finding] = {}
    for one in findings:
        seen.setdefault((one.code, one.layer, one.evidence.get("path")), one)
    return list(seen.values())

"""Summarise a report: its verdict, findings that many layers share, and the kinds of layers."""

from __future__ import annotations

from typing import Any

from qknorm.auditor.findings import SEVERITIES, Finding, Report, Severity, plain_formula

COLUMNS = ("layers", "norm", "over", "gain", "eps", "order", "RoPE", "scale", "heads", "mask")


def verdict(report: Report, target: str, fail_on: Severity) -> str:
    """Return the first line of a summary.

    A finding that many layers share is counted once, as it is listed.

    Args:
        report: the report.
        target: the name of the target.
        fail_on: the lowest severity of a finding that fails.

    Returns:
        A sentence such as "model: failed, 3 findings, 1 of severity error".
    """
    listed = len(grouped(report.findings))
    failing = len(grouped(report.at_least(fail_on)))
    level = fail_on if fail_on == SEVERITIES[-1] else f"{fail_on} or above"
    if not listed:
        return f"{target}: passed, nothing found"
    if not failing:
        return f"{target}: passed, {_count(listed)} below {fail_on}"
    if failing == listed:
        return f"{target}: failed, {_count(failing)} of severity {level}"
    return f"{target}: failed, {_count(listed)}, {failing} of severity {level}"


def _count(findings: int) -> str:
    return f"{findings} finding{'s' * (findings != 1)}"


def grouped(findings: list[Finding]) -> list[list[Finding]]:
    """Group findings that are the same in several layers, apart from the numbers of QK022."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        key = (one.code, one.message if one.layer is None or one.code != "QK022" else "")
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def places(group: list[Finding]) -> str:
    """Return the first layer of a group and the number of others; "" for findings on the whole model."""
    layers = [one.layer or "the model itself" for one in group if one.layer is not None]
    if not layers:
        return ""
    return f" ({layers[0]}" + (f" and {len(layers) - 1} more)" if len(layers) > 1 else ")")


def layer_kinds(report: Report) -> list[tuple[str, ...]]:
    """Return one row of COLUMNS for each distinct formula, with the number of layers that have it."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for formula in report.formulas.values():
        plain = {k: v for k, v in plain_formula(formula).items() if not k.endswith("_range")}
        kinds.setdefault(str({k: _rounded(v) for k, v in plain.items() if k != "eps"}), []).append(plain)
    return [_row(len(alike), alike[0]) for alike in kinds.values()]


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _row(layers: int, f: dict[str, Any]) -> tuple[str, ...]:
    def of_both(q: str | None, k: str | None) -> str:
        return q or "-" if q == k else f"q {q or 'none'}, k {k or 'none'}"

    mask = ["causal"] if f["causal"] else []
    if f["window"] is not None:
        mask.append(f"window {f['window']}")
    if f["sink"] is not None:
        mask.append({"logit": "sink", "token": "sink token"}.get(f["sink"], "off by one"))
    if f["softcap"] is not None:
        mask.append(f"cap {f['softcap']:.3g}")
    return (
        str(layers),
        of_both(f["q_norm"], f["k_norm"]),
        f["statistic"] or "-",
        of_both(f["gain"], f["k_gain"]),
        "-" if f["eps"] is None else f"{f['eps']:.1e} {f['eps_place']}",
        f["order"] or "-",
        "-" if f["rope"] is None else f"{f['rope']} {f['rotary_width']}",
        "?" if f["scale"] is None else f"{f['scale']:.4g}",
        f"{f['q_heads']}/{f['kv_heads']} x {f['head_dim']}",
        ", ".join(mask) or "-",
    )

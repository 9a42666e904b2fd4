"""A report in few words: findings that many layers share, and kinds of layers, as plain strings."""

from __future__ import annotations

from typing import Any

from qknorm.auditor.findings import Finding, Report, plain_formula

COLUMNS = ("layers", "norm", "over", "gain", "eps", "order", "RoPE", "scale", "heads", "mask")


def verdict(target: str, failing: int) -> str:
    """The first line."""
    return f"{target}: {failing} finding{'s' * (failing > 1)}" if failing else f"{target}: nothing found"


def grouped(findings: list[Finding]) -> list[list[Finding]]:
    """The same finding of many layers together."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        key = (one.code, one.message if one.layer is None or one.code != "QK022" else "")
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def places(group: list[Finding]) -> str:
    """Where: the first layer, and how many more."""
    layers = [one.layer for one in group if one.layer is not None]
    if not layers:
        return ""
    return f" ({layers[0]}" + (f" and {len(layers) - 1} more)" if len(layers) > 1 else ")")


def layer_kinds(report: Report) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each formula that layers share."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for formula in report.formulas.values():
        plain = {k: v for k, v in plain_formula(formula).items() if not k.endswith("_range")}
        kinds.setdefault(str({k: _rounded(v) for k, v in plain.items() if k != "eps"}), []).append(plain)
    return [_row(len(alike), alike[0]) for alike in kinds.values()]


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _row(layers: int, f: dict[str, Any]) -> tuple[str, ...]:
    norms = f["q_norm"] if f["q_norm"] == f["k_norm"] else f"q {f['q_norm']}, k {f['k_norm']}"
    gains = f["gain"] if f["gain"] == f["k_gain"] else f"q {f['gain']}, k {f['k_gain']}"
    mask = ["causal"] if f["causal"] else []
    if f["window"] is not None:
        mask.append(f"window {f['window']}")
    if f["sink"] is not None:
        mask.append({"logit": "sink", "token": "sink token"}.get(f["sink"], "off by one"))
    if f["softcap"] is not None:
        mask.append(f"cap {f['softcap']:.3g}")
    return (
        str(layers),
        str(norms),
        str(f["statistic"]),
        str(gains),
        "-" if f["eps"] is None else f"{f['eps']:.1e} {f['eps_place']}",
        str(f["order"]),
        "-" if f["rope"] is None else f"{f['rope']} {f['rotary_width']}",
        "?" if f["scale"] is None else f"{f['scale']:.4g}",
        f"{f['q_heads']}/{f['kv_heads']} x {f['head_dim']}",
        ", ".join(mask) or "-",
    )

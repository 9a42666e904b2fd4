"""Write findings as SARIF 2.1.0, a format that code hosts show next to the code."""

from __future__ import annotations

from typing import Any

from qknorm.auditor.findings import RULES, Report, Severity

LEVELS: dict[Severity, str] = {"info": "note", "warning": "warning", "error": "error"}


def to_sarif(report: Report, target: str, version: str) -> dict[str, Any]:
    """Convert a report to SARIF.

    Args:
        report: the report of an audit.
        target: the name of the target that was audited.
        version: the version of qknorm.

    Returns:
        A SARIF log with one run. The location of a finding is its layer, as a logical location.
    """
    rules = [
        {
            "id": code,
            "name": rule.title,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.why},
            "help": {"text": f"{rule.mend} Source: {rule.source}"},
            "defaultConfiguration": {"level": LEVELS[rule.severity]},
        }
        for code, rule in RULES.items()
    ]
    results = []
    pairs = [(one, None) for one in report.findings] + list(report.suppressed)
    for one, reason in pairs:
        result: dict[str, Any] = {
            "ruleId": one.code,
            "ruleIndex": list(RULES).index(one.code),
            "level": LEVELS[one.severity],
            "message": {"text": one.message},
            "locations": [
                {
                    "logicalLocations": [
                        {"fullyQualifiedName": f"{target}/{one.layer or ''}", "kind": "module"}
                    ]
                }
            ],
            "properties": one.evidence,
        }
        if reason is not None:
            result["suppressions"] = [{"kind": "external", "justification": reason}]
        results.append(result)
    driver = {"name": "qknorm audit", "version": version, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }

"""Write the report of an audit as an offline HTML page."""

from __future__ import annotations

import qknorm
from qknorm.auditor import Report
from qknorm.auditor.findings import Severity
from qknorm.auditor.summary import COLUMNS, grouped, layer_kinds, verdict
from qknorm.lab.page import render


def to_html(report: Report, target: str, fail_on: Severity) -> str:
    """Render the page.

    Args:
        report: the report.
        target: the name of the target.
        fail_on: the lowest severity of a finding that fails.

    Returns:
        The page.

    Raises:
        ValueError: the `report` extra is not installed.
    """
    return render(
        "qknorm.cli",
        "audit.html",
        verdict=verdict(report, target, fail_on),
        failing=bool(report.at_least(fail_on)),
        version=qknorm.__version__,
        groups=grouped(report.findings),
        columns=COLUMNS,
        kinds=layer_kinds(report),
        report=report,
    )

"""An audit as one offline HTML page."""

from __future__ import annotations

from importlib.resources import files

import qknorm
from qknorm.auditor import Report
from qknorm.auditor.findings import Severity
from qknorm.auditor.summary import COLUMNS, grouped, layer_kinds, verdict


def to_html(report: Report, target: str, fail_on: Severity) -> str:
    """Return the page. Raises ValueError without the `report` extra."""
    try:
        import jinja2
    except ImportError as error:
        raise ValueError("a page needs an extra: pip install 'qknorm[report]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(files("qknorm.cli").joinpath("audit.html").read_text("utf-8"))
    return page.render(
        verdict=verdict(report, target, fail_on),
        failing=bool(report.at_least(fail_on)),
        version=qknorm.__version__,
        groups=grouped(report.findings),
        columns=COLUMNS,
        kinds=layer_kinds(report),
        report=report,
    )

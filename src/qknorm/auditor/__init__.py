"""Find the invisible mistakes of QK-norm in any model, by asking the model and not its names."""

from qknorm.auditor.auditor import audit
from qknorm.auditor.findings import RULES, SEVERITIES, Finding, Report, Rule
from qknorm.auditor.formula import Formula

__all__ = ["RULES", "SEVERITIES", "Finding", "Formula", "Report", "Rule", "audit"]

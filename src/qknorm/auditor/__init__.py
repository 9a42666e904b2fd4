"""Find mistakes of QK-norm that raise no error, in any model, whatever its modules are named."""

from qknorm.auditor.auditor import audit
from qknorm.auditor.findings import RULES, SEVERITIES, Finding, Report, Rule
from qknorm.auditor.formula import Formula

__all__ = ["RULES", "SEVERITIES", "Finding", "Formula", "Report", "Rule", "audit"]

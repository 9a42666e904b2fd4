"""Findings, reports, and the table of rules with a code, a reason, a source and a remedy for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from qknorm.auditor.formula import Formula

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A kind of finding.

    Attributes:
        title: a few words that name it.
        severity: "info", "warning" or "error".
        why: why it matters.
        source: papers and issues in which it is described.
        mend: how to correct it.
    """

    title: str
    severity: Severity
    why: str
    source: str
    mend: str


RULES: dict[str, Rule] = {
    "QK001": Rule(
        title="no QK-norm",
        severity="info",
        why="Nothing bounds the logits. A norm before the layer bounds the inputs of W_q and W_k, but "
        "not their weights.",
        source="Dehghani et al. 2023 (arXiv 2302.05442); Wortsman et al. 2023 (arXiv 2309.14322)",
        mend="Above about a billion parameters, or at high learning rates, norm q and k for each head "
        "before RoPE.",
    ),
    "QK002": Rule(
        title="gain after RoPE",
        severity="warning",
        why="A gain that differs inside a rotated pair does not commute with the rotation: logits "
        "depend on absolute positions, not on distances.",
        source="Su et al. 2021 (arXiv 2104.09864), the relative property",
        mend="Apply the norm and the gain before RoPE, or use one gain for each pair.",
    ),
    "QK003": Rule(
        title="V is normed",
        severity="warning",
        why="Logits do not depend on V, so a norm of V does not bound them. It removes the magnitude "
        "of V, which carries information.",
        source="Henry et al. 2020 (arXiv 2010.04245) norm only q and k; Gemma 3n norms V by choice",
        mend="Remove the norm of V, or suppress this finding if it is intended.",
    ),
    "QK004": Rule(
        title="statistic over all heads",
        severity="warning",
        why="One head with large entries makes the q and k of all other heads smaller. Under tensor "
        "parallelism the statistic has to be reduced over ranks, or another function is computed. Its "
        "effect on the loss is disputed.",
        source="OLMo 2 (arXiv 2501.00656) uses it; EleutherAI/gpt-neox 1424, allenai/OLMo 877",
        mend="Compute the statistic over the width of one head.",
    ),
    "QK005": Rule(
        title="norm without a gain",
        severity="warning",
        why="Every head has the same temperature, so logits cannot grow where they should.",
        source="Henry et al. 2020, the learned scale; Dehghani et al. 2023",
        mend="Add a learnable gain with the initial value 1 and without weight decay.",
    ),
    "QK006": Rule(
        title="one gain for all heads",
        severity="info",
        why="Heads cannot have different temperatures. This matters most when QK-norm is added to a "
        "trained model.",
        source="allenai/OLMo-core 855: no significant change of the loss",
        mend="Nothing needs to be done. If heads should differ, use a gain of shape [H, D].",
    ),
    "QK007": Rule(
        title="eps is missing, small, large or misplaced",
        severity="warning",
        why="If eps is not inside the root, or is below 1e-6, the norm amplifies small vectors and "
        "their gradients; without an eps a zero vector gives NaN. An eps that is not small "
        "compared with the mean square makes q and k shorter than the gains imply.",
        source="pytorch/pytorch 189581, 142848",
        mend="Add eps = 1e-6 to the mean square, and pass it explicitly.",
    ),
    "QK008": Rule(
        title="statistic in low precision",
        severity="warning",
        why="A mean square in bf16 has an error of up to 0.4 %, which scales the whole vector. In fp16 "
        "the square of an entry above 256 overflows.",
        source="pytorch/pytorch 189581",
        mend="Compute the norm and the product with the gain in fp32, and round once.",
    ),
    "QK009": Rule(
        title="parameters without an effect",
        severity="error",
        why="The parameters exist, but the output does not depend on them. The model does not compute "
        "what it was built for.",
        source="Cerebras modelzoo 85; lucidrains/x-transformers 352",
        mend="Use the parameters in the forward, or remove them.",
    ),
    "QK010": Rule(
        title="gain decays or is in a matrix optimizer",
        severity="warning",
        why="Weight decay pulls the gains of q and k to zero, and the logits with their product. A "
        "matrix optimizer such as Muon orthogonalizes its steps, which makes no sense for gains.",
        source="huggingface/transformers 35927",
        mend="Put gains and sinks into a group of AdamW without weight decay; see "
        "`qknorm.nn.param_groups`.",
    ),
    "QK011": Rule(
        title="hard clamp",
        severity="warning",
        why="The gradient is zero where an entry is clamped, so an entry that has grown too large "
        "stays so.",
        source="DBRX and OLMo clip q, k and v; MosaicML's clip_qkv",
        mend="Use QK-norm or a soft-cap instead.",
    ),
    "QK012": Rule(
        title="QK-clip together with QK-norm",
        severity="warning",
        why="QK-clip rescales W_q and W_k, and the norm undoes any rescaling, so the clip has no "
        "effect.",
        source="Kimi K2 (arXiv 2507.20534) uses QK-clip without QK-norm",
        mend="Remove the clip, or apply it to the gains.",
    ),
    "QK013": Rule(
        title="sink ignored",
        severity="error",
        why="The sink is not part of the softmax on this path, so the path computes another function "
        "and does not train the sink.",
        source="NVIDIA-NeMo/RL 1672; NVIDIA/TransformerEngine 2541",
        mend="Use an attention function that supports sinks, or rescale its output with the "
        "log-sum-exp.",
    ),
    "QK014": Rule(
        title="a token sees what the mask should hide",
        severity="error",
        why="A token sees a future token, another document or padding. The loss in training is then "
        "too low, and the model is worse in use.",
        source="huggingface/transformers 46634; AI-Hypercomputer/maxtext 4476",
        mend="Mask future tokens, other documents and padding.",
    ),
    "QK015": Rule(
        title="paths disagree",
        severity="error",
        why="The model that is served computes another function than the one that was trained.",
        source="lucidrains/x-transformers 190; huggingface/transformers 33317",
        mend="Find the first layer in which q, k or the mask differs.",
    ),
    "QK016": Rule(
        title="only one of q and k is normed",
        severity="warning",
        why="The one without a norm can still grow without bound, and the logits with it.",
        source="vllm-project/vllm-metal 659: both norms were built and one was called",
        mend="Norm both q and k.",
    ),
    "QK017": Rule(
        title="scale of 1/D",
        severity="warning",
        why="Under muP this scale is right. Otherwise 1/sqrt(D) was applied twice, and the softmax "
        "stays close to uniform.",
        source="Yang et al. 2022 (arXiv 2203.03466), muP; lucidrains/x-transformers 190",
        mend="Under muP, suppress this finding. Otherwise scale once, and pass the scale to the kernel "
        "explicitly.",
    ),
    "QK018": Rule(
        title="scale of another width",
        severity="error",
        why="The scale is that of heads of width hidden / heads, but the heads have another width.",
        source="head_dim that differs from hidden / heads: huggingface/transformers, many models",
        mend="Use 1/sqrt(D) with the width D of a head, unless another scale is intended.",
    ),
    "QK019": Rule(
        title="another path loses the mask",
        severity="error",
        why="On one path of the model, tokens see what the default path hides from them.",
        source="huggingface/transformers 45811, 46132",
        mend="Register a mask function together with the attention function.",
    ),
    "QK020": Rule(
        title="gain at its initial value",
        severity="warning",
        why="Training changes gains, so gains that all still have one value were left out of the "
        "optimizer, of a conversion, or of the file.",
        source="unslothai/unsloth 2452; hexgrad/kokoro 368",
        mend="Look for the gain in the original checkpoint, and load with strict=True.",
    ),
    "QK021": Rule(
        title="no sink at long context",
        severity="info",
        why="Bounded logits cannot bring the weights of thousands of irrelevant tokens close to 0.",
        source="Xiao et al. 2023 (arXiv 2309.17453); gpt-oss",
        mend="Consider a learnable sink for each head.",
    ),
    "QK022": Rule(
        title="bound of the logits",
        severity="info",
        why="With QK-norm the gains bound every logit.",
        source="|logit| <= scale * D * max|g_q| * max|g_k|",
        mend="Nothing needs to be done. The bound grows with the gains, so watch them in training.",
    ),
    "QK023": Rule(
        title="RoPE is not relative",
        severity="error",
        why="Logits change when all positions shift, so the model cannot use at one position what it "
        "has learned at another.",
        source="Su et al. 2021 (arXiv 2104.09864)",
        mend="Rotate q and k in the same way, each by its position, and compute the angles in fp32.",
    ),
    "QK024": Rule(
        title="not as expected",
        severity="error",
        why="The formula of the attention differs from the one that was declared.",
        source="the option --expect, or the argument expect",
        mend="Correct the model or the expectation.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding of an audit.

    Attributes:
        code: the key of its rule in RULES.
        severity: the severity of its rule.
        layer: the path of the attention module; None for a finding about the whole model.
        message: one sentence with the numbers that were measured.
        evidence: these numbers by name.
    """

    code: str
    severity: Severity
    layer: str | None
    message: str
    evidence: dict[str, float | str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason why such a finding matters."""
        return RULES[self.code].why

    @property
    def source(self) -> str:
        """Papers and issues in which such a finding is described."""
        return RULES[self.code].source

    @property
    def mend(self) -> str:
        """How to correct the model."""
        return RULES[self.code].mend

    def to_json(self) -> dict[str, Any]:
        """Return the finding and the texts of its rule as values that JSON can hold."""
        return asdict(self) | {"why": self.why, "source": self.source, "mend": self.mend}


def finding(code: str, layer: str | None, message: str, **evidence: float | str) -> Finding:
    """Make a finding with the severity of its rule.

    Args:
        code: the key of the rule in RULES.
        layer: the path of the attention module; None for the whole model.
        message: one sentence with the numbers that were measured.
        evidence: these numbers by name.

    Returns:
        The finding.
    """
    return Finding(
        code=code, severity=RULES[code].severity, layer=layer, message=message, evidence=evidence
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of an audit.

    Attributes:
        findings: the findings, with the most severe first.
        formulas: the formula of each attention, by module path.
        exercised: what was probed.
        not_probed: what could not be probed, with the reason.
        suppressed: pairs of a finding that the user accepted and the user's reason.
    """

    findings: list[Finding]
    formulas: Mapping[str, Formula]
    exercised: list[str]
    not_probed: list[str]
    suppressed: list[tuple[Finding, str]] = field(default_factory=list)

    @property
    def codes(self) -> set[str]:
        """The codes of all warnings and errors."""
        return {one.code for one in self.findings if one.severity != "info"}

    def at_least(self, severity: Severity) -> list[Finding]:
        """Return the findings of this severity or a higher one."""
        low = SEVERITIES.index(severity)
        return [one for one in self.findings if SEVERITIES.index(one.severity) >= low]

    def suppressing(self, reasons: Mapping[str, str]) -> Report:
        """Sort the findings and move those that the user accepts to `suppressed`.

        Args:
            reasons: reasons by code.

        Returns:
            The report with the most severe findings first.
        """
        kept = [one for one in self.findings if one.code not in reasons]
        kept.sort(key=lambda one: (-SEVERITIES.index(one.severity), one.code, one.layer or ""))
        gone = [(one, reasons[one.code]) for one in self.findings if one.code in reasons]
        return replace(self, findings=kept, suppressed=[*self.suppressed, *gone])

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "findings": [one.to_json() for one in self.findings],
            "formulas": {path: plain_formula(formula) for path, formula in self.formulas.items()},
            "exercised": self.exercised,
            "not_probed": self.not_probed,
            "suppressed": [{"reason": reason} | one.to_json() for one, reason in self.suppressed],
        }


def checked_reasons(suppress: Mapping[str, str] | None) -> dict[str, str]:
    """Check reasons by code.

    Args:
        suppress: the reasons; None for none.

    Returns:
        A copy of the reasons.

    Raises:
        ValueError: a code does not exist, or its reason is empty.
    """
    reasons = dict(suppress or {})
    unknown = sorted(set(reasons) - set(RULES))
    if unknown:
        raise ValueError(f"no rule has the code that is to be suppressed: {', '.join(unknown)}")
    for code, reason in reasons.items():
        if not reason:
            raise ValueError(f"suppressing {code} needs a reason")
    return reasons


def plain_formula(formula: Formula) -> dict[str, Any]:
    """Return a formula as values that JSON can hold, with the range of each gain and not its values."""
    plain = dict(vars(formula))
    for which in ("q", "k"):
        values = plain.pop(f"{which}_gain_values")
        plain[f"{which}_gain_range"] = (
            None if values is None else [float(values.min()), float(values.max())]
        )
    return plain

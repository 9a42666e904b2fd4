"""What an audit may find: codes, why each matters, where that is from, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from qknorm.auditor.formula import Formula

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of finding."""

    title: str
    severity: Severity
    why: str
    source: str
    mend: str


RULES: dict[str, Rule] = {
    "QK001": Rule(
        title="no QK-norm",
        severity="info",
        why="Nothing bounds the logits. Pre-norm bounds what enters W_q and W_k, not their weights.",
        source="Dehghani et al. 2023 (arXiv 2302.05442); Wortsman et al. 2023 (arXiv 2309.14322)",
        mend="Above about a billion parameters, or at bold rates, norm q and k per head before RoPE.",
    ),
    "QK002": Rule(
        title="gain after RoPE",
        severity="warning",
        why="A gain that differs inside a rotated pair does not commute with the rotation: logits "
        "depend on absolute positions, not on distances.",
        source="Su et al. 2021 (arXiv 2104.09864), the relative property",
        mend="Norm and gain first, RoPE after; or one gain per pair.",
    ),
    "QK003": Rule(
        title="V is normed",
        severity="warning",
        why="Logits do not depend on V; its magnitude carries information that the norm takes away.",
        source="Henry et al. 2020 (arXiv 2010.04245) norm q and k alone; Gemma 3n norms V by choice",
        mend="Leave V as it is, or declare the choice.",
    ),
    "QK004": Rule(
        title="statistic over all heads",
        severity="warning",
        why="One loud head lowers all others, and tensor parallelism needs a reduction, or computes "
        "another function. Its effect on the loss is disputed.",
        source="OLMo 2 (arXiv 2501.00656) uses it; EleutherAI/gpt-neox 1424, allenai/OLMo 877",
        mend="Take the statistic over the width of one head.",
    ),
    "QK005": Rule(
        title="norm without a gain",
        severity="warning",
        why="Every head gets the same temperature: logits cannot grow where they should.",
        source="Henry et al. 2020, the learned scale; Dehghani et al. 2023",
        mend="Add a learnable gain, initial value 1, without weight decay.",
    ),
    "QK006": Rule(
        title="one gain for all heads",
        severity="info",
        why="Heads cannot have temperatures of their own, which matters most when a trained model is "
        "converted.",
        source="allenai/OLMo-core 855: no significant change of the loss",
        mend="Nothing needs to be done; gains [H, D] if heads differ.",
    ),
    "QK007": Rule(
        title="eps",
        severity="warning",
        why="Without an eps inside the root, or below 1e-6, small vectors are blown up and their "
        "gradients with them; zero gives NaN. An eps that is not small beside what it is added to makes "
        "q and k shorter than the gains say.",
        source="pytorch/pytorch 189581, 142848",
        mend="Pass eps = 1e-6 explicitly, added to the mean square.",
    ),
    "QK008": Rule(
        title="statistic in low precision",
        severity="warning",
        why="A mean square in bf16 errs by up to 0.4 %, shared by the whole vector; in fp16 it "
        "overflows beyond 256.",
        source="pytorch/pytorch 189581",
        mend="Compute square, mean, root and gain in fp32, and round once.",
    ),
    "QK009": Rule(
        title="parameters that do nothing",
        severity="error",
        why="They were built and are not used: what the model should compute, it does not.",
        source="Cerebras modelzoo 85; lucidrains/x-transformers 352",
        mend="Call them, or take them away.",
    ),
    "QK010": Rule(
        title="gain decays or is in a matrix optimizer",
        severity="warning",
        why="Weight decay pulls both gains to zero, and the logits with their product; an "
        "orthogonalized step makes no sense for gains.",
        source="huggingface/transformers 35927",
        mend="Put gains and sinks in a group of AdamW without decay; see `qknorm.nn.param_groups`.",
    ),
    "QK011": Rule(
        title="hard clamp",
        severity="warning",
        why="Beyond a clamp the gradient is zero: what has run away never comes back.",
        source="DBRX and OLMo clip q, k and v; MosaicML's clip_qkv",
        mend="Use the norm instead, or a soft cap.",
    ),
    "QK012": Rule(
        title="QK-clip together with QK-norm",
        severity="warning",
        why="The norm takes away whatever W_q and W_k are rescaled by: the clip does nothing.",
        source="Kimi K2 (arXiv 2507.20534) clips where there is no norm",
        mend="Drop the clip, or apply it to the gains.",
    ),
    "QK013": Rule(
        title="sink ignored",
        severity="error",
        why="The sink is not part of the softmax on this path: another function is computed, and the "
        "sink is not trained.",
        source="NVIDIA-NeMo/RL 1672; NVIDIA/TransformerEngine 2541",
        mend="Use an attention that takes sinks, or rescale its output by the log-sum-exp.",
    ),
    "QK014": Rule(
        title="leak",
        severity="error",
        why="A token sees what it must not: the loss is too good in training and wrong in use.",
        source="huggingface/transformers 46634; AI-Hypercomputer/maxtext 4476",
        mend="Mask future tokens, other documents and padding.",
    ),
    "QK015": Rule(
        title="paths disagree",
        severity="error",
        why="The model that is served is not the one that was trained.",
        source="lucidrains/x-transformers 190; huggingface/transformers 33317",
        mend="Find the first layer whose q, k or mask differ.",
    ),
    "QK016": Rule(
        title="only one of q and k is normed",
        severity="warning",
        why="The other side still grows without bound.",
        source="a norm built for both and called for one: vllm-project/vllm-metal 659",
        mend="Norm both.",
    ),
    "QK017": Rule(
        title="scale of 1/D",
        severity="warning",
        why="Under muP that is right. Otherwise 1/sqrt(D) was applied twice, and attention stays flat.",
        source="Yang et al. 2022 (arXiv 2203.03466), muP; lucidrains/x-transformers 190",
        mend="Under muP declare it; otherwise scale once, and pass the scale to the kernel explicitly.",
    ),
    "QK018": Rule(
        title="scale of another width",
        severity="error",
        why="The scale is that of hidden / heads, but heads have a width of their own.",
        source="head_dim that differs from hidden / heads: huggingface/transformers, many models",
        mend="Take 1/sqrt of the head's own width, if no other scale was intended.",
    ),
    "QK019": Rule(
        title="mask lost under another implementation",
        severity="error",
        why="One of the ways to run the model lets tokens see what the default hides.",
        source="huggingface/transformers 45811, 46132",
        mend="Register a mask function with the attention function.",
    ),
    "QK020": Rule(
        title="gain at its initial value",
        severity="warning",
        why="In a trained checkpoint gains are not all alike to the bit, be it 1 or another value: they "
        "were left out of the optimizer, the conversion or the file.",
        source="unslothai/unsloth 2452; hexgrad/kokoro 368",
        mend="Look for it in the source checkpoint, and load strictly.",
    ),
    "QK021": Rule(
        title="no sink at long context",
        severity="info",
        why="Bounded logits cannot silence thousands of tokens that do not matter.",
        source="Xiao et al. 2023 (arXiv 2309.17453); gpt-oss",
        mend="Consider a learnable sink per head.",
    ),
    "QK022": Rule(
        title="bound",
        severity="info",
        why="With QK-norm the gains bound every logit.",
        source="|logit| <= scale * D * max|g_q| * max|g_k|",
        mend="Watch it grow with the gains.",
    ),
    "QK023": Rule(
        title="RoPE is not relative",
        severity="error",
        why="Logits change when all positions shift: the model cannot carry over what it learned at one "
        "place.",
        source="Su et al. 2021 (arXiv 2104.09864)",
        mend="Rotate q and k alike, by their own positions, with angles in fp32.",
    ),
    "QK024": Rule(
        title="not as expected",
        severity="error",
        why="What was read back is another attention than the one that was declared to be meant.",
        source="your own --expect, or expect=",
        mend="Mend the model, or the expectation.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found.

    Attributes:
        code, severity: see RULES.
        layer: module path; None for the model.
        message: one sentence with the numbers.
        evidence: the numbers by name.
    """

    code: str
    severity: Severity
    layer: str | None
    message: str
    evidence: dict[str, float | str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """Why it matters."""
        return RULES[self.code].why

    @property
    def source(self) -> str:
        """Where that is from."""
        return RULES[self.code].source

    @property
    def mend(self) -> str:
        """What to do."""
        return RULES[self.code].mend

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"why": self.why, "source": self.source, "mend": self.mend}


def finding(code: str, layer: str | None, message: str, **evidence: float | str) -> Finding:
    """With the severity of its rule."""
    return Finding(
        code=code, severity=RULES[code].severity, layer=layer, message=message, evidence=evidence
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an audit found, read back, did, and could not do.

    Attributes:
        findings: the most severe first.
        formulas: of each attention, by module path.
        exercised: what was probed.
        not_probed: what could not be, in sentences.
        suppressed: (finding, reason) of those that were declared.
    """

    findings: list[Finding]
    formulas: Mapping[str, Formula]
    exercised: list[str]
    not_probed: list[str]
    suppressed: list[tuple[Finding, str]] = field(default_factory=list)

    @property
    def codes(self) -> set[str]:
        """Of warnings and errors."""
        return {one.code for one in self.findings if one.severity != "info"}

    def at_least(self, severity: Severity) -> list[Finding]:
        """Findings of this severity or a higher one."""
        low = SEVERITIES.index(severity)
        return [one for one in self.findings if SEVERITIES.index(one.severity) >= low]

    def suppressing(self, reasons: Mapping[str, str]) -> Report:
        """The same, sorted, with findings of these codes set apart with their reasons."""
        kept = [one for one in self.findings if one.code not in reasons]
        kept.sort(key=lambda one: (-SEVERITIES.index(one.severity), one.code, one.layer or ""))
        gone = [(one, reasons[one.code]) for one in self.findings if one.code in reasons]
        return replace(self, findings=kept, suppressed=[*self.suppressed, *gone])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "findings": [one.to_json() for one in self.findings],
            "formulas": {path: plain_formula(formula) for path, formula in self.formulas.items()},
            "exercised": self.exercised,
            "not_probed": self.not_probed,
            "suppressed": [{"reason": reason} | one.to_json() for one, reason in self.suppressed],
        }


def checked_reasons(suppress: Mapping[str, str] | None) -> dict[str, str]:
    """Reasons by code. Raises ValueError for a code that is none, or without a reason."""
    reasons = dict(suppress or {})
    unknown = sorted(set(reasons) - set(RULES))
    if unknown:
        raise ValueError(f"no such code to suppress: {', '.join(unknown)}")
    for code, reason in reasons.items():
        if not reason:
            raise ValueError(f"suppressing {code} needs a reason")
    return reasons


def plain_formula(formula: Formula) -> dict[str, Any]:
    """Without the values of the gains, of which the extremes stay."""
    plain = dict(vars(formula))
    for side in ("q", "k"):
        values = plain.pop(f"{side}_gain_values")
        plain[f"{side}_gain_range"] = (
            None if values is None else [float(values.min()), float(values.max())]
        )
    return plain

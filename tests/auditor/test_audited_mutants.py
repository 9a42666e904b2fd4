"""Every faulty model is found out, with the right codes, and no sound one is accused."""

from __future__ import annotations

import pytest
import torch

from mutants import HEALTHY, MUTANTS, UNEXPECTED, Mutant
from qknorm.auditor import RULES, Report, audit


def report_on(mutant: Mutant) -> Report:
    model = mutant.build()
    return audit(
        model,
        mutant.inputs(),
        optimizer=mutant.make_optimizer(model),
        trained=mutant.is_trained,
        expect=mutant.expect,
    )


@pytest.mark.parametrize("mutant", MUTANTS + UNEXPECTED, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_with_its_codes(mutant: Mutant) -> None:
    report = report_on(mutant)
    assert mutant.expected <= report.codes, report.findings
    assert report.codes <= mutant.expected | mutant.also, report.findings
    for one in report.findings:
        assert one.message
        assert one.why
        assert one.mend
        assert one.source


@pytest.mark.parametrize("mutant", HEALTHY, ids=lambda mutant: mutant.name)
def test_a_sound_model_is_not_accused(mutant: Mutant) -> None:
    report = report_on(mutant)
    assert not report.codes, report.findings
    assert not report.not_probed
    assert len(report.formulas) == 2


def test_there_are_enough_mutants_of_every_rule_that_accuses() -> None:
    assert len(MUTANTS) >= 40
    accusing = {code for code, rule in RULES.items() if rule.severity != "info"}
    for code in accusing:
        assert sum(code in mutant.expected for mutant in MUTANTS + UNEXPECTED) >= 2, code


def test_the_model_is_left_as_it_was_to_the_bit() -> None:
    mutant = MUTANTS[0]
    model = mutant.build().train()
    list(model.parameters())[1].requires_grad_(False)
    trained = [p.requires_grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    audit(model, mutant.inputs())
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == trained
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_finding_that_is_declared_is_kept_apart_with_its_reason() -> None:
    mutant = next(m for m in MUTANTS if m.name == "split-v_normed")
    report = audit(mutant.build(), mutant.inputs(), suppress={"QK003": "as in Gemma 3n"})
    assert "QK003" not in report.codes
    assert {(one.code, reason) for one, reason in report.suppressed} == {("QK003", "as in Gemma 3n")}


@pytest.mark.parametrize("suppress", [{"QK999": "x"}, {"QK003": ""}])
def test_what_is_suppressed_needs_a_code_and_a_reason(suppress: dict[str, str]) -> None:
    mutant = HEALTHY[0]
    with pytest.raises(ValueError, match=r"QK"):
        audit(mutant.build(), mutant.inputs(), suppress=suppress)


def test_a_model_that_shows_no_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention"):
        audit(torch.nn.Linear(3, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="pass its arguments as inputs"):
        audit(torch.nn.Linear(3, 3))

"""The rules of the verdict at their edges, and LR sensitivity by hand."""

import math

import pytest

from made import layer, record
from qknorm.lab.compare import sensitivities
from qknorm.lab.verdict import VERDICT_RULES, judge, lr_sensitivity

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
UP = math.inf


def above(x):
    return math.nextafter(x, UP)


def falling(steps=40, first=5.0, last=2.0):
    return [first + (last - first) * i / (steps - 1) for i in range(steps)]


# Not finite, or above the best so far + 1.0 for the last 10 % of the steps: diverged. Above the initial
# loss - 0.1 at the end: diverged if it is also above the best + 1.0, or else it did not learn.

CALM = record(40, {"a": layer([20.0]), "b": layer([80.0])})


def word(losses, final_loss, end=CALM):
    return judge(losses, final_loss, end).word


def test_a_run_that_learns_has_finished():
    assert judge(falling(), 2.0, CALM) == ("finished", None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_divergence_wherever_it_stands(bad):
    losses = falling()
    for place in (0, 20, len(losses) - 1):
        assert word(losses[:place] + [bad] + losses[place + 1 :], 2.0) == "diverged"
    assert word(losses, bad) == "diverged"


def test_a_final_loss_of_exactly_a_tenth_below_the_first_is_learned():
    losses = [3.0, *falling(first=2.9)]
    edge = losses[0] - 0.1
    assert word(losses, edge) == "finished"
    assert word(losses, above(edge)) == "did not learn"


def test_f82_a_run_that_ends_where_it_began_did_not_learn():
    assert word([5.5, 5.45, 5.5], 5.47) == "did not learn"
    assert word([5.5], 5.5) == "did not learn"
    assert word([5.5, 5.45, 5.5], above(6.45)) == "diverged"  # 1.0 above the best


def test_the_final_loss_counts_against_the_first_step_not_the_best():
    # Up at first, then down: still 2 below where it began.
    assert word([4.0, 6.0, 5.0, 3.0, 2.0], 2.0) == "finished"
    # Best of 1.5 in the middle does not excuse an end at the start.
    assert word([4.0, 1.5, 4.0, 4.0, 4.0], 4.0) == "diverged"


def test_a_tail_of_exactly_one_above_the_best_has_not_diverged():
    start = [5.0, *([1.0] * 35)]
    assert word([*start, *([2.0] * 4)], 2.0) == "finished"
    assert word([*start, *([above(2.0)] * 4)], 2.0) == "diverged"


def test_the_tail_is_the_last_tenth_of_the_steps_and_all_of_it():
    good, bad = 1.0, 2.5
    head = [5.0] + [good] * 35
    assert word([*head, bad, bad, bad, bad], 2.0) == "diverged"  # 40 steps: the last 4
    assert word([*head, good, bad, bad, bad], 2.0) == "finished"
    assert word([*head, bad, bad, bad, good], 2.0) == "finished"
    assert word([*head[:-2], bad, good, bad, bad, bad, bad], 2.0) == "diverged"


def test_a_spike_that_heals_is_no_divergence():
    losses = falling(100)
    losses[50:60] = [9.0] * 10
    assert word(losses, 2.0) == "finished"


def test_f82_a_layer_of_large_logits_and_little_entropy_is_saturated():
    """One of both is no trouble by itself, as it is none to the monitor's alarm."""
    closed = layer([3.0, 4522.0], [0.002, 0.001])
    reason = "1 of 2 layers; b has a logit of 4,522 and 0.1% of the largest entropy"
    found = judge(falling(), 2.0, record(40, {"a": layer([20.0]), "b": closed}))
    assert found == ("saturated", reason)
    for top, ratio, expected in (
        (50.0, 0.249, "saturated"),
        (math.nextafter(50.0, 0), 0.249, "finished"),
        (50.0, 0.25, "finished"),
    ):
        assert word(falling(), 2.0, record(40, {"a": layer([top], [ratio])})) == expected
    # What is worse is said first.
    assert word(falling(), 5.0, record(40, {"a": closed})) == "diverged"
    # Nothing was observed.
    assert word(falling(), 2.0, record(40, {})) == "finished"


def test_the_reason_says_which_clause_and_with_which_numbers():
    assert "finite" in judge([3.0, math.nan], 2.0, CALM).reason
    assert "3.000" in judge([3.0, 2.95], 2.95, CALM).reason
    assert "1.000" in judge([5.0] + [1.0] * 35 + [2.5] * 4, 2.5, CALM).reason


def test_the_written_rules_hold_the_words_and_numbers_that_are_applied():
    words = ["diverged", "did not learn", "saturated", "finished"]
    for part in (*words, "0.1", "1.0", "10 %", "finite", "50", "25%"):
        assert part in VERDICT_RULES


# S = mean over the grid of min(loss, initial) - min loss (Wortsman et al. 2023).


def test_sensitivity_by_hand():
    losses = dict(zip(GRID, (2.0, 1.8, 1.6, 1.5, 1.7, 2.5, 3.5), strict=True))
    # Clipped at 3.0: (2.0 + 1.8 + 1.6 + 1.5 + 1.7 + 2.5 + 3.0) / 7 - 1.5 = 14.1 / 7 - 1.5.
    assert lr_sensitivity(losses, 3.0) == pytest.approx(14.1 / 7 - 1.5, abs=1e-12)


def test_sensitivity_without_clipping_is_the_mean_above_the_best():
    losses = dict(zip(GRID, (2.0, 1.8, 1.6, 1.5, 1.7, 2.5, 3.5), strict=True))
    assert lr_sensitivity(losses, 10.0) == pytest.approx(14.6 / 7 - 1.5, abs=1e-12)


def test_a_model_at_chance_everywhere_scores_zero():
    assert lr_sensitivity(dict.fromkeys(GRID, 9.0), 5.5) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_counts_as_the_initial_one(bad):
    losses = dict.fromkeys(GRID, 1.0) | {3e-1: bad, 1e-1: bad}
    assert lr_sensitivity(losses, 4.5) == pytest.approx(2 * 3.5 / 7, abs=1e-12)


@pytest.mark.parametrize("missing", GRID)
def test_without_all_seven_rates_there_is_no_sensitivity(missing):
    losses = {lr: 1.0 for lr in GRID if lr != missing}
    assert lr_sensitivity(losses, 5.0) is None


def test_rates_beside_the_grid_do_not_count():
    losses = dict.fromkeys(GRID, 1.0) | {3e-1: 2.0}
    alone = lr_sensitivity(losses, 5.0)
    assert alone == pytest.approx(1 / 7, abs=1e-12)
    assert lr_sensitivity(losses | {2e-3: 0.1, 1.0: 4.9}, 5.0) == pytest.approx(alone, abs=1e-12)


def summed(arm, lr, seed, loss, initial=5.0):
    return {"arm": arm, "lr": lr, "seed": seed, "final_loss": loss, "initial_loss": initial}


def test_a_summary_gives_each_arm_its_mean_over_seeds():
    summary = [summed("qk", lr, 0, 1.0 + (lr == 3e-1)) for lr in GRID]
    summary += [summed("qk", lr, 1, 1.0 + 3 * (lr == 3e-1)) for lr in GRID]
    summary += [summed("none", lr, seed, None if lr == 3e-1 else 1.0) for lr in GRID for seed in (0, 1)]
    assert sensitivities(summary) == {
        "qk": pytest.approx((1 / 7 + 3 / 7) / 2, abs=1e-12),
        "none": pytest.approx(4 / 7, abs=1e-12),
    }


def test_an_arm_without_the_whole_grid_gets_no_sensitivity():
    summary = [summed("qk", lr, 0, 1.0) for lr in GRID]
    summary += [summed("none", lr, 0, 1.0) for lr in GRID[:6]]
    assert list(sensitivities(summary)) == ["qk"]


def test_an_arm_with_fewer_seeds_than_another_keeps_its_sensitivity():
    summary = [summed("qk", lr, seed, 1.0) for lr in GRID for seed in (0, 1)]
    summary += [summed("none", lr, 0, 1.0) for lr in GRID]
    assert set(sensitivities(summary)) == {"qk", "none"}


def test_f48_a_run_whose_first_loss_was_lost_counts_as_the_start_of_the_others():
    summary = [summed("none", lr, 0, 1.0) for lr in GRID[1:]]
    summary.insert(3, summed("none", GRID[0], 0, None) | {"initial_loss": None})
    # min(loss, initial) - best: 4 for the lost one, 0 for the others.
    assert sensitivities(summary) == {"none": pytest.approx(4 / 7, abs=1e-12)}

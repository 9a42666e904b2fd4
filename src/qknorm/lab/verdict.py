"""Judge how a run ended, and how sensitive an arm is to its learning rate, by fixed rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from qknorm.monitor import LayerRecord, Record, Thresholds

# Wortsman et al. 2023 (arXiv 2309.14322), sec. 2.1.
WORTSMAN_GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
# Wortsman et al. also call it divergence when a run ends where it began. Here that is "did not learn".
VERDICT_RULES = (
    "diverged: a loss, a gradient or a weight that is not finite, a training loss above its best so far "
    "+ 1.0 throughout the last 10 % of the steps, or a final loss that is above both its best + 1.0 and "
    "the initial loss - 0.1; did not learn: any other final loss above the initial loss - 0.1; "
    f"saturated: a layer ends with a logit of {Thresholds().level_warning:g} or more and a mean entropy "
    f"below {Thresholds().saturated:.0%} of ln(visible keys); finished: none of these"
)
WORSE = 1.0  # nats above the best loss
SUMMARY_KEYS = (
    "arm", "lr", "seed", "final_loss", "max_logit", "entropy_nats", "verdict", "diverged", "reason",
    "initial_loss", "steps",
)  # fmt: skip


class Verdict(NamedTuple):
    """How a run ended.

    Attributes:
        word: one of the verdicts of `VERDICT_RULES`.
        reason: the numbers that led to it; None for "finished".
    """

    word: Literal["finished", "saturated", "did not learn", "diverged"]
    reason: str | None = None


def judge(losses: Sequence[float], final_loss: float, end: Record) -> Verdict:
    """Judge how a run ended, by `VERDICT_RULES`.

    Args:
        losses: training loss of every step, in nats per token.
        final_loss: held-out loss at the end, in nats per token.
        end: the record of attention at the end.

    Returns:
        The verdict.
    """
    if not all(map(math.isfinite, losses)) or not math.isfinite(final_loss):
        return Verdict("diverged", "the loss is not finite")
    if rose := how_it_rose(losses):
        return Verdict("diverged", rose)
    if final_loss > losses[0] - 0.1:
        reason = f"the final loss {final_loss:.3f} is not 0.1 below the initial {losses[0]:.3f}"
        is_worse = final_loss > min(losses) + WORSE
        return Verdict("diverged" if is_worse else "did not learn", reason)
    saturated = {name: layer for name, layer in end.layers.items() if _is_saturated(layer)}
    if saturated:
        name, layer = max(saturated.items(), key=lambda item: item[1].top)
        reason = (
            f"{len(saturated)} of {len(end.layers)} layers; {name} has a logit of {layer.top:,.0f} and "
            f"{layer.mean('entropy_ratio'):.1%} of the largest entropy"
        )
        return Verdict("saturated", reason)
    return Verdict("finished")


def how_it_rose(losses: Sequence[float]) -> str | None:
    """Return why finite training losses are those of a run that diverged; None if they are not."""
    best, tail = min(losses), max(1, len(losses) // 10)
    if len(losses) > 1 and min(losses[-tail:]) > best + WORSE:
        return f"the last 10 % stay more than {WORSE:.1f} above the best loss, {best:.3f}"
    return None


def _is_saturated(layer: LayerRecord) -> bool:
    """Whether a layer is in the state for which the monitor raises its alarm of saturation."""
    limits = Thresholds()
    return layer.top >= limits.level_warning and layer.mean("entropy_ratio") < limits.saturated


def lr_sensitivity(final_losses: dict[float, float], initial_loss: float) -> float | None:
    """Compute the LR sensitivity of Wortsman et al., sec. 2.1.

    It is the mean over a grid of learning rates of `min(loss, initial loss) - best loss`.

    Args:
        final_losses: held-out loss in nats per token, by learning rate.
        initial_loss: loss before training, in nats per token.

    Returns:
        The sensitivity in nats; None unless all seven learning rates of the paper are present, since it
        depends on the grid.
    """
    if not all(any(math.isclose(rate, lr) for lr in final_losses) for rate in WORTSMAN_GRID):
        return None
    clipped = [
        min(loss, initial_loss) if math.isfinite(loss) else initial_loss
        for lr, loss in final_losses.items()
        if any(math.isclose(rate, lr) for rate in WORTSMAN_GRID)
    ]
    return sum(clipped) / len(clipped) - min(clipped)

"""What counts as diverged, and how sensitive a variant is to its learning rate: rules, not taste."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Wortsman et al. 2023 (arXiv 2309.14322), sec. 2.1.
WORTSMAN_GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
DIVERGENCE_RULE = (
    "diverged: a loss, a gradient or a weight that is not finite, a final loss above the initial loss - "
    "0.1, or a training loss above its best so far + 1.0 throughout the last 10 % of the steps"
)
SUMMARY_KEYS = (
    "arm", "lr", "seed", "final_loss", "max_logit", "entropy_nats", "diverged", "reason",
    "initial_loss", "steps",
)  # fmt: skip


def divergence(losses: Sequence[float], final_loss: float) -> str | None:
    """Why a run counts as diverged, or None.

    Args:
        losses: training loss of every step, in nats per token.
        final_loss: held-out loss at the end.
    """
    if not all(map(math.isfinite, losses)) or not math.isfinite(final_loss):
        return "the loss is not finite"
    if final_loss > losses[0] - 0.1:
        return f"the final loss {final_loss:.3f} is not 0.1 below the initial {losses[0]:.3f}"
    tail = max(1, len(losses) // 10)
    best = min(losses)
    if len(losses) > 1 and min(losses[-tail:]) > best + 1.0:
        return f"the last 10 % stay more than 1.0 above the best loss, {best:.3f}"
    return None


def lr_sensitivity(final_losses: dict[float, float], initial_loss: float) -> float | None:
    """Mean over the grid of min(loss, initial loss) - best loss (Wortsman et al., sec. 2.1).

    None unless all seven rates of the paper are there, since it depends on the grid.
    """
    if not all(any(math.isclose(rate, lr) for lr in final_losses) for rate in WORTSMAN_GRID):
        return None
    clipped = [
        min(loss, initial_loss) if math.isfinite(loss) else initial_loss
        for lr, loss in final_losses.items()
        if any(math.isclose(rate, lr) for rate in WORTSMAN_GRID)
    ]
    return sum(clipped) / len(clipped) - min(clipped)

"""What is measured at one call of attention, from q and k as they enter the product.

One operator, `qknorm::monitor_observe`, adds to a layer's buffer in place: to a compiled graph it is one
opaque node, and nothing of it reaches autograd.

Shapes: B batch, Tq / Tk tokens, Hq / Hk heads, G = Hq / Hk, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qknorm.monitor.fields import FIELD
from qknorm.monitor.rows import Seen, add_call, add_rms

# FlexAttention's: (score, batch, head, query, key) -> score, on scalars.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

torch.library.define(
    "qknorm::monitor_observe",
    "(Tensor(a!) buffer, Tensor q, Tensor k, Tensor? mask, Tensor? sink, bool causal, int? window, "
    "float scale, float? softcap, int? sample, bool cross) -> ()",
)


def in_backward() -> bool:
    """Whether autograd is running: a forward now is a recomputation under activation checkpointing, and
    was counted the first time."""
    return torch._C._current_graph_task_id() != -1


def _columns(buffer: Tensor, q: Tensor) -> Tensor:
    if q.shape[1] > buffer.shape[1]:
        raise ValueError(f"{q.shape[1]} heads; at most {buffer.shape[1]} can be watched in a layer")
    return buffer[:, : q.shape[1]]


@torch.library.impl("qknorm::monitor_observe", "CompositeExplicitAutograd")
def _observe(
    buffer: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sample: int | None,
    cross: bool,
) -> None:
    def cap(s: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        assert softcap is not None
        return s.div_(softcap).tanh_().mul_(softcap)

    _add_call(
        buffer,
        q,
        k,
        Seen(
            scale=scale,
            mask=mask,
            sink=sink,
            causal=causal,
            window=window,
            change=None if softcap is None else cap,
            sample=sample,
            cross=cross,
        ),
    )


@torch.library.register_fake("qknorm::monitor_observe")
def _(
    buffer: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sample: int | None,
    cross: bool,
) -> None:
    return None


def observe_score_mod(
    buffer: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float,
    score_mod: ScoreMod,
    sample: int | None,
) -> None:
    """`monitor_observe` with a function that changes logits, as FlexAttention has, which no operator
    takes."""
    over = (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, *[None] * 3),
    )
    for axes in over:  # keys, queries, heads, batch
        score_mod = torch.vmap(score_mod, in_dims=axes)

    def change(s: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        b, h = (torch.arange(n, device=s.device) for n in s.shape[:2])
        return score_mod(s, b, h, queries, keys).to(s.dtype)

    seen = Seen(scale=scale, mask=mask, change=change, change_hides=True, sample=sample)
    _add_call(buffer, q, k, seen)


def _add_call(buffer: Tensor, q: Tensor, k: Tensor, seen: Seen) -> None:
    if not in_backward() and q.numel() > 0 and k.numel() > 0:
        add_call(_columns(buffer, q), q, k, seen)


torch.library.define(
    "qknorm::monitor_add",
    "(Tensor(a!) buffer, Tensor q, Tensor k, Tensor max_logit, Tensor sums, Tensor counts) -> ()",
)


@torch.library.impl("qknorm::monitor_add", "CompositeExplicitAutograd")
def _add(buffer: Tensor, q: Tensor, k: Tensor, max_logit: Tensor, sums: Tensor, counts: Tensor) -> None:
    """Statistics that a fused pass has computed: sums `[3, Hq]` of entropy, ratio and sink mass, counts
    `[2]`. Whose q and k are not padding it does not say: their RMS is over all tokens."""
    if in_backward():
        return
    buffer = _columns(buffer, q)
    with torch.no_grad():
        buffer[0] = torch.maximum(buffer[0], max_logit.to(buffer.dtype))
        buffer[FIELD["entropy"] : FIELD["sink"] + 1] += sums
        buffer[FIELD["rows"]] += counts[0]
        buffer[FIELD["ratio_rows"]] += counts[1]
        add_rms(buffer, "q", q, None)
        add_rms(buffer, "k", k, None)


@torch.library.register_fake("qknorm::monitor_add")
def _(buffer: Tensor, q: Tensor, k: Tensor, max_logit: Tensor, sums: Tensor, counts: Tensor) -> None:
    return None

"""What is measured at one call of attention, from q and k as they enter the product.

One operator, `qknorm::monitor_observe`, adds to a layer's buffer in place: to a compiled graph it is one
opaque node, and nothing of it reaches autograd.

Shapes: B batch, Tq / Tk tokens, Hq / Hk heads, G = Hq / Hk, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qknorm import spec
from qknorm.ops.logit_stats import full_precision_matmul

# FlexAttention's: (score, batch, head, query, key) -> score, on scalars.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# (queries [n], keys [m]) -> the mask `[B or 1, Hq or 1, n, m]` of these, bool or additive.
MaskOf = Callable[[Tensor, Tensor], Tensor]

# Scores held at once, in fp32: 4 MiB where they should stay in a cache, 64 MiB on a device.
SCORE_BUDGET = {"cpu": 1 << 20}
DEVICE_SCORE_BUDGET = 1 << 24

# An additive mask hides a pair by this or less: somewhat above -1e4, the smallest that models use, which
# bf16 rounds and to which a bias may be added. Its probability is 0 in any dtype.
HIDES = -9e3

MAX_HEADS = 512

# Rows of a buffer `[len(FIELDS), MAX_HEADS]`, of which the first Hq columns count. The first row is a
# maximum, the others are sums. Those of k hold one value per key head in their first Hk columns.
FIELDS = (
    "max_logit",
    "entropy",
    "ratio",
    "sink",
    "first",
    "rows",
    "ratio_rows",
    "q_rms",
    "q_rms_square",
    "q_rows",
    "k_rms",
    "k_rms_square",
    "k_rows",
)
FIELD = {name: i for i, name in enumerate(FIELDS)}


def new_buffer(heads: int, device: torch.device) -> Tensor:
    """An empty buffer: -inf for the maximum, zeros for the sums. fp64 where the device has it."""
    buffer = torch.zeros(
        len(FIELDS), heads, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device
    )
    return clear_(buffer)


def clear_(buffer: Tensor) -> Tensor:
    """Empty it in place."""
    buffer.zero_()[0].fill_(-torch.inf)
    return buffer


torch.library.define(
    "qknorm::monitor_observe",
    "(Tensor(a!) buffer, Tensor q, Tensor k, Tensor? mask, Tensor? sink, bool causal, int? window, "
    "float scale, float? softcap, int? rows, bool cross) -> ()",
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
    rows: int | None,
    cross: bool,
) -> None:
    _add_call(buffer, q, k, mask, sink, causal, window, scale, _softcap(softcap), rows, cross)


def _softcap(softcap: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda s, _: s if softcap is None else s.div_(softcap).tanh_().mul_(softcap)


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
    rows: int | None,
    cross: bool,
) -> None:
    return None


def observe_functions(
    buffer: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | MaskOf | None,
    sink: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    score_mod: ScoreMod | None,
    rows: int | None,
    cross: bool,
) -> None:
    """`monitor_observe` with functions, which no operator takes: a mask that is made block by block, and
    FlexAttention's change of the logits. What that sends to -inf is hidden, as by a mask."""
    if score_mod is None:
        _add_call(buffer, q, k, mask, sink, causal, window, scale, _softcap(softcap), rows, cross)
        return
    changed = per_pair(score_mod, is_score=True)
    b, h = (torch.arange(n, device=q.device) for n in q.shape[:2])

    def left(queries: Tensor, keys: Tensor) -> Tensor:
        zeros = torch.zeros(len(b), len(h), len(queries), len(keys), device=q.device)
        return changed(zeros, b, h, queries, keys) != -torch.inf

    def modify(s: Tensor, queries: Tensor) -> Tensor:
        keys = torch.arange(s.shape[3], device=s.device)
        return changed(s, b, h, queries.to(s.device), keys).to(s.dtype)

    visible = both(as_mask_of(mask), left)
    _add_call(buffer, q, k, visible, sink, causal, window, scale, modify, rows, cross, hides=True)


def per_pair(mod: Callable[..., Tensor], *, is_score: bool) -> Callable[..., Tensor]:
    """A function of FlexAttention on scalars as one of whole axes: batch, heads, queries, keys."""
    for axis in (3, 2, 1, 0):
        over = [0 if i == axis else None for i in range(4)]
        mod = torch.vmap(mod, in_dims=(0, *over) if is_score else tuple(over))
    return mod


def as_mask_of(mask: Tensor | MaskOf | None) -> MaskOf | None:
    """Any mask as a function of queries and keys."""
    if not isinstance(mask, Tensor):
        return mask
    mask = _narrow(mask[(None,) * (4 - mask.dim())])
    rows, columns = mask.shape[2] > 1, mask.shape[3] > 1

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        some = mask[:, :, queries] if rows else mask.expand(-1, -1, len(queries), -1)
        return some[..., : len(keys)] if columns else some.expand(-1, -1, -1, len(keys))

    return mask_of


def both(a: MaskOf | None, b: MaskOf | None) -> MaskOf | None:
    """Two masks at once: what either hides is hidden, and what they add is added."""
    if a is None or b is None:
        return b if a is None else a

    def mask_of(queries: Tensor, keys: Tensor) -> Tensor:
        x, y = a(queries, keys), b(queries, keys)
        if x.dtype == torch.bool and y.dtype == torch.bool:
            return x & y
        x, y = (torch.where(m, 0.0, -torch.inf) if m.dtype == torch.bool else m for m in (x, y))
        return x + y

    return mask_of


def _add_call(
    buffer: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | MaskOf | None,
    sink: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    modify: Callable[[Tensor, Tensor], Tensor],
    rows: int | None,
    cross: bool,
    *,
    hides: bool = False,
) -> None:
    """`modify(s, queries)` maps scaled products `[B, Hq, n, hi]` to logits, before the bias; `hides`:
    what it sends to -inf is hidden."""
    if in_backward() or q.numel() == 0 or k.numel() == 0:
        return
    buffer = _columns(buffer, q)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False), full_precision_matmul():
        view = View(q.shape[2], k.shape[2], mask, causal, window, q.device, cross=cross)
        _add_logits(buffer, q, k, view, sink, scale, modify, rows, hides)
        _add_rms(buffer, "q", q, view.real)
        _add_rms(buffer, "k", k, view.keys)


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
        _add_rms(buffer, "q", q, None)
        _add_rms(buffer, "k", k, None)


@torch.library.register_fake("qknorm::monitor_add")
def _(buffer: Tensor, q: Tensor, k: Tensor, max_logit: Tensor, sums: Tensor, counts: Tensor) -> None:
    return None


class Block(NamedTuple):
    """The view of some queries on the keys [0, hi)."""

    hi: int
    visible: Tensor  # bool [B or 1, H or 1, n, hi]
    bias: Tensor | None  # float, the same


class View:
    """Which keys a query sees, whatever form the mask came in.

    Args:
        mask: None, bool (True: visible), or additive, broadcastable to `[B, Hq, Tq, Tk]`, or a function
            that makes one for some queries and all keys below a limit. An additive entry at or below
            HIDES hides the pair.
        causal, window: as in `Mask`, beside the mask.
        cross: queries and keys are of different sequences, whatever their lengths.

    Attributes:
        real: bool `[B or 1, Tq]`: some query, if only itself, sees the token, so that it is no padding.
            Of different sequences, or with Tq != Tk, nothing is known of that, and it is None.
        keys: bool `[B or 1, Tk]`: some query sees the key; None for all.
        first: `[B or 1, H or 1, Tq]`: the first key that a query sees.
    """

    def __init__(
        self,
        Tq: int,
        Tk: int,
        mask: Tensor | MaskOf | None,
        causal: bool,
        window: int | None,
        device: torch.device,
        *,
        cross: bool = False,
    ) -> None:
        self.Tq, self.Tk = Tq, Tk
        self.causal, self.window = causal, window
        self.tokens = torch.arange(Tq, device=device) + (Tk - Tq)
        self.mask_of = as_mask_of(mask)
        is_self = Tq == Tk and not cross
        self.real: Tensor | None = None
        self.keys: Tensor | None = None
        if self.mask_of is None:
            self.first = (self.tokens - (window or Tk) + 1).clamp(min=0)[None, None]
            if is_self:
                self.real = torch.ones(1, Tq, dtype=torch.bool, device=device)
        else:
            one = torch.zeros(1, dtype=torch.long, device=device)
            B, H = self.mask_of(one, one).shape[:2]
            firsts, keys = [], torch.zeros(B, Tk, dtype=torch.bool, device=device)
            for some in torch.arange(Tq).split(max(1, _budget(device) // (B * H * Tk))):
                visible = self.block(some).visible
                firsts.append(visible.byte().argmax(-1))
                keys[:, : visible.shape[-1]] |= visible.any(2).any(1)
            self.first, self.keys = torch.cat(firsts, 2), keys
            if is_self:
                self.real = keys

    def block(self, queries: Tensor) -> Block:
        """What some queries see, ascending indices on the CPU, and the bias on it."""
        limited = self.causal or self.window is not None
        reach = 1 if self.causal or self.window is None else self.window
        hi = min(self.Tk, int(queries[-1]) + self.Tk - self.Tq + reach) if limited else self.Tk
        queries = queries.to(self.tokens.device)
        tokens = self.tokens[queries]
        bias = None
        if self.mask_of is None:
            visible = torch.ones(1, 1, len(tokens), hi, dtype=torch.bool, device=tokens.device)
        else:
            rows = self.mask_of(queries, torch.arange(hi, device=tokens.device))
            if rows.dtype == torch.bool:
                visible = rows
            else:
                visible, bias = ~(rows <= HIDES), rows  # a NaN hides nothing
        if limited:
            distance = tokens[:, None] - torch.arange(hi, device=tokens.device)
            if self.causal:
                visible = visible & (distance >= 0)
            if self.window is not None:
                visible = visible & (distance < self.window) & (distance > -self.window)
        return Block(hi, visible, bias)


def _narrow(mask: Tensor) -> Tensor:
    """Without the copies that an expanded axis stands for."""
    for axis in (0, 1, 2):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _budget(device: torch.device) -> int:
    return SCORE_BUDGET.get(device.type, DEVICE_SCORE_BUDGET)


def _add_logits(
    buffer: Tensor,
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    view: View,
    sink: Tensor | None,
    scale: float,
    modify: Callable[[Tensor, Tensor], Tensor],
    rows: int | None,
    hides: bool,
) -> None:
    """Blocks of queries against all keys that they may see."""
    B, Hq, Tq, _ = q_BHTD.shape
    Hk, Tk = k_BHTD.shape[1:3]
    wide = spec.compute_dtype(q_BHTD.dtype)
    queries = torch.arange(Tq)  # on the CPU, whose values are known without waiting for a device
    if rows is not None and rows < Tq:
        # The last is always among them: under a causal mask the first sees one key.
        queries = (Tq - 1 - torch.linspace(0, Tq - 1, rows).round().long()).flip(0)
    step = max(1, _budget(q_BHTD.device) // (B * Hq * Tk))
    # A key at which a document starts: it is the first that its own query sees.
    starts = view.first == view.tokens if view.real is not None else None
    for some in queries.split(step):
        hi, visible, bias = view.block(some)
        part, n = some.to(q_BHTD.device), len(some)
        grouped = q_BHTD[:, :, part].to(wide).reshape(B, Hk, Hq // Hk * n, -1)
        s = (grouped @ k_BHTD[:, :, :hi].to(wide).mT).view(B, Hq, n, hi).mul_(scale)
        s = modify(s, some)
        if hides:
            visible = visible & (s != -torch.inf)
        if bias is not None:
            s = s + bias
        s = s.masked_fill(~visible, -torch.inf)
        seen = visible.any(-1).expand(B, Hq, n)
        counted = seen if view.real is None else seen & view.real[:, None, part]
        keys = visible.sum(-1).expand(B, Hq, n)

        m = s.amax(-1)
        origin = torch.where(m == -torch.inf, 0.0, m)[..., None]
        first = view.first[:, :, part].expand(B, Hq, n)
        first_logit = s.gather(-1, first.clamp(max=hi - 1)[..., None])[..., 0]
        s = (s - origin).clamp_(min=-800.0)  # exp is 0 there, and 0 * -800 is 0
        p = s.exp()
        l = p.sum(-1)  # noqa: E741 - the name of the literature
        log_sum = l.log()
        entropy = (log_sum - (p * s).sum(-1) / l).clamp_(min=0.0)
        sink_mass = (
            torch.zeros_like(m) if sink is None else torch.sigmoid(sink[:, None].to(m) - m - log_sum)
        )
        first_mass = (first_logit - origin[..., 0] - log_sum).exp() * (1 - sink_mass)
        if starts is not None:
            started = starts.expand(B, Hq, Tq).gather(-1, first)
            first_mass = torch.where(started, first_mass, 0.0)
        choice = counted & (keys > 1)
        ratio = entropy / keys.clamp(min=2).to(wide).log()

        top = torch.where(counted, m, -torch.inf).transpose(0, 1).flatten(1).amax(-1)
        buffer[0] = torch.maximum(buffer[0], top)
        sums = {"entropy": entropy, "sink": sink_mass, "first": first_mass}
        for name, x in sums.items():
            buffer[FIELD[name]] += torch.where(counted, x, 0.0).sum((0, 2), dtype=buffer.dtype)
        buffer[FIELD["ratio"]] += torch.where(choice, ratio, 0.0).sum((0, 2), dtype=buffer.dtype)
        buffer[FIELD["rows"]] += counted.sum((0, 2))
        buffer[FIELD["ratio_rows"]] += choice.sum((0, 2))


def _add_rms(buffer: Tensor, name: str, x_BHTD: Tensor, real: Tensor | None) -> None:
    """Root mean square of each vector of real tokens: sum, sum of squares, count, per head."""
    B, H, T, D = x_BHTD.shape
    wide = spec.compute_dtype(x_BHTD.dtype)
    rms = torch.linalg.vector_norm(x_BHTD, dim=-1, dtype=wide).div_(D**0.5)
    at = FIELD[f"{name}_rms"]
    if real is not None:
        real = real[:, None].expand(B, H, T)
        rms = torch.where(real, rms, 0.0)
    buffer[at, :H] += rms.sum((0, 2), dtype=buffer.dtype)
    buffer[at + 1, :H] += rms.square().sum((0, 2), dtype=buffer.dtype)
    buffer[at + 2, :H] += B * T if real is None else real.sum((0, 2))

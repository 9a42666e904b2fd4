"""The loop over blocks of keys: online softmax with the exact maximum and, on request, the entropy."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from qknorm.ops.backends.triton.kernels.tiles import visible_pairs


@triton.jit
def attend_block(
    q,
    acc,
    m,
    l,  # noqa: E741 - the usual name in papers
    t,
    k,  # k, v and key_ids point to the first key
    k_st,
    v,
    v_st,
    key_ids,
    start,
    query_token,
    query_id,
    Tk,
    window,
    c,
    D: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    IDS: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,  # 0 computes the statistics alone
):
    """Add the keys of one block to acc `[M, V]` and to m, l and t `[M]` of the rows.

    m is the exact maximum of q.k. Scaled once at the end, it is the maximum of the logits. The sums are
    l = sum exp2(s - mc) and t = sum exp2(s - mc) (s - mc), with s = c q.k and mc = c m.
    """
    keys = start + tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, BLOCK_D)
    k_at = k + start.to(tl.int64) * k_st
    own = tl.arange(0, BLOCK_N)
    if MASKED or BLOCK_D != D:
        there = (keys < Tk)[None, :] & (d_cols < D)[:, None]
        k_tile = tl.load(k_at + own[None, :] * k_st + d_cols[:, None], mask=there, other=0.0)
    else:
        k_tile = tl.load(k_at + own[None, :] * k_st + d_cols[:, None])
    qk = tl.dot(q, k_tile, input_precision="ieee")
    if MASKED:
        key_id = 0
        if IDS:
            key_id = tl.load(key_ids + keys, mask=keys < Tk, other=-1)
        visible = visible_pairs(query_token, keys, query_id, key_id, Tk, window, CAUSAL, WINDOW, IDS)
        qk = tl.where(visible, qk, float("-inf"))
    m_new = tl.maximum(m, tl.max(qk, 1))
    # A row that has seen no key yet has m = -inf, and -inf - (-inf) would be NaN.
    mc_new = tl.where(m_new == float("-inf"), 0.0, m_new * c)
    s = qk * c - mc_new[:, None]
    p = tl.exp2(s)
    # This must be exactly 0 where the maximum stays. The compiler would fuse m * c - mc_new into one
    # operation, whose result would be the rounding error of mc_new, and every block would scale the sums
    # of the earlier keys slightly. The tl.where prevents that.
    down = tl.where(m == float("-inf"), float("-inf"), m * c) - mc_new
    alpha = tl.exp2(down)
    if ENTROPY:
        ps = p * s
        if MASKED:
            ps = tl.where(qk == float("-inf"), 0.0, ps)
        t = alpha * (t + tl.where(l > 0.0, l * down, 0.0)) + tl.sum(ps, 1)
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    if BLOCK_V > 0:
        v_cols = tl.arange(0, BLOCK_V)
        v_at = v + start.to(tl.int64) * v_st
        if MASKED or BLOCK_V != V:
            there = (keys < Tk)[:, None] & (v_cols < V)[None, :]
            v_tile = tl.load(v_at + own[:, None] * v_st + v_cols[None, :], mask=there, other=0.0)
        else:
            v_tile = tl.load(v_at + own[:, None] * v_st + v_cols[None, :])
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, m_new, l, t


@triton.jit
def attend(
    q,
    k,
    k_st,
    v,
    v_st,
    key_ids,
    lo,
    a,
    b,
    hi,
    query_token,
    query_id,
    Tk,
    window,
    c,
    D: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    IDS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend to the keys `[lo, hi)`. The blocks in `[a, b)` are visible to all rows and need no mask.

    Returns acc `[M, BLOCK_V]`, which is not divided by l yet, and m, l and t `[M]`; see `attend_block`.
    """
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    t = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V if BLOCK_V > 0 else 1], tl.float32)
    if not IDS:
        for i in tl.range(0, (b - a) // BLOCK_N):
            acc, m, l, t = attend_block(  # noqa: E741
                q, acc, m, l, t, k, k_st, v, v_st, key_ids, a + i * BLOCK_N, query_token,
                query_id, Tk, window, c,
                D, V, CAUSAL, WINDOW, IDS, False, ENTROPY, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    # One loop over the blocks before the full ones and the blocks after them.
    left = (a - lo) // BLOCK_N
    right = tl.maximum(hi - b + BLOCK_N - 1, 0) // BLOCK_N
    for j in tl.range(0, left + right):
        start = tl.where(j < left, lo + j * BLOCK_N, b + (j - left) * BLOCK_N)
        acc, m, l, t = attend_block(  # noqa: E741
            q, acc, m, l, t, k, k_st, v, v_st, key_ids, start, query_token, query_id, Tk, window, c,
            D, V, CAUSAL, WINDOW, IDS, True, ENTROPY, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    return acc, m, l, t


@triton.jit
def add_sink(acc, m, l, sink, c, SINK: tl.constexpr):  # noqa: E741
    """Divide acc by the whole denominator. The sink is a logit, in nats like all logits outside.

    Returns out; an exponent and the log2 of a sum relative to it, which add up to the log2-sum-exp; and
    the probability of the sink. A row that sees neither key nor sink has the output 0, and both parts
    are 0.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    mc = tl.where(m == float("-inf"), 0.0, m * c)
    seen = l > 0.0
    if SINK:
        sink2 = sink * LOG2E
        top = tl.where(seen, tl.maximum(mc, sink2), sink2)
        top = tl.where(top == float("-inf"), 0.0, top)
        kept = tl.where(seen, tl.exp2(mc - top), 0.0)
        from_sink = tl.exp2(sink2 - top)
        total = l * kept + from_sink
        total = tl.where(total == 0.0, 1.0, total)  # neither key nor sink
        acc = acc * (kept / total)[:, None]
        return acc, top, tl.log2(total), from_sink / total
    else:
        total = tl.where(seen | (l != l), l, 1.0)
        acc = acc / total[:, None]
        return acc, mc, tl.log2(total), l * 0.0

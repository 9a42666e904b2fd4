"""What the conformance suite asks: one call written down as numbers, hard ones, and any one.

Shapes: B batch, Tq / Tk query / key tokens, Hq / Hk heads, D head width, Dv value width, R rotary
width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qknorm.spec import Mask, Rope, SinkToken


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call. R = 0 is no RoPE; `documents` and `key_padding` name a pattern, see `mask`."""

    B: int = 2
    Hq: int = 4
    Hk: int = 2
    Tq: int = 13
    Tk: int = 13
    D: int = 16
    Dv: int = 16
    R: int = 0
    layout: str = "half"
    table_per_row: bool = False
    normed: bool = True
    eps: float = 1e-6
    causal: bool = True
    window: int | None = None
    documents: str | None = None  # packed, padded, ragged
    key_padding: str | None = None  # tail, head, holes, whole
    sink: str | None = None  # off_by_one, learnable, token
    sink_level: float = 0.0
    scale: float | None = None
    memory: str = "packed"  # packed, permuted, contiguous
    amplitude: float = 1.0
    seed: int = 0

    def mask(self) -> Mask:
        """The mask. Batch rows differ, so that a mask read from the wrong row shows."""
        B, Tk = self.B, self.Tk
        token = torch.arange(Tk)[None].expand(B, Tk)
        row = torch.arange(B)[:, None]
        documents, real = None, None
        if self.documents is not None:
            length = max(1, Tk // 3)
            # Not sorted and not dense: only equality of ids may matter.
            documents = (7 - 2 * ((token + row) // length)) % 11
            if self.documents == "padded":
                documents = torch.where(token >= Tk - max(1, Tk // 5) + row, -1, documents)
                documents[0, Tk // 2] = -3
                documents[0, : 1 + Tk // 16] = -1
            if self.documents == "ragged":
                documents = torch.where(token % 5 == row % 5, 4, documents)
        if self.key_padding is not None:
            real = {
                "tail": token < Tk - max(1, Tk // 4) - row,
                "head": token >= max(1, Tk // 4) - row,
                "holes": (token + row) % 3 != 1,
                "whole": row.expand(B, Tk) != 0,
            }[self.key_padding]
        return Mask(self.causal, self.window, documents, real)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a problem in one dtype. `leaves` are what gradients are taken for."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    leaves: dict[str, Tensor]
    d_out: Tensor


def make_inputs(problem: Problem, dtype: torch.dtype) -> Inputs:
    """Fresh leaves; the same numbers on each call."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = randn(p.B, p.Tq, p.Hq, p.D)
    k = randn(p.B, p.Tk, p.Hk, p.D)
    v = randn(p.B, p.Tk, p.Hk, p.Dv)
    # Heads out of balance: a statistic over all heads must show.
    for x in (q, k):
        x[:, :, x.shape[2] // 2 :] *= 3
        x *= p.amplitude
    # No entry has mean zero over tokens, or a leak to a wrong key would partly cancel.
    v += 0.5
    q, k, v = _lay_out(q, k, v, p.memory, dtype)

    param_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {"q": q, "k": k, "v": v}
    options: dict[str, Any] = {"eps": p.eps, "mask": p.mask(), "scale": p.scale}
    if p.normed:
        for name, heads in (("q_gain", p.Hq), ("k_gain", p.Hk)):
            gain = (randn(heads, p.D) * 0.4 + 1.1).to(param_dtype)
            leaves[name] = options[name] = gain
    if p.R:
        # Positions above 0 that neither start at 0 nor follow each other by one step.
        rows = p.B if p.table_per_row else 1
        step = torch.randint(1, 3, (rows, p.Tk), generator=generator)
        position = 3 + step.cumsum(1) + 5 * torch.arange(rows)[:, None]
        angle = position[..., None] * 100.0 ** -(torch.arange(p.R // 2) / max(1, p.R // 2))
        angle = angle if p.table_per_row else angle[0]
        options["rope"] = Rope(angle.cos().to(param_dtype), angle.sin().to(param_dtype), p.layout)
    if p.sink == "off_by_one":
        options["sink"] = "off_by_one"
    elif p.sink == "learnable":
        leaves["sink"] = options["sink"] = (randn(p.Hq) + p.sink_level).to(param_dtype)
    elif p.sink == "token":
        # Values that the input dtype holds: whether a wider parameter is rounded first is left open.
        key, value = (randn(p.Hk, n).to(dtype).to(param_dtype) for n in (p.D, p.Dv))
        leaves["sink_key"], leaves["sink_value"] = key, value
        options["sink"] = SinkToken(key, value)
    for leaf in leaves.values():
        leaf.requires_grad_()
    d_out = randn(p.B, p.Hq, p.Tq, p.Dv).to(dtype)
    return Inputs(q, k, v, options, leaves, d_out)


def _lay_out(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, memory: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, T, D] with the strides of a real model: views of one packed buffer, or permuted."""
    Tq, Tk = q_BTHD.shape[1], k_BTHD.shape[1]
    if memory == "packed" and Tq <= Tk:
        flat = [x.flatten(2) for x in (q_BTHD, k_BTHD, v_BTHD)]
        flat[0] = torch.cat([torch.zeros_like(flat[0][:, :1]).repeat(1, Tk - Tq, 1), flat[0]], 1)
        buffer = torch.cat(flat, -1).to(dtype)
        parts = buffer.split([x.shape[-1] for x in flat], -1)
        views = [
            part.unflatten(-1, x.shape[2:]).transpose(1, 2)
            for part, x in zip(parts, (q_BTHD, k_BTHD, v_BTHD), strict=True)
        ]
        return views[0][:, :, Tk - Tq :].detach(), views[1].detach(), views[2].detach()
    views = [x.to(dtype).transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD)]
    if memory == "contiguous":
        views = [x.contiguous() for x in views]
    return views[0], views[1], views[2]


# Hard problems, each here because one mistake hides everywhere else.
HARD: dict[str, Problem] = {
    "plain": Problem(),
    "one_token": Problem(Tq=1, Tk=1, R=8, sink="learnable"),
    "decode": Problem(Tq=1, Tk=63, R=16, Hk=1),
    "chunk": Problem(Tq=7, Tk=63, R=8, layout="interleaved", documents="packed"),
    "chunk_window": Problem(Tq=30, Tk=100, window=9, R=16, sink="learnable", sink_level=5.0),
    "partial_half": Problem(R=8, D=16),
    "partial_interleaved": Problem(R=4, D=16, layout="interleaved"),
    "whole_half": Problem(R=16, memory="permuted"),
    "whole_interleaved": Problem(R=16, layout="interleaved", memory="contiguous"),
    "table_per_row": Problem(R=8, table_per_row=True, Tq=9, Tk=21),
    "table_per_row_sink_token": Problem(R=8, table_per_row=True, sink="token", layout="interleaved"),
    "many_groups": Problem(Hq=6, Hk=2, Tq=63, Tk=63, R=8),
    "single_key_head": Problem(Hq=4, Hk=1, D=8, Dv=24),
    "own_key_heads": Problem(Hq=3, Hk=3, R=8, Dv=5),
    "two_sided": Problem(causal=False),
    "two_sided_window": Problem(causal=False, window=4, Tq=63, Tk=63),
    "window": Problem(window=5, Tq=63, Tk=63),
    "window_of_one": Problem(window=1, sink="off_by_one"),
    "documents": Problem(documents="packed", Tq=63, Tk=63, R=8),
    "documents_two_sided": Problem(documents="ragged", causal=False, Tq=21, Tk=21),
    "documents_padded": Problem(documents="padded", Tq=63, Tk=63, sink="learnable"),
    "documents_padded_two_sided": Problem(documents="padded", causal=False, Tq=20, Tk=41),
    "padding_tail": Problem(key_padding="tail", Tq=63, Tk=63, sink="learnable"),
    "padding_tail_two_sided": Problem(key_padding="tail", causal=False),
    "padding_head": Problem(key_padding="head", Tq=63, Tk=63),
    "padding_head_sink": Problem(key_padding="head", sink="learnable", sink_level=5.0),
    "padding_head_sink_token": Problem(key_padding="head", sink="token"),
    "padding_holes": Problem(key_padding="holes", Tq=40, Tk=63, R=8, sink="off_by_one"),
    "padding_whole": Problem(key_padding="whole", sink="learnable"),
    "nothing_counted": Problem(key_padding="whole", B=1),
    "nothing_counted_sink": Problem(key_padding="whole", B=1, sink="learnable"),
    "everything": Problem(
        causal=True,
        window=17,
        documents="padded",
        key_padding="holes",
        sink="learnable",
        sink_level=2.0,
        R=8,
        Tq=63,
        Tk=100,
        Dv=24,
        table_per_row=True,
    ),
    "sink_5": Problem(sink="learnable", sink_level=5.0),
    "sink_30": Problem(sink="learnable", sink_level=30.0),
    "sink_over_large_logits": Problem(sink="learnable", sink_level=200.0, scale=2.0),
    "sink_far_below": Problem(sink="learnable", sink_level=-40.0),
    "sink_token": Problem(sink="token", R=8, Tq=20, Tk=33, Dv=24),
    "sink_token_plain": Problem(sink="token", normed=False, Dv=8),
    "scale_1": Problem(scale=1.0),
    "scale_10": Problem(scale=10.0, Tq=33, Tk=33, sink="learnable", sink_level=30.0),
    "not_normed": Problem(normed=False, R=8, sink="off_by_one"),
    "not_normed_no_rope": Problem(normed=False, scale=0.5),
    "tiny_inputs": Problem(amplitude=1e-3, R=8),
    "tiny_inputs_large_eps": Problem(amplitude=0.1, eps=1e-2),
    "large_inputs": Problem(amplitude=200.0, R=8),
    "more_queries_than_keys": Problem(Tq=17, Tk=9, sink="learnable"),
    "more_queries_than_keys_padded": Problem(Tq=17, Tk=9, causal=False, key_padding="tail"),
}


@st.composite
def problems(draw: st.DrawFn, *, largest: int = 257) -> Problem:
    """Any call that the operator must serve. Long sequences come with a small batch."""
    Tk = draw(st.sampled_from([t for t in (1, 2, 7, 33, 63, 64, 100, 129, 257) if t <= largest]))
    Tq = Tk if draw(st.booleans()) else draw(st.sampled_from([1, 3, 17, 63, 90]))
    Tq = min(Tq, Tk)
    D = draw(st.sampled_from([8, 16, 64, 72] if Tk <= 64 else [8, 16, 64]))
    Hk = draw(st.sampled_from([1, 2, 3] if Tk <= 64 else [1, 2]))
    sink = draw(st.sampled_from([None, "off_by_one", "learnable", "learnable", "token"]))
    return Problem(
        B=draw(st.sampled_from([1, 2, 3] if Tk <= 64 else [1, 2])),
        Hk=Hk,
        Hq=Hk * draw(st.sampled_from([1, 2, 3] if Tk <= 64 else [1, 2])),
        Tq=Tq,
        Tk=Tk,
        D=D,
        Dv=draw(st.sampled_from([D, D, 5, 24, 40])),
        R=draw(st.sampled_from([0, 2, D // 2, D])),
        layout=draw(st.sampled_from(["half", "interleaved"])),
        table_per_row=draw(st.booleans()),
        normed=draw(st.sampled_from([True, True, True, False])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        causal=draw(st.sampled_from([True, True, False])),
        window=draw(st.sampled_from([None, None, 1, 2, 9, 70])),
        documents=draw(st.sampled_from([None, None, "packed", "padded", "ragged"])),
        key_padding=draw(st.sampled_from([None, None, "tail", "head", "holes", "whole"])),
        sink=sink,
        sink_level=draw(st.sampled_from([0.0, 5.0, 30.0, 300.0, -5.0])),
        scale=draw(st.sampled_from([None, None, 1.0, 10.0, D**0.5])),
        memory=draw(st.sampled_from(["packed", "packed", "permuted", "contiguous"])),
        amplitude=draw(st.sampled_from([1.0, 1.0, 0.01, 30.0])),
        seed=draw(st.integers(0, 7)),
    )


# Blocks of queries end at multiples of stock.ROWS (64 on the cpu backend), blocks of keys at
# multiples of KEY_BLOCK (64, 128): lengths one past an edge, with masks that begin, end and empty
# blocks there.
LONG = {"B": 1, "Hq": 2, "Hk": 1, "D": 8, "Dv": 8}
BOUNDARY: dict[str, Problem] = {
    "257_causal": Problem(Tq=257, Tk=257, **LONG),
    "257_window_256": Problem(Tq=257, Tk=257, window=256, R=8, **LONG),
    "257_window_257": Problem(Tq=257, Tk=257, window=257, **LONG),
    "257_two_sided_window": Problem(Tq=257, Tk=257, window=3, causal=False, **LONG),
    "513_window_of_one": Problem(Tq=513, Tk=513, window=1, sink="off_by_one", **LONG),
    "513_window": Problem(Tq=513, Tk=513, window=100, sink="learnable", sink_level=5.0, **LONG),
    "513_documents": Problem(Tq=513, Tk=513, documents="padded", causal=False, **LONG),
    "513_tail": Problem(Tq=513, Tk=513, key_padding="tail", sink="learnable", R=4, **LONG),
    "513_chunk": Problem(Tq=257, Tk=513, R=8, **LONG),
    "513_chunk_window": Problem(Tq=257, Tk=513, window=257, key_padding="holes", **LONG),
    # The first 280 queries stand before the first key: whole blocks see nothing.
    "600_more_queries": Problem(Tq=600, Tk=320, sink="learnable", **LONG),
    "600_head": Problem(Tq=600, Tk=600, key_padding="head", window=64, sink="token", **LONG),
    "600_documents": Problem(Tq=600, Tk=600, documents="ragged", window=300, **LONG),
    "600_packed": Problem(Tq=600, Tk=600, documents="packed", sink="learnable", **LONG),
    "600_whole": Problem(Tq=600, Tk=600, key_padding="whole", **{**LONG, "B": 2}),
}

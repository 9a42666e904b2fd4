"""The Triton backend on an NVIDIA GPU: right in bf16, fp16 and fp32, before anything is timed.

    python benchmarks/gpu_conformance.py

The whole operator, decoding too, against the reference in fp64: out, every gradient, every statistic;
the statistics alone, of all queries and of a sample; watching changes no bit, two runs give the same
bits, a CUDA graph replays, `compose` agrees. gpu_attention.py starts with this, and takes its cases and
inputs from here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import qknorm
from qknorm import Mask, Rope
from qknorm.nn import RotaryEmbedding

DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape, causal; those of docs/performance.md in bf16."""

    B: int
    T: int
    Hq: int
    Hk: int
    D: int
    Tq: int | None = None  # the last tokens alone ask; None for all
    window: int | None = None
    sink: bool = False
    documents: bool = False

    def mask(self) -> Mask:
        ids = None
        if self.documents:
            draw = random.Random(0)
            lengths: list[int] = []
            while sum(lengths) < self.T:
                lengths.append(min(int(256 * 32 ** draw.random()), self.T - sum(lengths)))
            ids = torch.repeat_interleave(
                torch.arange(len(lengths)), torch.tensor(lengths), output_size=self.T
            ).to(DEVICE)[None]
        return Mask(causal=True, window=self.window, documents=ids)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Leaves of one case."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_gain: Tensor
    k_gain: Tensor
    sink: Tensor | None
    rope: Rope
    mask: Mask
    d_out: Tensor

    def leaves(self) -> list[Tensor]:
        given = (self.q, self.k, self.v, self.q_gain, self.k_gain, self.sink)
        return [x for x in given if x is not None]


def make_inputs(c: Case, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    torch.manual_seed(0)

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_()

    rope, Tq = RotaryEmbedding(c.D, layout="half")(c.T), c.Tq or c.T
    return Inputs(
        q=leaf(c.B, c.Hq, Tq, c.D),
        k=leaf(c.B, c.Hk, c.T, c.D),
        v=leaf(c.B, c.Hk, c.T, c.D),
        q_gain=(torch.rand(c.Hq, c.D, device=DEVICE) + 0.5).requires_grad_(),
        k_gain=(torch.rand(c.Hk, c.D, device=DEVICE) + 0.5).requires_grad_(),
        sink=leaf(c.Hq, dtype=torch.float32) if c.sink else None,
        rope=Rope(rope.cos.to(DEVICE), rope.sin.to(DEVICE), rope.layout),
        mask=c.mask(),
        d_out=torch.randn(c.B, c.Hq, Tq, c.D, device=DEVICE, dtype=dtype),
    )


def ours(x: Inputs, backend: str, stats: bool) -> Any:
    return qknorm.attention(
        x.q, x.k, x.v, q_gain=x.q_gain, k_gain=x.k_gain, rope=x.rope, mask=x.mask, sink=x.sink,
        stats=stats, backend=backend,
    )  # fmt: skip


def check(name: str, c: Case, dtype: torch.dtype) -> list[str]:
    """Where ours is further from fp64 than three times a run of the definition in fp32 with inputs and
    outputs in `dtype`, plus a floor."""
    x = make_inputs(c, dtype)

    def run(backend: str, wide: bool) -> dict[str, Tensor]:
        leaves = [t.detach().double().requires_grad_() if wide else t for t in x.leaves()]
        q, k, v, q_gain, k_gain, *sink = leaves
        out, found = qknorm.attention(
            q, k, v, q_gain=q_gain, k_gain=k_gain, rope=x.rope, mask=x.mask,
            sink=sink[0] if sink else None, stats="rows", backend=backend,
        )  # fmt: skip
        grads = torch.autograd.grad(out, leaves, x.d_out.to(out.dtype))
        names = ("d_q", "d_k", "d_v", "d_q_gain", "d_k_gain", "d_sink")
        values = {"out": out.detach()} | dict(zip(names, grads, strict=False))
        values |= {"max_logit": found.max_logit, "entropy": found.entropy_nats}
        values |= {"sink_mass": found.sink_mass, "row_entropy": found.rows.entropy_nats}
        return {key: value.double() for key, value in values.items()}

    truth, yard, ours = run("reference", True), run("reference", False), run("triton", False)
    bad = []
    for key, wanted in truth.items():
        allowed = 3 * float((yard[key] - wanted).norm()) + 1e-5 * float(wanted.norm()) + 1e-6
        apart = float((ours[key] - wanted).norm())
        if not apart <= allowed:
            bad.append(f"{name} {dtype} {key}: off by {apart:.3g}, allowed {allowed:.3g}")
    return bad


SMALL = {
    "causal": Case(B=2, T=300, Hq=4, Hk=2, D=64),
    "wide": Case(B=1, T=257, Hq=4, Hk=1, D=128),
    "widest": Case(B=1, T=200, Hq=2, Hk=2, D=256),
    "narrow": Case(B=2, T=129, Hq=6, Hk=3, D=80),
    "window and sink": Case(B=2, T=400, Hq=8, Hk=2, D=64, window=37, sink=True),
    "documents": Case(B=1, T=2048, Hq=4, Hk=2, D=128, documents=True),
    "decode": Case(B=2, T=3000, Tq=1, Hq=8, Hk=2, D=128, sink=True),
    "decode of three": Case(B=1, T=1500, Tq=3, Hq=8, Hk=2, D=64, window=700),
}


def conformance(name: str, c: Case) -> list[str]:
    """bf16 and fp16, and fp32 where it costs no long compilation, against fp64; watching changes no
    bit; two runs give the same bits."""
    bad: list[str] = []
    for dtype in (torch.bfloat16, torch.float16, *([torch.float32] if c.D == 64 else [])):
        bad += check(name, c, dtype)
    x = make_inputs(c)
    runs = []
    for stats in (False, True, False):
        out = ours(x, "triton", stats)
        out = out[0] if stats else out
        runs.append([out, *torch.autograd.grad(out, x.leaves(), x.d_out)])
    for other, what in ((runs[1], "watching changes bits"), (runs[2], "two runs differ")):
        if not all(map(torch.equal, runs[0], other)):
            bad.append(f"{name}: {what}")
    return bad


def check_logit_stats() -> list[str]:
    """The statistics alone, of all queries and of a sample, against fp64."""
    bad = []
    for name in ("causal", "window and sink", "documents"):
        x = make_inputs(SMALL[name])
        for sample in (None, 50):
            found, wanted = (
                qknorm.logit_stats(
                    q.detach(), k.detach(), q_gain=x.q_gain, k_gain=x.k_gain, rope=x.rope, mask=x.mask,
                    sink=x.sink, sample=sample,
                )
                for q, k in ((x.q, x.k), (x.q.double(), x.k.double()))
            )  # fmt: skip
            for value in ("max_logit", "entropy_nats", "sink_mass"):
                a, b = getattr(found, value), getattr(wanted, value)
                # q and k are rounded to bf16 after the norm.
                if b is not None and not float((a.double() - b).norm()) <= 1e-2 * float(b.norm()):
                    bad.append(f"logit_stats {name}, sample={sample}: {value} differs from fp64")
    return bad


def check_compose() -> list[str]:
    """With and without a sink against the reference."""
    bad = []
    for c in (SMALL["causal"], Case(B=2, T=256, Hq=4, Hk=2, D=64, sink=True)):
        x = make_inputs(c)
        results = []
        for backend in ("compose", "reference"):
            out = ours(x, backend, False)
            results.append([out, *torch.autograd.grad(out, x.leaves(), x.d_out)])
        for a, b in zip(*results, strict=True):
            if not float((a.double() - b.double()).norm()) <= 2e-2 * float(b.double().norm()) + 1e-6:
                bad.append(f"compose, sink={c.sink}: differs from the reference")
    return bad


def graph_capture() -> list[str]:
    """Forward with statistics inside a CUDA graph."""
    x = make_inputs(SMALL["window and sink"])
    with torch.no_grad():
        wanted, stats = ours(x, "triton", True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, found = ours(x, "triton", True)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(out, wanted) and torch.equal(found.max_logit, stats.max_logit)
    return [] if same else ["a CUDA graph does not replay"]


def failures() -> list[str]:
    """One line per thing that is wrong; empty if all is right."""
    found: list[str] = []
    for name, c in SMALL.items():
        found += _attempt(f"{name}: ", lambda name=name, c=c: conformance(name, c))
    found += _attempt("logit_stats: ", check_logit_stats)
    found += _attempt("compose: ", check_compose)
    return found + _attempt("graph: ", graph_capture)


def _attempt(what: str, run: Callable[[], list[str]]) -> list[str]:
    """Failures of a check; an exception is one, and loses nothing else."""
    try:
        return run()
    except Exception as error:
        return [f"{what}{type(error).__name__}: {str(error)[:300]}"]


def main() -> int:
    """The command."""
    if not torch.cuda.is_available():
        print("error: no CUDA device: this script runs on an NVIDIA GPU", file=sys.stderr)
        return 2
    found = failures()
    print("\n".join(found) or "bf16, fp16 and fp32 agree with fp64")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Norm + RoPE + attention on the CPU: ours against what PyTorch offers, interleaved in one process.

    python benchmarks/cpu_attention.py [--quick] [--json] [--case C1 ...]

Correctness first: every peer and ours are compared with the reference, and a case whose results
differ prints no ratio. Then each is timed in turn, in an order drawn
anew, many rounds; a ratio is the median over rounds of
peer / ours, with its quartiles. Peers:

  a  eager RMSNorm + RoPE + F.scaled_dot_product_attention
  b  the same under torch.compile
  c  b, and the statistics: entropy by the V := K identity, maximum by a chunked product
  d  FlexAttention with its block mask, forward only (it has no backward on CPU)
  e  F.scaled_dot_product_attention alone, against our attention alone
  docs  a loop over documents of b (C5 only)
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qknorm
from qknorm import Mask, Rope
from qknorm.lab.environment import describe
from qknorm.nn import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape. `flops` counts what the mask leaves of QK^T and PV."""

    B: int
    T: int
    Hq: int
    Hk: int
    D: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    documents: int | None = None

    @property
    def mask(self) -> Mask:
        ids = None
        if self.documents is not None:
            ids = (torch.arange(self.T) // self.documents).expand(self.B, -1).contiguous()
        return Mask(causal=True, window=self.window, documents=ids)

    @property
    def flops(self) -> float:
        pairs = self.mask.visible(self.T, self.T, torch.device("cpu"))[:1].sum().item()
        return 4.0 * self.B * self.Hq * self.D * pairs


CASES = {
    "C1": Case(B=1, T=1024, Hq=8, Hk=8, D=64),
    "C2": Case(B=1, T=2048, Hq=8, Hk=2, D=64),
    "C3": Case(B=1, T=2048, Hq=8, Hk=2, D=128),
    "C4": Case(B=1, T=4096, Hq=8, Hk=2, D=128, window=512),
    "C5": Case(B=1, T=8192, Hq=8, Hk=2, D=64, documents=512),
    "C6": Case(B=16, T=128, Hq=4, Hk=4, D=32, dtype=torch.float32),
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Leaves of one case, the table, and what flows back."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_gain: Tensor
    k_gain: Tensor
    rope: Rope
    d_out: Tensor


def make_inputs(c: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return Inputs(
        q=leaf(c.B, c.Hq, c.T, c.D),
        k=leaf(c.B, c.Hk, c.T, c.D),
        v=leaf(c.B, c.Hk, c.T, c.D),
        q_gain=leaf(c.Hq, c.D, dtype=torch.float32),
        k_gain=leaf(c.Hk, c.D, dtype=torch.float32),
        rope=RotaryEmbedding(c.D, layout="half")(c.T),
        d_out=torch.randn(c.B, c.Hq, c.T, c.D, generator=generator).to(c.dtype),
    )


def norm_rope(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What people write: fp32 RMSNorm per head, rotation in fp32, one rounding."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gain[:, None]
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=True
    )


def peer_a(x: Inputs, bias: Tensor | None) -> Tensor:
    cos, sin = x.rope.cos, x.rope.sin
    return sdpa(norm_rope(x.q, x.q_gain, cos, sin), norm_rope(x.k, x.k_gain, cos, sin), x.v, bias)


def chunked_max(q: Tensor, k: Tensor, mask: Mask, rows: int = 256) -> Tensor:
    """Largest visible logit per head, a block of rows at a time."""
    T, D, G = q.shape[2], q.shape[3], q.shape[1] // k.shape[1]
    k = k.repeat_interleave(G, 1)
    best = []
    for lo in range(0, T, rows):
        hi = min(lo + rows, T)
        first = max(0, lo - mask.window + 1) if mask.window else 0
        s = (q[:, :, lo:hi] @ k[:, :, first:hi].mT).float() * D**-0.5
        seen = mask.visible(T, T, q.device, (lo, hi), (first, hi))[:, None]
        best.append(s.masked_fill(~seen, -torch.inf).amax((0, 2, 3)))
    return torch.stack(best).amax(0)


def make_calls(c: Case, x: Inputs) -> dict[str, Callable[[], Any]]:
    """Name to forward call. "ours" forms come with the peers that they are held against."""
    mask = c.mask
    bias = None
    if c.window is not None or c.documents is not None:
        seen = mask.visible(c.T, c.T, torch.device("cpu"))[:, None]
        bias = torch.zeros(seen.shape, dtype=c.dtype).masked_fill_(~seen, -torch.inf)
    torch._dynamo.reset()  # each case is compiled for itself
    compiled = torch.compile(peer_a, dynamic=False)
    gains = {"q_gain": x.q_gain, "k_gain": x.k_gain, "rope": x.rope, "mask": mask}

    def peer_c() -> Tensor:
        out = compiled(x, bias)
        with torch.no_grad():
            q, k = qknorm.qk_norm_rope(x.q, x.k, q_gain=x.q_gain, k_gain=x.k_gain, rope=x.rope)
            pk, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, k, 0.0, bias is None, attn_mask=bias, scale=c.D**-0.5
            )
            (lse - c.D**-0.5 * (q.float() * pk.float()).sum(-1)).mean((0, 2))
            chunked_max(q, k, mask)
        return out

    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: qknorm.attention(x.q, x.k, x.v, **gains, backend="cpu"),
        "ours+stats": lambda: qknorm.attention(x.q, x.k, x.v, **gains, stats=True, backend="cpu"),
        "ours alone": lambda: qknorm.attention(x.q, x.k, x.v, mask=mask, backend="cpu"),
        "a": lambda: peer_a(x, bias),
        "b": lambda: compiled(x, bias),
        "c": peer_c,
        "e": lambda: sdpa(x.q, x.k, x.v, bias),
    }
    flex = make_flex(c, x)
    if flex is not None:
        calls["d"] = flex
    if c.documents is not None:
        calls["docs"] = make_loop(c, x)
    return calls


def make_loop(c: Case, x: Inputs) -> Callable[[], Tensor]:
    """b over each document by itself."""
    assert c.documents is not None
    one = torch.compile(peer_a, dynamic=False)

    def call() -> Tensor:
        outs = []
        for lo in range(0, c.T, c.documents or c.T):
            rows = slice(lo, lo + (c.documents or c.T))
            table = Rope(x.rope.cos[rows], x.rope.sin[rows], "half")
            part = Inputs(
                q=x.q[:, :, rows],
                k=x.k[:, :, rows],
                v=x.v[:, :, rows],
                q_gain=x.q_gain,
                k_gain=x.k_gain,
                rope=table,
                d_out=x.d_out,
            )
            outs.append(one(part, None))
        return torch.cat(outs, 2)

    return call


def make_flex(c: Case, x: Inputs) -> Callable[[], Tensor] | None:
    """FlexAttention forward, or None where it does not run."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    W, doc = c.window or c.T, c.documents or c.T

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < W) & (q // doc == k // doc)

    try:
        blocks = create_block_mask(visible, None, None, c.T, c.T, device="cpu")
        flex = torch.compile(flex_attention, dynamic=False)

        def call() -> Tensor:
            cos, sin = x.rope.cos, x.rope.sin
            with torch.no_grad():
                q = norm_rope(x.q.detach(), x.q_gain, cos, sin)
                k = norm_rope(x.k.detach(), x.k_gain, cos, sin)
                v = x.v.detach()
                return flex(q, k, v, block_mask=blocks, enable_gqa=c.Hq != c.Hk)

        call()
    except Exception as error:  # whatever it raises, it is no peer here
        reason = str(error).splitlines()[0][:80]
        print(f"FlexAttention does not run: {reason}", file=sys.stderr)
        return None
    return call


def gate(c: Case, x: Inputs, calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Names whose output or gradients stray from the reference by more than three times what peer a
    strays; they get no ratio."""
    small = [x.q, x.k, x.v, x.q_gain, x.k_gain]

    def results(out: Tensor) -> list[Tensor]:
        if not out.requires_grad:
            return [out]
        grads = torch.autograd.grad(out, small, x.d_out, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]

    gains = {"q_gain": x.q_gain, "k_gain": x.k_gain, "rope": x.rope}
    truth = results(
        qknorm.attention(
            *(t.double() for t in (x.q, x.k, x.v)), **gains, mask=c.mask, backend="stock"
        ).to(c.dtype)
    )
    yard = [
        float((a.double() - b.double()).norm())
        for a, b in zip(results(calls["a"]()), truth, strict=True)
    ]
    bad = []
    for name in ("ours", "ours+stats", "b", "d", "docs"):
        if name not in calls:
            continue
        out = calls[name]()
        found = results(out[0] if isinstance(out, tuple) else out)
        for one, wanted, allowed in zip(found, truth, yard, strict=False):
            if not float((one.double() - wanted.double()).norm()) <= 3 * allowed + 1e-4:
                bad.append(name)
                break
    return bad


def time_rounds(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, round after round, until the time is spent; at least five rounds. The order
    within a round is drawn anew, since a call runs on the caches that the one before it left."""
    order = list(calls.items())
    draw = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began = time.perf_counter()
    while len(times["ours"]) < 5 or time.perf_counter() - began < seconds:
        draw.shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def gemm_peak(dtype: torch.dtype) -> float:
    """GF/s of the machine's own matrix product."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    a @ b
    best = min(_seconds(lambda: a @ b) for _ in range(8))
    return 2 * 2048**3 / best / 1e9


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


AGAINST = {"a": "ours", "b": "ours", "c": "ours+stats", "d": "ours", "e": "ours alone", "docs": "ours"}


def run_case(name: str, c: Case, *, quick: bool, peak: float) -> list[dict[str, Any]]:
    x = make_inputs(c)
    calls = make_calls(c, x)
    bad = gate(c, x, calls)
    if quick:
        calls = {k: v for k, v in calls.items() if k in ("ours", "ours+stats", "b")}
    rows = []
    for step in ("forward", "forward+backward"):
        steps = dict(calls)
        if step == "forward+backward":
            steps.pop("d", None)

            def both(call: Callable[[], Any]) -> Callable[[], None]:
                def run() -> None:
                    out = call()
                    (out[0] if isinstance(out, tuple) else out).backward(x.d_out)
                    for t in (x.q, x.k, x.v, x.q_gain, x.k_gain):
                        t.grad = None

                return run

            steps = {k: both(v) for k, v in steps.items()}
        else:

            def still(call: Callable[[], Any]) -> Callable[[], None]:
                def run() -> None:
                    with torch.no_grad():
                        call()

                return run

            steps = {k: still(v) for k, v in steps.items()}
        times = time_rounds(steps, 1.0 if quick else 6.0)
        flops = c.flops * (1 if step == "forward" else 3.5)
        for peer in times:
            mine = AGAINST.get(peer)
            row: dict[str, Any] = {
                "case": name,
                "step": step,
                "peer": peer,
                "ms": 1e3 * statistics.median(times[peer]),
            }
            if mine is None:
                gflops = flops / statistics.median(times[peer]) / 1e9
                row |= {"gf_per_s": gflops, "share_of_gemm": gflops / peak}
                if peer == "ours+stats":
                    row |= _ratio(times["ours+stats"], times["ours"])
            elif mine in times:
                row |= {"ours_ms": 1e3 * statistics.median(times[mine])}
                row |= {"wrong": True} if {peer, mine} & set(bad) else _ratio(times[peer], times[mine])
            rows.append(row)
    return rows


def _ratio(peer: list[float], ours: list[float]) -> dict[str, Any]:
    ratios = [p / o for p, o in zip(peer, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "quartiles": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="peer b only, short rounds")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--case", action="append", choices=CASES, help="repeat; all by default")
    args = parser.parse_args()
    peaks = {t: gemm_peak(t) for t in (torch.bfloat16, torch.float32)}
    rows = []
    for name in args.case or CASES:
        found = run_case(name, CASES[name], quick=args.quick, peak=peaks[CASES[name].dtype])
        rows += found
        if not args.json:
            for r in found:
                print(_line(r), flush=True)
    if args.json:
        peak = {str(t).removeprefix("torch."): v for t, v in peaks.items()}
        print(json.dumps({"environment": describe(), "gemm_gf_per_s": peak, "rows": rows}, indent=2))
    else:
        print({str(t): round(v) for t, v in peaks.items()}, "GF/s of the machine's own GEMM")


def _line(r: dict[str, Any]) -> str:
    text = f"{r['case']} {r['step']:17} {r['peer']:11} {r['ms']:9.2f} ms"
    if "ours_ms" in r:
        text += f"  ours {r['ours_ms']:9.2f} ms"
    if "ratio" in r:
        text += f"  ratio {r['ratio']:6.2f} ({r['quartiles'][0]:.2f} to {r['quartiles'][1]:.2f})"
    if "gf_per_s" in r:
        text += f"  {r['gf_per_s']:7.0f} GF/s, {r['share_of_gemm']:.0%} of GEMM"
    return text + ("  RESULTS DIFFER: no ratio" if r.get("wrong") else "")


if __name__ == "__main__":
    main()

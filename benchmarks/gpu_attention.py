"""Norm + RoPE + attention on an NVIDIA GPU: ours against what PyTorch offers, in one process.

    python benchmarks/gpu_attention.py [--case G1 ...] [--seconds 440] [--out FILE.json]

First the whole operator in bf16 and fp16 against the reference in fp64, out, every gradient and every
statistic; then the cases, each gated by its own comparison: what differs prints no ratio. Peers:

  cudnn    compiled RMSNorm + RoPE, then F.scaled_dot_product_attention by cuDNN alone
  default  the same by whatever kernel PyTorch chooses
  flex     the same, then FlexAttention with AuxRequest(lse, max_scores)

Ours: "triton", "triton+stats" (max logit and entropy), "compose" where it serves. A window,
documents and sinks are nothing that F.scaled_dot_product_attention takes without a T x T mask: there
the peer is flex. At the end a training step of 12 layers, 768 wide, under four forms of the norm.

Work stops when the seconds are spent; what was left out is named in the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import qknorm
from qknorm import Mask, Rope
from qknorm.lab.environment import describe
from qknorm.nn import RotaryEmbedding

DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of docs/performance.md; bf16, causal."""

    B: int
    T: int
    Hq: int
    Hk: int
    D: int
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


CASES = {
    "G1": Case(B=4, T=4096, Hq=32, Hk=8, D=128),
    "G2": Case(B=8, T=2048, Hq=16, Hk=8, D=128),
    "G3": Case(B=1, T=16_384, Hq=32, Hk=4, D=128),
    "G4": Case(B=2, T=8192, Hq=64, Hk=8, D=64, window=128, sink=True),
    "G4b": Case(B=2, T=8192, Hq=64, Hk=8, D=64, sink=True),
    "G5": Case(B=16, T=1024, Hq=12, Hk=12, D=64),
    "G6": Case(B=2, T=4096, Hq=8, Hk=4, D=256, window=1024),
    "G7": Case(B=4, T=4096, Hq=48, Hk=48, D=128),
    "G8": Case(B=1, T=32_768, Hq=32, Hk=8, D=128, documents=True),
}
# Forward ratios peer / ours that the project aims at: against every peer, or against the fastest.
TARGETS = {"G4": 1.3, "G5": 1.3, "G2": 1.0, "G1": 0.85, "G3": 0.85, "G7": 0.85}


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

    rope = RotaryEmbedding(c.D, layout="half")(c.T)
    return Inputs(
        q=leaf(c.B, c.Hq, c.T, c.D),
        k=leaf(c.B, c.Hk, c.T, c.D),
        v=leaf(c.B, c.Hk, c.T, c.D),
        q_gain=(torch.rand(c.Hq, c.D, device=DEVICE) + 0.5).requires_grad_(),
        k_gain=(torch.rand(c.Hk, c.D, device=DEVICE) + 0.5).requires_grad_(),
        sink=leaf(c.Hq, dtype=torch.float32) if c.sink else None,
        rope=Rope(rope.cos.to(DEVICE), rope.sin.to(DEVICE), rope.layout),
        mask=c.mask(),
        d_out=torch.randn(c.B, c.Hq, c.T, c.D, device=DEVICE, dtype=dtype),
    )


# -- correctness


def check(name: str, c: Case, dtype: torch.dtype, stats: bool) -> list[str]:
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
        if stats:
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
}


def conformance(name: str, c: Case) -> list[str]:
    """bf16 and fp16 against fp64; watching changes no bit; two runs give the same bits."""
    bad: list[str] = []
    for dtype in (torch.bfloat16, torch.float16):
        bad += check(name, c, dtype, stats=True)
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


# -- what is timed


def ours(x: Inputs, backend: str, stats: bool) -> Any:
    return qknorm.attention(
        x.q, x.k, x.v, q_gain=x.q_gain, k_gain=x.k_gain, rope=x.rope, mask=x.mask, sink=x.sink,
        stats=stats, backend=backend,
    )  # fmt: skip


def norm_rope(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What people write: fp32 RMSNorm per head, rotation in fp32, one rounding."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gain[:, None]
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def make_calls(c: Case, x: Inputs) -> dict[str, Callable[[], Any]]:
    """Forward calls by name; each returns out, or out and more."""
    torch._dynamo.reset()
    prepare = torch.compile(norm_rope, dynamic=False)

    def qk() -> tuple[Tensor, Tensor]:
        cos, sin = x.rope.cos, x.rope.sin
        return prepare(x.q, x.q_gain, cos, sin), prepare(x.k, x.k_gain, cos, sin)

    calls: dict[str, Callable[[], Any]] = {
        "triton": lambda: ours(x, "triton", False),
        "triton+stats": lambda: ours(x, "triton", True),
    }
    dense = c.window is None and not c.documents
    if dense:
        calls["compose"] = lambda: ours(x, "compose", False)
    if dense and not c.sink:

        def sdpa(backends: list[SDPBackend] | None) -> Tensor:
            q, k = qk()
            with sdpa_kernel(backends) if backends else contextlib.nullcontext():
                return F.scaled_dot_product_attention(q, k, x.v, is_causal=True, enable_gqa=c.Hq != c.Hk)

        calls["cudnn"] = lambda: sdpa([SDPBackend.CUDNN_ATTENTION])
        calls["default"] = lambda: sdpa(None)
    calls["flex"] = make_flex(c, x, qk)
    return calls


def make_flex(c: Case, x: Inputs, qk: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], Any]:
    """FlexAttention with the maximum of each row, and a sink by its log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    window, ids = c.window or c.T, x.mask.documents

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (q - k < window)
        return seen if ids is None else seen & (ids[0, q] == ids[0, k])

    blocks = create_block_mask(visible, None, None, c.T, c.T, device=DEVICE)
    flex = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        q, k = qk()
        out, aux = flex(
            q, k, x.v, block_mask=blocks, enable_gqa=c.Hq != c.Hk,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        if x.sink is not None:
            out = out * torch.sigmoid(aux.lse - x.sink[:, None])[..., None].to(out.dtype)
        return out, aux.max_scores.amax((0, 2))

    return call


def _out(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def gate(x: Inputs, calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Calls that fail, or of whose out a row differs from that of a peer by more than 3 %, and why."""
    outs, bad = {}, {}
    for name, call in calls.items():
        try:
            with torch.no_grad():
                outs[name] = _out(call()).float()
        except Exception as error:  # a peer that does not run here is left out by name
            bad[name] = f"{type(error).__name__}: {str(error)[:160]}"
    peer = next((name for name in ("cudnn", "default", "flex") if name in outs), None)
    for name, out in outs.items():
        if peer is None:
            bad[name] = "no peer ran to compare it with"
        elif name != peer:
            size = outs[peer].norm(dim=-1).amax()
            apart = float((out - outs[peer]).norm(dim=-1).amax() / size)
            if not apart <= 3e-2:
                bad[name] = f"a row differs from {peer} by {apart:.1e} of the largest"
    return bad


def time_rounds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call by CUDA events, in an order drawn anew each round."""
    for call in calls.values():
        for _ in range(2):
            call()
    draw, order = random.Random(0), list(calls.items())
    times: dict[str, list[float]] = {name: [] for name in calls}
    cold = torch.empty(
        64 << 20, dtype=torch.int32, device=DEVICE
    )  # as large as the L2 cache, several times
    for _ in range(rounds):
        draw.shuffle(order)
        for name, call in order:
            cold.zero_()
            torch.cuda._sleep(
                1_000_000
            )  # the launches below overtake the device: kernels are timed alone
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return times


def ratios(times: dict[str, list[float]], ours_name: str) -> dict[str, list[float]]:
    """Quartiles over rounds of peer / ours."""
    found = {}
    for name, values in times.items():
        if name != ours_name:
            pairs = [a / b for a, b in zip(values, times[ours_name], strict=True)]
            found[name] = [round(q, 3) for q in statistics.quantiles(pairs, n=4)]
    return found


def run_case(name: str, c: Case, rounds: int) -> dict[str, Any]:
    x = make_inputs(c)
    calls = make_calls(c, x)
    left_out = gate(x, calls)
    calls = {n: call for n, call in calls.items() if n not in left_out}
    row: dict[str, Any] = {"case": name, "left_out": left_out, "target": TARGETS.get(name)}
    if "triton" not in calls:
        return row

    def still(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                call()

        return run

    def both(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(_out(call()), x.leaves(), x.d_out, allow_unused=True)

        return run

    for step, wrap in (("forward", still), ("forward+backward", both)):
        try:
            times = time_rounds({n: wrap(call) for n, call in calls.items()}, rounds)
        except Exception as error:  # the forward's figures must survive a backward that fails
            left_out[step] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        row[step] = {
            "ms": {n: round(statistics.median(v), 4) for n, v in times.items()},
            "peer_over_triton": ratios(times, "triton"),
        }
    return row


# -- a training step


class Block(nn.Module):
    """Pre-norm attention and MLP, 768 wide, 12 heads; the form of the QK-norm is the argument."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norms = nn.ModuleList(nn.RMSNorm(768) for _ in range(2))
        self.qkv, self.proj = nn.Linear(768, 3 * 768, bias=False), nn.Linear(768, 768, bias=False)
        self.up, self.down = nn.Linear(768, 3072, bias=False), nn.Linear(3072, 768, bias=False)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(12, 64)) for _ in range(2))

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (12, 64)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        q_gain, k_gain = self.gains
        if self.form == "fused":
            out = qknorm.attention(q, k, v, q_gain=q_gain, k_gain=k_gain, rope=rope, backend="triton")
        else:
            cos, sin = rope.cos, rope.sin
            if self.form == "none":
                ones = torch.ones_like(q_gain)
                q, k = (rotate_only(t, ones, cos, sin) for t in (q, k))
            else:
                q, k = norm_rope(q, q_gain, cos, sin), norm_rope(k, k_gain, cos, sin)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def rotate_only(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def training_step(rounds: int) -> dict[str, Any]:
    """One forward and backward of 12 blocks at B = 16, T = 1024 in bf16. "none", "compiled" and "fused"
    are compiled, "eager" is not; the cost of the norm is fused / none."""
    table = RotaryEmbedding(64, layout="half")(1024)
    rope = Rope(table.cos.to(DEVICE), table.sin.to(DEVICE), "half")
    x = torch.randn(16, 1024, 768, device=DEVICE, dtype=torch.bfloat16)
    calls = {}
    for name in ("none", "eager", "compiled", "fused"):
        blocks = nn.ModuleList(Block(name) for _ in range(12)).to(DEVICE)

        def step(blocks: nn.ModuleList = blocks) -> Tensor:
            y = x
            for block in blocks:
                y = block(y, rope)
            return y.float().square().mean()

        forward = step if name == "eager" else torch.compile(step)

        def call(forward: Callable[[], Tensor] = forward, blocks: nn.ModuleList = blocks) -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward()
            loss.backward()
            blocks.zero_grad(set_to_none=True)

        calls[name] = call
    times = time_rounds(calls, rounds)
    return {
        "ms": {n: round(statistics.median(v), 3) for n, v in times.items()},
        "over_none": ratios(times, "none"),
        "target": "fused / none <= 1.02",
    }


def table(result: dict[str, Any]) -> str:
    lines = ["case  step              peer           peer / triton (quartiles)"]
    for row in result["cases"]:
        for step in ("forward", "forward+backward"):
            for peer, quartiles in row.get(step, {}).get("peer_over_triton", {}).items():
                lines.append(f"{row['case']:5s} {step:17s} {peer:14s} {quartiles}")
        lines += [f"{row['case']:5s} left out: {n}: {why}" for n, why in row["left_out"].items()]
    return "\n".join([*lines, f"training step: {result.get('training_step')}"])


def _attempt(what: str, run: Callable[[], list[str]]) -> list[str]:
    """Failures of a check; an exception is one, and loses nothing else."""
    try:
        return run()
    except Exception as error:
        return [f"{what}{type(error).__name__}: {str(error)[:300]}"]


def _blamed(row: dict[str, Any]) -> list[str]:
    """What was left out of ours."""
    mine = ("triton", "triton+stats", "compose")
    return [f"{row['case']} {n}: {why}" for n, why in row["left_out"].items() if n in mine]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only these")
    parser.add_argument("--seconds", type=float, default=440.0, help="when to stop")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device: this script measures on an NVIDIA GPU", file=sys.stderr)
        return 2
    began = time.monotonic()
    result: dict[str, Any] = {"environment": describe(), "cases": [], "not_run": []}
    result["environment"]["triton"] = triton.__version__

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    failures: list[str] = []
    result["conformance_failures"] = failures
    for name, c in SMALL.items():
        failures += _attempt(f"{name}: ", lambda name=name, c=c: conformance(name, c))
        save()
    failures += _attempt("compose: ", check_compose)
    failures += _attempt("graph: ", graph_capture)
    print("\n".join(failures) or "bf16 and fp16 agree with fp64", flush=True)
    save()
    for name in options.case or ["G4", "G5", "G2", "G1", "step", "G7", "G3", "G6", "G8", "G4b"]:
        if time.monotonic() - began > options.seconds - 60:
            result["not_run"].append(name)
            continue
        try:
            if name == "step":
                result["training_step"] = training_step(options.rounds)
            else:
                result["cases"].append(run_case(name, CASES[name], options.rounds))
                failures += _blamed(result["cases"][-1])
        except Exception as error:  # one case that fails must not lose the others
            why = f"{type(error).__name__}: {str(error)[:300]}"
            result["cases"].append({"case": name, "left_out": {"all": why}})
        torch.cuda.empty_cache()
        save()
    result["seconds"] = round(time.monotonic() - began, 1)
    save()
    print(table(result))
    return int(bool(result["conformance_failures"]))


if __name__ == "__main__":
    sys.exit(main())

"""Norm + RoPE + attention on an NVIDIA GPU: ours against what PyTorch offers, in one process.

    python benchmarks/gpu_attention.py [--case G1 ...] [--seconds 440] [--out FILE.json]

First gpu_conformance.py; then the cases, each gated by its own comparison: what differs prints no
ratio. Peers:

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
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpu_conformance
import qknorm
from gpu_conformance import DEVICE, Case, Inputs, make_inputs, ours
from qknorm import Rope
from qknorm.lab.environment import describe
from qknorm.nn import RotaryEmbedding

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


# -- what is timed


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

    failures = result["conformance_failures"] = gpu_conformance.failures()
    print("\n".join(failures) or "bf16, fp16 and fp32 agree with fp64", flush=True)
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

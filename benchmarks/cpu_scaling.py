"""How time and memory of the `cpu` backend grow with T, and decoding against a long cache.

    python benchmarks/cpu_scaling.py [--json] [--longest T]

Time: bf16, 8/2 heads of 64, forward and forward + backward, causal and with a window of 512.
Memory: peak of a fresh process above its inputs, forward + backward. Decoding: one query per head, and
sixteen, against T keys, beside F.scaled_dot_product_attention, whose results must agree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qknorm
from qknorm import Mask
from qknorm.lab.environment import describe

HQ, HK, D, WINDOW = 8, 2, 64, 512


def inputs(Tq: int, Tk: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def leaf(H: int, T: int) -> Tensor:
        return torch.randn(1, H, T, D, generator=generator).bfloat16().requires_grad_()

    return leaf(HQ, Tq), leaf(HK, Tk), leaf(HK, Tk)


def ours(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    gains = {"q_gain": torch.ones(HQ, D), "k_gain": torch.ones(HK, D)}
    return qknorm.attention(q, k, v, **gains, mask=Mask(causal=True, window=window), backend="cpu")


def median_ms(call: Callable[[], Any], seconds: float = 1.0) -> float:
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def time_of(T: int, window: int | None) -> tuple[float, float]:
    """Milliseconds of forward, and of forward + backward."""
    q, k, v = inputs(T, T)
    with torch.no_grad():
        forward = median_ms(lambda: ours(q, k, v, window))
    d_out = torch.ones_like(q)
    return forward, median_ms(lambda: torch.autograd.grad(ours(q, k, v, window), (q, k, v), d_out))


def peak_mb(T: int, window: int | None) -> float:
    """What forward + backward take above their inputs, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_mb, (T, window))


def _peak_mb(T: int, window: int | None) -> float:
    small = inputs(64, 64)
    torch.autograd.grad(ours(*small, window).sum(), small)  # what is loaded once
    q, k, v = inputs(T, T)
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    before = _high_water_kb()
    torch.autograd.grad(ours(q, k, v, window).sum(), (q, k, v))
    return (_high_water_kb() - before) / 1024


def _high_water_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def decode(T: int, Tq: int) -> dict[str, float]:
    """Medians over interleaved rounds, attention alone on both sides."""
    q, k, v = (x.detach() for x in inputs(Tq, T))
    seen = Mask(causal=True).visible(Tq, T, q.device)[:, None]

    def mine() -> Tensor:
        return qknorm.attention(q, k, v, mask=Mask(causal=True), backend="cpu")

    def peer() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    torch.testing.assert_close(mine(), peer(), atol=2e-2, rtol=2e-2)
    pairs = [(median_ms(mine, 0.05), median_ms(peer, 0.05)) for _ in range(15)]
    low, ratio, high = statistics.quantiles([p / m for m, p in pairs], n=4)
    milliseconds = statistics.median(m for m, _ in pairs)
    return {"T": T, "Tq": Tq, "ms": milliseconds, "sdpa_ratio": ratio, "low": low, "high": high}


def _growth_line(row: dict[str, Any]) -> str:
    T, forward = row["T"], row["forward_ms"]
    if row["window"] is None:
        name, per = "causal", f"{1e6 * forward / T**2:5.2f} ns per T^2"
    else:
        name, per = f"window {row['window']}", f"{1e3 * forward / T:5.2f} us per T"
    return (
        f"{name:11} T {T:6}  forward {forward:8.2f} ms ({per})  "
        f"forward+backward {row['both_ms']:8.2f} ms  "
        f"peak {row['peak_mb']:6.1f} MB ({1024 * row['peak_mb'] / T:.1f} KB per token)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--longest", type=int, default=16384)
    args = parser.parse_args()
    lengths = [2**n for n in range(9, 20) if 2**n <= args.longest]
    rows = []
    for window in (None, WINDOW):
        for T in lengths:
            forward, both = time_of(T, window)
            row = {"T": T, "window": window, "forward_ms": forward, "both_ms": both}
            rows.append(row | {"peak_mb": peak_mb(T, window)})
            if not args.json:
                print(_growth_line(rows[-1]), flush=True)
    decoded = []
    for Tq in (1, 16):
        for T in lengths[2:]:
            decoded.append(decode(T, Tq))
            if not args.json:
                d = decoded[-1]
                print(
                    f"decode {Tq:2} against {T:6}: {d['ms']:.3f} ms, SDPA / ours {d['sdpa_ratio']:.2f} "
                    f"({d['low']:.2f} to {d['high']:.2f})",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"environment": describe(), "growth": rows, "decode": decoded}, indent=2))


if __name__ == "__main__":
    main()

"""Why the statistics are a streamed pass and not the identity H = lse - scale * q . (P K).

The identity needs only a flash kernel called with V := K. This prints, for both, the error of the
row entropy against float64 and the time, at growing offsets common to all logits (which change no
probability). Both see the same q and k. No ratio is printed if the streamed pass is wrong.

    python benchmarks/entropy_identity.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import Tensor

from qknorm import Mask
from qknorm.lab.environment import describe
from qknorm.ops.logit_stats import rows_of

B, H, T, D = 1, 8, 1024, 64
SCALE = D**-0.5
ROUNDS = 15


def by_identity(q: Tensor, k: Tensor) -> Tensor:
    """Row entropy from the stock kernel's lse and P K."""
    pk, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True, scale=SCALE)
    return lse - SCALE * (q.float() * pk.float()).sum(-1)


def by_stream(q: Tensor, k: Tensor) -> Tensor:
    """Row entropy from the streamed pass, which also gives the maximum."""
    return rows_of(q, k, Mask(causal=True), SCALE, None).entropy_nats


def exact(q: Tensor, k: Tensor) -> Tensor:
    """Row entropy in float64 from the same rounded q and k."""
    s = SCALE * (q.double() @ k.double().mT)
    s = s.masked_fill(~Mask(causal=True).visible(T, T, q.device), -torch.inf)
    log_p = s.log_softmax(-1)
    return -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)


def problem(offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q and k whose logits have a common offset.

    Entries are multiples of 1/16, so that every logit is exact in fp32: what is measured is the
    entropy, not the rounding of the logits that both methods share.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, H, T, D, generator=generator).mul(16).round() / 16 for _ in range(2))
    q[..., 0] = 1.0
    k[..., 0] = offset / SCALE
    return q.to(dtype), k.to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    as_json = parser.parse_args().json
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for offset in (1.0, 30.0, 1000.0):
            q, k = problem(offset, dtype)
            truth = exact(q, k)
            errors = {f.__name__: float((f(q, k) - truth).abs().max()) for f in (by_identity, by_stream)}
            if errors["by_stream"] > 1e-4:
                raise SystemExit(f"the streamed pass is wrong by {errors['by_stream']:.1e}: no ratio")
            ratios = []
            for _ in range(ROUNDS):
                seconds = []
                for f in (by_stream, by_identity):
                    began = time.perf_counter()
                    f(q, k)
                    seconds.append(time.perf_counter() - began)
                ratios.append(seconds[0] / seconds[1])
            spread = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "offset": offset,
                    "identity_error_nats": errors["by_identity"],
                    "stream_error_nats": errors["by_stream"],
                    "time_ratio": statistics.median(ratios),
                    "time_ratio_quartiles": [spread[0], spread[2]],
                }
            )
    if as_json:
        print(json.dumps({"environment": describe(), "shape": [B, H, T, D], "rows": rows}, indent=2))
        return
    print(f"B, H, T, D = {B}, {H}, {T}, {D}, causal; {describe()['processor']}, {describe()['date']}")
    print("dtype     offset  identity error  streamed error  time streamed / identity (quartiles)")
    for r in rows:
        low, high = r["time_ratio_quartiles"]
        print(
            f"{r['dtype']:9} {r['offset']:6g}  {r['identity_error_nats']:14.1e}  "
            f"{r['stream_error_nats']:14.1e}  {r['time_ratio']:.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()

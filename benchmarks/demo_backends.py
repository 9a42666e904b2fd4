"""The demo, end to end, with the `cpu` backend and with `stock`: whole commands, in turn.

    python benchmarks/demo_backends.py [--rounds N] [--json]

Each round runs `qknorm compare` as `make demo` does, once for each backend, in an order that alternates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

from qknorm.lab.environment import describe

DEMO = ("--arm", "none", "--arm", "qk", "--lr", "3e-2")


def seconds(backend: str) -> float:
    with tempfile.TemporaryDirectory() as runs:
        arguments = ("compare", f"{runs}/demo", *DEMO, "--backend", backend)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "qknorm", *arguments], check=True, capture_output=True)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    times: dict[str, list[float]] = {"cpu": [], "stock": []}
    for i in range(args.rounds):
        for backend in ("cpu", "stock") if i % 2 == 0 else ("stock", "cpu"):
            times[backend].append(seconds(backend))
    ratios = [stock / cpu for cpu, stock in zip(times["cpu"], times["stock"], strict=True)]
    if args.json:
        print(
            json.dumps({"environment": describe(), "seconds": times, "stock_over_cpu": ratios}, indent=2)
        )
        return
    for backend, found in times.items():
        print(
            f"{backend:6} {statistics.median(found):6.1f} s   ({', '.join(f'{t:.1f}' for t in found)})"
        )
    print(f"stock / cpu: {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()

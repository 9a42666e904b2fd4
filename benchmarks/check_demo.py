"""Hold `runs/demo` against what `make demo` promises, and print the figures.

    make demo && .venv/bin/python benchmarks/check_demo.py [FOLDER]

Exit code 0 if the arm without the norm ends with a max logit over 10x that of the QK-norm arm, a
lower entropy and a higher loss, and summary.json holds the numbers of the logs; 1 if not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from qknorm.lab.runs import find_runs, load_runs


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    summary = {r["arm"]: r for r in json.loads((folder / "summary.json").read_text())}
    logs = {run.config["arm"]: run.final for run in load_runs(find_runs([folder]))}
    none, qk = summary["none"], summary["qk"]
    promises = {
        f"max logit {none['max_logit']:.0f} / {qk['max_logit']:.1f} = "
        f"{none['max_logit'] / qk['max_logit']:.0f}x, target > 10x": none["max_logit"]
        > 10 * qk["max_logit"],
        f"entropy {none['entropy_nats']:.4f} < {qk['entropy_nats']:.4f} nats": none["entropy_nats"]
        < qk["entropy_nats"],
        f"loss {none['final_loss']:.3f} > {qk['final_loss']:.3f} nats": none["final_loss"]
        > qk["final_loss"],
        "summary.json equals the last lines of the logs": all(
            log is not None and log[key] == summary[arm][key]
            for arm, log in logs.items()
            for key in ("final_loss", "max_logit", "entropy_nats", "diverged")
        ),
    }
    for promise, holds in promises.items():
        print(("holds   " if holds else "BROKEN  ") + promise)
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

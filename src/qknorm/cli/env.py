"""`qknorm env`."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from qknorm.cli import options as o
from qknorm.cli.console import out, print_json, say
from qknorm.lab.environment import describe
from qknorm.ops.backends import BACKENDS
from qknorm.ops.backends.call import Case

_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
}  # fmt: skip


def env(as_json: o.AsJson = False) -> int:
    """Print the versions, the machine, and which backend serves which device and dtype on it."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    served = [
        _row(f"{device} {name}", Case(device=device, dtype=dtype, head_dim=64, value_dim=64))
        for device in devices
        for name, dtype in _DTYPES.items()
    ]
    if as_json:
        print_json({"environment": describe(), "backends": served})
        return 0
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    for name, value in describe().items():
        table.add_row(name, "-" if value is None else str(value))
    out.print(table)
    out.print("\nBackends that serve heads of width 64, with every mask, sink and statistic:\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", *(row["case"] for row in served)):
        table.add_column(title)
    for name in BACKENDS:
        table.add_row(name, *("no" if row["backends"][name] else "yes" for row in served))
    table.add_row("auto", *(row["auto"] for row in served))
    out.print(table)
    out.print()
    for name, backend in BACKENDS.items():
        say(f"{name}: {backend.purpose}; {backend.memory}")
        for reason in dict.fromkeys(row["backends"][name] for row in served):
            if reason is not None:
                say(f"    no: {reason}", "dim")
    return 0


def _row(title: str, case: Case) -> dict[str, Any]:
    reasons = {name: backend.refuses(case) for name, backend in BACKENDS.items()}
    auto = next(name for name, reason in reasons.items() if reason is None)
    return {"case": title, "auto": auto, "backends": reasons}

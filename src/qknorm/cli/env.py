"""`qknorm env`."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from qknorm.cli import options as o
from qknorm.cli.console import out, print_json
from qknorm.lab.environment import describe
from qknorm.ops.backends import BACKENDS
from qknorm.ops.backends.call import Case

_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
}  # fmt: skip


def env(as_json: o.AsJson = False) -> int:
    """Print versions, the machine, and which backend serves which case here."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    served = [
        _row(f"{device} {name}", Case(device=device, dtype=dtype, head_dim=64, value_dim=64))
        for device in devices
        for name, dtype in _DTYPES.items()
    ]
    if as_json:
        print_json({"environment": describe(), "backends": served})
        return 0
    table = Table(title="Environment", show_header=False)
    for name, value in describe().items():
        table.add_row(name, "-" if value is None else str(value))
    out.print(table)
    table = Table(title="Backends (D = 64; every mask, sink and statistic)")
    table.add_column("case")
    for name in BACKENDS:
        table.add_column(name)
    table.add_column("auto")
    for row in served:
        cells = ["yes" if reason is None else f"no: {reason}" for reason in row["backends"].values()]
        table.add_row(row["case"], *cells, row["auto"])
    out.print(table)
    for backend in BACKENDS.values():
        out.print(f"{backend.name}: {backend.purpose}; {backend.memory}")
    return 0


def _row(title: str, case: Case) -> dict[str, Any]:
    reasons = {name: backend.refuses(case) for name, backend in BACKENDS.items()}
    auto = next(name for name, reason in reasons.items() if reason is None)
    return {"case": title, "auto": auto, "backends": reasons}

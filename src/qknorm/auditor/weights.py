"""What a file of weights says by itself: which norms there are, over what, and what their gains are.

Nothing runs, so nothing can be probed: names and shapes are all there is, and only what follows from
them is said. Order against RoPE, eps, precision, masks and paths need the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qknorm.auditor.findings import Finding, Report, checked_reasons, finding

# Names under which released checkpoints keep projections and norms, after the layer's own prefix.
SIDES = {"q": "(?:q|query|wq)", "k": "(?:k|key|wk)"}
PROJECTION = r"(?P<layer>.*?(?:layers|blocks|blk|h)\.\d+)\..*?\b{side}(?:_proj|_linear)?\.weight$"
NORM = r"(?P<layer>.*?(?:layers|blocks|blk|h)\.\d+)\..*?\b{side}_?(?:norm|layernorm|ln)\.weight$"
GGUF = {"q": r"(?P<layer>blk\.\d+)\.attn_q\.weight$", "k": r"(?P<layer>blk\.\d+)\.attn_k\.weight$"}
GGUF_NORM = {
    "q": r"(?P<layer>blk\.\d+)\.attn_q_norm\.weight$",
    "k": r"(?P<layer>blk\.\d+)\.attn_k_norm\.weight$",
}


@dataclass
class Layer:
    """What was found of one layer: rows of its projections, and gains."""

    rows: dict[str, int] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)


def audit_weights(path: Path, *, suppress: Mapping[str, str] | None = None) -> Report:
    """Audit a `.safetensors` or `.gguf` file; `suppress` as of `audit`.

    Raises ValueError if it is none, holds no attention, or an extra is missing.
    """
    reasons = checked_reasons(suppress)
    layers: dict[str, Layer] = {}
    for name, shape, read in _tensors(path):
        for side, word in SIDES.items():
            if m := _match(name, (NORM.format(side=word), GGUF_NORM[side])):
                layers.setdefault(m, Layer()).gains[side] = read().float()
            elif m := _match(name, (PROJECTION.format(side=word), GGUF[side])):
                layers.setdefault(m, Layer()).rows[side] = shape[0]
    layers = {name: layer for name, layer in layers.items() if layer.rows or layer.gains}
    if not layers:
        raise ValueError(f"{path} has no tensor that is called like a projection or norm of q or k")
    findings = [one for name, layer in layers.items() for one in _of_layer(name, layer)]
    return Report(
        findings=findings,
        formulas={},
        exercised=[f"names, shapes and gains of {len(layers)} layers in {path.name}"],
        not_probed=["order, eps, precision, masks, paths: a file of weights computes nothing"],
    ).suppressing(reasons)


def _match(name: str, patterns: tuple[str, ...]) -> str | None:
    for pattern in patterns:
        if m := re.match(pattern, name):
            return m["layer"]
    return None


def _of_layer(name: str, layer: Layer) -> Iterator[Finding]:
    if not layer.gains:
        yield finding("QK001", name, "no norm of q or k in the file")
        return
    missing = sorted({"q", "k"} - layer.gains.keys())
    if missing:
        yield finding(
            "QK016", name, f"a norm of {'q' if missing == ['k'] else 'k'} and none of {missing[0]}"
        )
    for side, gain in layer.gains.items():
        low, high = float(gain.min()), float(gain.max())
        if layer.rows.get(side) == gain.numel() and gain.dim() == 1 and _is_full(layer, side):
            yield finding("QK004", name, f"the gain of {side} is as wide as the whole projection")
        if low == high and (gain.numel() > 1 or low in (0.0, 1.0)):
            yield finding("QK020", name, f"every gain of {side} is stored as {low:g}", value=low)
        elif high < 0.2 and low >= 0:
            text = f"gains of {side} are between {low:.2g} and {high:.2g}: stored as 1 + w, or decayed"
            yield finding("QK010", name, text, low=low, high=high)


def _is_full(layer: Layer, side: str) -> bool:
    """Whether more than one head shares the width: q and k have norms of other widths, or one head each
    would be wider than any."""
    other = layer.gains.get("k" if side == "q" else "q")
    return gain_width(layer.gains[side]) > 512 or (
        other is not None and gain_width(other) != gain_width(layer.gains[side])
    )


def gain_width(gain: Tensor) -> int:
    """Of its last axis."""
    return gain.shape[-1]


def _tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ValueError("safetensors files need: pip install 'qknorm[transformers]'") from error
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name)
    elif path.suffix == ".gguf":
        try:
            import gguf
        except ImportError as error:
            raise ValueError("GGUF files need an extra: pip install 'qknorm[gguf]'") from error
        for tensor in gguf.GGUFReader(path).tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            yield tensor.name, shape, partial(_dequantized, tensor)
    else:
        raise ValueError(f"{path} is neither a .safetensors nor a .gguf file")


def _dequantized(tensor: Any) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

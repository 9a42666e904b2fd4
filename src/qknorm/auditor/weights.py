"""What a file of weights says by itself: which norms there are, over what, and what their gains are.

Nothing runs, so nothing can be probed: names and shapes are all there is, and only what follows from
them is said. Order against RoPE, eps, precision, masks and paths need the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qknorm.auditor import thresholds as at
from qknorm.auditor.expected import parse
from qknorm.auditor.findings import Finding, Report, checked_reasons, finding
from qknorm.auditor.guard import TargetError, reading

# Names under which released checkpoints keep projections and norms, after the layer's own prefix.
SIDES = {"q": "(?:q|query|wq|attn_q)", "k": "(?:k|key|wk|attn_k)"}
LAYER = r"(?P<layer>.*?(?:layers|blocks|blk|h)\.(?P<number>\d+))\..*?\b"
PROJECTION = LAYER + r"{side}(?:_proj|_linear)?\.weight$"
NORM = LAYER + r"{side}_?(?:norm|layernorm|ln)\.weight$"
FUSED = LAYER + r"(?:qkv|qkv_proj|c_attn|Wqkv|query_key_value|attn_qkv|in_proj(?=_))[._]weight$"
PART = r"(.*)-(\d{5})-of-(\d{5})(\.safetensors|\.gguf)"


@dataclass
class Layer:
    """What was found of one layer: rows of its projections, and gains."""

    rows: dict[str, int] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)


def audit_weights(
    path: Path,
    *,
    expect: Mapping[str, object] | None = None,
    suppress: Mapping[str, str] | None = None,
) -> Report:
    """Audit a `.safetensors` or `.gguf` file, or all parts of a model; the rest as of `audit`.

    Raises ValueError if it is none, holds no attention, or an extra is missing.
    """
    reasons, expected = checked_reasons(suppress), parse(expect or {})
    files = files_of(path)
    layers: dict[str, Layer] = {}
    for file in files:
        with reading(file):
            for name, shape, read in tensors_of(file, parts=len(files)):
                if m := re.match(FUSED, name):
                    layers.setdefault(m["layer"], Layer()).rows |= {"q": 0, "k": 0}
                elif found := _match(NORM, name):
                    layers.setdefault(found[0]["layer"], Layer()).gains[found[1]] = read().float()
                elif found := _match(PROJECTION, name):
                    layers.setdefault(found[0]["layer"], Layer()).rows[found[1]] = shape[0]
    layers = {name: layer for name, layer in layers.items() if layer.rows or layer.gains}
    if not layers:
        raise TargetError(f"{path} has no tensor that is called like a projection or norm of q or k")
    findings = [one for name, layer in layers.items() for one in _of_layer(name, layer)]
    names = " and ".join(file.name for file in files)
    return Report(
        findings=findings,
        formulas={},
        exercised=[f"names, shapes and gains of {len(layers)} layers in {names}"],
        not_probed=[
            f"{what}: a file of weights computes nothing"
            for what in ("order, eps, precision, masks, paths", *map("expected {}".format, expected))
        ],
    ).suppressing(reasons)


def _match(pattern: str, name: str) -> tuple[re.Match[str], str] | None:
    """The match, and the side for which it is one."""
    for side, word in SIDES.items():
        if m := re.match(pattern.format(side=word), name):
            return m, side
    return None


def norm_of(name: str) -> tuple[str, str] | None:
    """Layer and side of the norm whose gain is called so."""
    found = _match(NORM, name)
    return None if found is None else (found[0]["number"], found[1])


def files_of(path: Path) -> list[Path]:
    """The file, or all files of a model of which it is a part or the index.

    Raises ValueError if some are not there: what one part does not hold, another may.
    """
    names = [path.name]
    indices = [path] if path.name.endswith(".index.json") else list(path.parent.glob("*.index.json"))
    for index in indices:
        with reading(index):
            listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if index == path or path.name in listed:
            names = listed
    if m := re.fullmatch(PART, path.name):
        names = [f"{m[1]}-{n:05}-of-{m[3]}{m[4]}" for n in range(1, int(m[3]) + 1)]
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        others = f" and {len(absent) - 1} more" * (len(absent) > 1)
        raise TargetError(f"{path} is a part of a model, not audited without {absent[0]}{others}")
    return [path.parent / name for name in names]


def _of_layer(name: str, layer: Layer) -> Iterator[Finding]:
    if not layer.gains:
        yield finding("QK001", name, "no norm of q or k in the file")
        return
    # A layer that has no projection of k takes its keys from another.
    missing = sorted({"q", "k"} - layer.gains.keys())
    if missing and missing[0] in layer.rows:
        yield finding(
            "QK016", name, f"a norm of {'q' if missing == ['k'] else 'k'} and none of {missing[0]}"
        )
    for side, gain in layer.gains.items():
        low, high = float(gain.min()), float(gain.max())
        if layer.rows.get(side) == gain.numel() and gain.dim() == 1 and _is_full(layer, side):
            yield finding("QK004", name, f"the gain of {side} is as wide as the whole projection")
        if low == high and (gain.numel() > 1 or low in (0.0, 1.0)):
            yield finding("QK020", name, f"every gain of {side} is stored as {low:g}", value=low)
        elif high < at.DECAYED and low >= 0:
            text = f"gains of {side} are between {low:.2g} and {high:.2g}: stored as 1 + w, or decayed"
            yield finding("QK010", name, text, low=low, high=high)


def _is_full(layer: Layer, side: str) -> bool:
    """Whether more than one head shares the width: q and k have norms of other widths, or one head each
    would be wider than any."""
    own = layer.gains[side].shape[-1]
    other = layer.gains.get("k" if side == "q" else "q")
    return own > at.WIDEST or (other is not None and other.shape[-1] != own)


def tensors_of(
    path: Path, *, parts: int = 1
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """Name, shape and reader of each tensor of a file."""
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise TargetError("safetensors files need: pip install 'qknorm[transformers]'") from error
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name)
    elif path.suffix == ".gguf":
        try:
            import gguf
        except ImportError as error:
            raise TargetError("GGUF files need an extra: pip install 'qknorm[gguf]'") from error
        reader = gguf.GGUFReader(path)
        count = reader.fields.get("split.count")
        if count is not None and int(count.contents()) not in (0, parts):
            raise TargetError(f"{path} is one of {count.contents()} parts, which its name does not tell")
        for tensor in reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            yield tensor.name, shape, partial(_dequantized, tensor)
    else:
        raise TargetError(f"{path} is neither a .safetensors nor a .gguf file")


def _dequantized(tensor: Any) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

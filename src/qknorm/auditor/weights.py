"""Audit a file of weights without the model: which norms it has, their statistic, and their gains.

Only names, shapes and values can be checked, because nothing runs. The order of gain and RoPE, eps,
precision, masks and paths need the model.
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

# Names of projections and norms in released checkpoints, which follow the prefix of the layer.
SIDES = {"q": "(?:q|query|wq|attn_q)", "k": "(?:k|key|wk|attn_k)"}
LAYER = r"(?P<layer>.*?(?:layers|blocks|blk|h)\.(?P<number>\d+))\..*?\b"
PROJECTION = LAYER + r"{which}(?:_proj|_linear)?\.weight$"
NORM = LAYER + r"{which}_?(?:norm|layernorm|ln)\.weight$"
FUSED = LAYER + r"(?:qkv|qkv_proj|c_attn|Wqkv|query_key_value|attn_qkv|in_proj(?=_))[._]weight$"
PART = r"(.*)-(\d{5})-of-(\d{5})(\.safetensors|\.gguf)"


@dataclass
class Layer:
    """The tensors of one layer that matter here.

    Attributes:
        rows: the number of rows of the projection of "q" and of "k"; 0 for a fused one.
        gains: the gain of "q" and of "k", fp32.
    """

    rows: dict[str, int] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)


def audit_weights(
    path: Path,
    *,
    expect: Mapping[str, object] | None = None,
    suppress: Mapping[str, str] | None = None,
) -> Report:
    """Audit a `.safetensors` or `.gguf` file, or all files of a model that was split into several.

    Args:
        path: the file, one of the files, or their index.
        expect: the expected formula, as for `audit`. It is checked for errors only, and each entry is
            listed as not probed.
        suppress: reasons by code for findings that are accepted.

    Returns:
        The report, which has no formulas.

    Raises:
        ValueError: the file cannot be read, has no tensor that is named like one of attention, needs an
            extra that is not installed, or an expectation or a code is unknown.
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
        raise TargetError(f"{path} has no tensor whose name is that of a projection or norm of q or k")
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
    """Return the match of a pattern for q or for k, and "q" or "k"; None without a match."""
    for which, word in SIDES.items():
        if m := re.match(pattern.format(which=word), name):
            return m, which
    return None


def norm_of(name: str) -> tuple[str, str] | None:
    """Recognise the name of a gain.

    Args:
        name: the name of a tensor.

    Returns:
        The number of its layer and "q" or "k"; None if it is not the gain of a norm of q or k.
    """
    found = _match(NORM, name)
    return None if found is None else (found[0]["number"], found[1])


def files_of(path: Path) -> list[Path]:
    """Find all files of a model.

    Args:
        path: the only file, one of the files, or their index.

    Returns:
        The files in order.

    Raises:
        TargetError: a file is missing, so it is unknown which tensors the model has.
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
        raise TargetError(
            f"{path} is one part of a model, which cannot be audited without {absent[0]}{others}"
        )
    return [path.parent / name for name in names]


def _of_layer(name: str, layer: Layer) -> Iterator[Finding]:
    if not layer.gains:
        yield finding("QK001", name, "the file has no norm of q or k")
        return
    # A layer without a projection of k uses the keys of another layer and needs no norm of k.
    missing = sorted({"q", "k"} - layer.gains.keys())
    if missing and missing[0] in layer.rows:
        yield finding(
            "QK016", name, f"{'q' if missing == ['k'] else 'k'} has a norm and {missing[0]} has none"
        )
    for which, gain in layer.gains.items():
        low, high = float(gain.min()), float(gain.max())
        if layer.rows.get(which) == gain.numel() and gain.dim() == 1 and _is_full(layer, which):
            yield finding("QK004", name, f"the gain of {which} is as wide as the whole projection")
        if low == high and (gain.numel() > 1 or low in (0.0, 1.0)):
            yield finding("QK020", name, f"every gain of {which} is stored as {low:g}", value=low)
        elif high < at.DECAYED and low >= 0:
            text = (
                f"gains of {which} are between {low:.2g} and {high:.2g}: they decayed, or are w of 1 + w"
            )
            yield finding("QK010", name, text, low=low, high=high)


def _is_full(layer: Layer, which: str) -> bool:
    """Whether a gain covers several heads: it differs in width from that of the other of q and k, or it
    is wider than any head in use."""
    width = layer.gains[which].shape[-1]
    other = layer.gains.get("k" if which == "q" else "q")
    return width > at.WIDEST or (other is not None and other.shape[-1] != width)


def tensors_of(
    path: Path, *, parts: int = 1
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """Read the tensors of a file one after the other.

    Args:
        path: a `.safetensors` or `.gguf` file.
        parts: the number of files that are read for this model.

    Yields:
        The name, the shape, and a function that reads the values.

    Raises:
        TargetError: the file is of another kind, needs an extra that is not installed, or is one of more
            parts than are read.
    """
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise TargetError(
                "safetensors files need an extra: pip install 'qknorm[transformers]'"
            ) from error
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
            raise TargetError(
                f"{path} is one of {count.contents()} parts, but its name does not say which"
            )
        for tensor in reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            yield tensor.name, shape, partial(_dequantized, tensor)
    else:
        raise TargetError(f"{path} is neither a .safetensors nor a .gguf file")


def _dequantized(tensor: Any) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

"""Attention that no tap can see: it is not measured, but named in every record, with the reason."""

from __future__ import annotations

import dis
import re
from collections.abc import Callable
from types import FunctionType

import torch
from torch import nn

from qknorm.monitor.layer import Layer
from qknorm.monitor.taps import functional, multihead, own, transformers
from qknorm.monitor.taps.code import bases, codes, followed, names

NAME = "unseen"

# Kernels of others.
_KERNELS = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_qkvpacked_func",
    "memory_efficient_attention",
    "sageattn",
)
_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
_WORDS = re.compile(r"att(n|en)|quer(y|ies)|^q$|^q_|qk", re.IGNORECASE)
_FUSED = ("scaled_dot_product", "flex_attention", "multi_head_attention")


def serves(module: nn.Module) -> bool:
    """Whether the module looks like attention, and holds none that is watched. To be asked last."""
    return _reason(module) is not None and not any(
        tap.serves(part)
        for tap in (own, transformers, multihead, functional)
        for part in module.modules()
        if part is not module
    )


def install(layer: Layer) -> Callable[[], None]:
    """Say why, in every record."""
    layer.unseen = _reason(layer.module)
    return lambda: None


def _reason(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        try:
            text = str(module.graph)
        except RuntimeError:  # it has no forward
            return None
        kinds = set(re.findall(r"aten::(\w+)", text))
        return "it is TorchScript, in which no call is seen" if _is_attention(kinds) else None
    graph = module.__dict__.get("graph", module.__dict__.get("_graph"))
    if isinstance(graph, torch.fx.Graph):
        kinds = {part for node in graph.nodes for part in re.findall(r"\w+", str(node.target))}
        return "it is a traced graph, in which no call is seen" if _is_attention(kinds) else None
    if not bases(type(module))[:-1]:  # torch's own, beside `object`
        return None
    for function in followed(module):
        named = names(function)
        kernel = next((name for name in _KERNELS if name in named), None)
        if kernel is not None:
            return f"it calls {kernel}, which is not seen"
        if _multiplies(function) and any("softmax" in name.lower() for name in named):
            words = named.union(*(code.co_varnames for code in codes(function.__code__)))
            if any(map(_WORDS.search, words | {type(module).__name__})):
                return "it multiplies q and k by itself, which is not seen"
    return None


def _is_attention(kinds: set[str]) -> bool:
    """Of the operators of a graph."""
    if any(fused in kind for kind in kinds for fused in _FUSED):
        return True
    return any("softmax" in kind for kind in kinds) and bool(kinds & _PRODUCTS)


def _multiplies(function: FunctionType) -> bool:
    return any(
        not _PRODUCTS.isdisjoint(code.co_names)
        or any(
            step.opname == "BINARY_MATRIX_MULTIPLY"  # Python 3.10
            or (step.opname == "BINARY_OP" and step.argrepr.startswith("@"))
            for step in dis.get_instructions(code)
        )
        for code in codes(function.__code__)
    )

"""Effective gains of a layer's QK-norm, read by probing its norms, and the bound that they imply."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qknorm.nn import Attention

# What the norms of q and k are called in the models that have them.
NAMES = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("q_ln", "k_ln"),
)


def gain_and_bound(
    module: nn.Module, heads: int, kv_heads: int, scale: float | None
) -> tuple[tuple[float, float] | None, float | None]:
    """Largest |gain| of q and of k, and the largest |logit| that they allow; None for what is not known.

    The rotation is not looked at: the bound holds for any that does not stretch.
    """
    if isinstance(module, Attention):
        if module.norm is None:
            return None, None
        q_gain, k_gain = module.norm.effective_gains()
        bounds = module.logit_bound()
        return (_largest(q_gain), _largest(k_gain)), None if bounds is None else float(bounds.max())
    norms = _norms(module)
    if norms is None:
        return None, None
    gains = [gain for norm in norms if (gain := probe(norm)) is not None]
    if len(gains) < 2:
        return None, None
    top = (float(gains[0].max()), float(gains[1].max()))
    D = getattr(module, "head_dim", None)
    if D is None or scale is None:
        return top, None
    bound = abs(scale) * D * top[0] * top[1]
    for gain, H in zip(gains, (heads, kv_heads), strict=True):
        if gain.dim() == 1 and gain.numel() != D:  # one statistic over all heads: one can hold all of it
            bound *= H**0.5
    return top, bound


def _largest(gain: Tensor | None) -> float:
    return 1.0 if gain is None else float(gain.detach().abs().max())


def _norms(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    for q_name, k_name in NAMES:
        q, k = getattr(module, q_name, None), getattr(module, k_name, None)
        if isinstance(q, nn.Module) and isinstance(k, nn.Module):
            return q, k
    return None


def probe(norm: nn.Module) -> Tensor | None:
    """|gain| of a norm in the shape of its weight: its answer to +1, -1, +1, ..., whose mean is 0 and
    whose mean square is 1. None if it adds a bias, has no weight, or does not answer."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or getattr(norm, "bias", None) is not None or weight.shape[-1] % 2:
        return None
    x = torch.ones_like(weight, dtype=torch.float32)
    x[..., 1::2] = -1.0
    try:
        with torch.no_grad():
            y = norm(x.to(weight.dtype)[None])[0]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    return y.float().abs() if y.shape == weight.shape else None

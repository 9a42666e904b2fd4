"""Effective gains of a layer's QK-norm, read by probing its norms, and the bound that they imply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

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

    The rotation is not looked at: the bound holds for any that does not stretch. Gains that are sharded
    over ranks are gathered, so that all ranks that hold the layer have to ask.
    """
    norm = module.norm if isinstance(module, Attention) else None
    watched = [norm] if norm is not None else list(_norms(module) or ())
    with _gathered(watched):
        return _gain_and_bound(module, heads, kv_heads, scale)


def _gain_and_bound(
    module: nn.Module, heads: int, kv_heads: int, scale: float | None
) -> tuple[tuple[float, float] | None, float | None]:
    if isinstance(module, Attention):
        if module.norm is None:
            return None, None
        q_gain, k_gain = module.norm.effective_gains()
        bounds = module.logit_bound()
        return (_largest(q_gain), _largest(k_gain)), None if bounds is None else float(bounds.max())
    norms = _norms(module)
    probes = [] if norms is None else [found for norm in norms if (found := probe(norm)) is not None]
    if len(probes) < 2:
        return None, None
    (q, q_shifts), (k, k_shifts) = probes
    top = (float(q.max()), float(k.max()))
    D = getattr(module, "head_dim", None)
    if D is None or scale is None or q_shifts or k_shifts:
        return top, None
    bound = abs(scale) * D * top[0] * top[1]
    for gain, H in ((q, heads), (k, kv_heads)):
        if gain.dim() == 1 and gain.numel() != D:  # one statistic over all heads: one can hold all of it
            bound *= H**0.5
    return top, bound


@contextmanager
def _gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Whole parameters in place of distributed ones."""
    with ExitStack() as undo, torch.no_grad():
        for module in (part for one in modules for part in one.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and hasattr(parameter, "full_tensor"):  # a DTensor
                    undo.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
        yield


def _largest(gain: Tensor | None) -> float:
    return 1.0 if gain is None else float(gain.detach().abs().max())


def _norms(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    for q_name, k_name in NAMES:
        q, k = getattr(module, q_name, None), getattr(module, k_name, None)
        if isinstance(q, nn.Module) and isinstance(k, nn.Module):
            return q, k
    return None


def probe(norm: nn.Module) -> tuple[Tensor, bool] | None:
    """|gain| of a norm in the shape of its weight, and whether it also adds a bias.

    The norm is asked for the answer to a large vector of mean 0, beside which its eps is nothing, and to
    the opposite vector, which tells gain from bias. None if it has no weight or does not answer.
    """
    parts = getattr(norm, "norms", None)
    if isinstance(parts, nn.ModuleList):  # one norm per head
        found = [one for part in parts if (one := probe(part)) is not None]
        if not found or len(found) < len(parts):
            return None
        return torch.stack([gain for gain, _ in found]), any(shifts for _, shifts in found)
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[-1] < 2:
        return None
    x = torch.ones_like(weight, dtype=torch.float32)
    x[..., 1::2] = -1.0
    if x.shape[-1] % 2:
        x[..., -3:] = torch.tensor([1.0, 1.0, -2.0])
    unit = x.abs() / x.square().mean(-1, keepdim=True).sqrt()
    x = (x * 2.0**7).to(weight.dtype)  # fp16 holds its square
    try:
        with torch.no_grad():  # `forward`, so that nobody's hooks see the probe
            plus, minus = (norm.forward(v[None])[0].float() for v in (x, -x))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    if plus.shape != weight.shape:
        return None
    return ((plus - minus) / 2).abs() / unit, bool((plus + minus).abs().max() > 1e-6 * plus.abs().max())

"""What a norm says of its gains: `QKNorm` knows them, any other norm is given vectors to answer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qknorm.nn import QKNorm


class Gains(NamedTuple):
    """|gain| of q and of k, of which the last axis is that of the statistic, and whether the norm also
    adds a bias, bool `[]`."""

    of_q: Tensor
    of_k: Tensor
    is_shifted: Tensor


def gains_of(norm: nn.Module) -> Gains:
    """The gains as they are now. To be called inside the norm's own forward.

    Raises whatever the norm raises, and ValueError if it has no weight or changes the shape.
    """
    if not isinstance(norm, QKNorm):
        return _probed(norm)
    of_q, of_k = (g.detach().abs().float() for g in norm.effective_gains())
    if norm.dialect.statistic == "full":
        of_q, of_k = of_q.flatten(), of_k.flatten()
    return Gains(of_q, of_k, of_q.new_zeros((), dtype=torch.bool))


def _probed(norm: nn.Module) -> Gains:
    """The norm is given a large vector of mean 0, beside which its eps is nothing; the opposite vector,
    which tells gain from bias; and half of it, of which a norm makes the same."""
    weight = _weight(norm)
    x = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
    x[..., 1::2] = -1.0
    if x.shape[-1] % 2:
        x[..., -3:] = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float32)
    unit = x.abs() / x.square().mean(-1, keepdim=True).sqrt()
    x = (x * 2.0**7).to(weight.dtype)  # fp16 holds its square
    with torch.autocast(weight.device.type, enabled=False):
        plus, minus, half = (norm.forward(v[None])[0].float() for v in (x, -x, x / 2))
    if plus.shape != weight.shape:
        raise ValueError(f"a vector of shape {tuple(weight.shape)} comes out as {tuple(plus.shape)}")
    if (plus - half).abs().amax() > 0.02 * plus.abs().amax():
        raise ValueError("half of a vector comes out as something else, so it is no norm")
    gain = ((plus - minus) / 2).abs() / unit
    return Gains(gain, gain, (plus + minus).abs().amax() > 1e-6 * plus.abs().amax())


def _weight(norm: nn.Module) -> Tensor:
    """What has the shape and the dtype of its gains. A wrapper may keep it beside the parameters."""
    candidates = (getattr(norm, "weight", None), *norm._parameters.values(), *vars(norm).values())
    for value in candidates:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] > 1:
            return value
    shape = getattr(norm, "normalized_shape", None)
    if shape is None:
        raise ValueError(f"{type(norm).__name__} has no weight")
    return torch.empty(shape, dtype=torch.float32, device="cpu")

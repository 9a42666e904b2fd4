"""PyTorch's own kernels with sinks that they do not know: one rounding, and the gradient of the sink's
share (F18).

Shapes: B batch, H heads, T tokens, D head width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qknorm
from qknorm import Mask
from qknorm.spec import RowSink

B, H, T, D = 1, 2, 1500, 32
MASKS = {"causal": Mask(causal=True), "window": Mask(causal=True, window=700), "dense": Mask()}


def gradients(backend: str, dtype: torch.dtype, sink: float, mask: Mask, kind: str) -> list[Tensor]:
    """Of q, k, v, both gains and the sink, in fp64; V and d_out have a mean, as in a real model."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    half = torch.bfloat16 if dtype == torch.float64 else dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = (randn(B, H, T, D), randn(B, H, T, D), randn(B, H, T, D) + 3)
    q, k, v = (x.to(half).to(dtype).requires_grad_() for x in given)
    q_gain, k_gain = ((0.3 * randn(H, D) + 1).to(wide).requires_grad_() for _ in range(2))
    shape = (H,) if kind == "head" else (B, H, T)
    logit = torch.full(shape, sink, dtype=wide, requires_grad=True)
    out = qknorm.attention(
        q, k, v, q_gain=q_gain, k_gain=k_gain, mask=mask, backend=backend,
        sink=logit if kind == "head" else RowSink(logit),
    )  # fmt: skip
    d_out = (randn(B, H, T, D) + 1).to(half).to(dtype)
    return [x.double() for x in torch.autograd.grad(out, (q, k, v, q_gain, k_gain, logit), d_out)]


@pytest.mark.parametrize("kind", ["head", "row"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sink", [-3.0, 0.0, 3.0])
def test_f18_a_weak_sink_in_bf16_leaves_the_gradients_right(sink: float, mask: str, kind: str) -> None:
    wanted = gradients("stock", torch.float64, sink, MASKS[mask], kind)
    found = gradients("stock", torch.bfloat16, sink, MASKS[mask], kind)
    # Of dense attention the gradient of q is what is left where its 1 500 keys cancel.
    shares = (0.025 if mask == "dense" else 0.012, *[0.012] * 5)
    for a, w, share in zip(found, wanted, shares, strict=True):
        assert (a - w).norm() <= share * w.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_f18_the_output_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, 200, D).to(dtype) for _ in range(3))
    sink = torch.tensor([1.0, -2.0])
    exact = qknorm.attention(*(x.double() for x in (q, k, v)), sink=sink.double(), backend="reference")
    found = qknorm.attention(q, k, v, sink=sink, backend="stock")
    near = exact.to(dtype)
    # A value that fp32 leaves on the other side of a tie is one step away; a second rounding makes many.
    assert (found != near).float().mean() < 2e-3

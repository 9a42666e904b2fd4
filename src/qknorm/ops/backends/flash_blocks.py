"""One block of attention, forward and backward, by the best kernel that PyTorch has for the device.

* On the CPU this is torch's flash kernel (fp16, bf16, fp32, fp64; grouped heads are not repeated).
* On NVIDIA GPUs it is the kernel of cuDNN or torch's flash kernel, for half-precision blocks without a
  bias.
* Otherwise it is plain tensor code in fp32 (fp64 for fp64 input). It works on small blocks of queries,
  so memory stays linear.

Shapes: q [B, Hq, n, D]; k [B, Hk, m, D]; v [B, Hk, m, Dv]; bias [1 or B, 1, n, m] of 0 and -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from qknorm import spec
from qknorm.ops.products import exact_matmul

# The number of scores that the plain code holds at once: 16 MiB in fp32.
SCORE_BUDGET = 1 << 22


def uses_flash(q: Tensor, k: Tensor) -> bool:
    """Whether torch's CPU flash kernel gives the right result for this block.

    It does not if q or k contains NaN or infinity. The kernel treats a row whose logits are all NaN as a
    fully masked row and returns 0, which would hide the NaN. In bf16, rows with an infinite logit become
    0 too.
    """
    if q.device.type != "cpu":
        return False
    wide = spec.compute_dtype(q.dtype)
    return bool(torch.isfinite(q.sum(dtype=wide) + k.sum(dtype=wide)))


def cuda_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> str | None:
    """Return the kernel that torch would choose for this block on NVIDIA: "cudnn", "flash" or None."""
    if q.device.type != "cuda" or bias is not None or torch.version.hip is not None:
        return None
    if q.dtype not in spec.HALF_PRECISION or q.shape[-1] != v.shape[-1] or q.shape[-1] % 8:
        return None
    if min(q.numel(), k.numel()) == 0:
        return None
    # The choice is made as if gradients were needed. Code inside an operator cannot know whether they
    # are, and a kernel that has no backward pass for this width must not run the forward pass.
    with torch.cuda.device(q.device), torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=grouped)
    return {SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.FLASH_ATTENTION: "flash"}.get(
        SDPBackend(choice)
    )


def _cuda_forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.view(q.shape[:3])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _cuda_backward(
    kernel: str,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # required, but there is no dropout
    # Older releases of torch cache cuDNN's plans by the strides of q, k and v only, so those of d_out
    # must be fixed.
    d_out = d_out.contiguous()
    lengths = (None, None, q.shape[2], k.shape[2], 0.0, causal)
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, *lengths, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse.contiguous(), *lengths, seed, seed, scale=scale
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out `[B, Hq, n, Dv]` and lse `[B, Hq, n]`. Rows that see no key hold unspecified values."""
    if scale < 0:  # the kernels multiply by the scale after masking, and -inf would become inf
        q, scale = -q, -scale
    if (kernel := cuda_kernel(q, k, v, bias, causal)) is not None:
        return _cuda_forward(kernel, q, k, v, causal, scale)
    if not uses_flash(q, k):
        return _plain_forward(q, k, v, bias, causal, scale)
    Dv, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = _pad(q, width), _pad(k, width), _pad(v, width)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out[..., :Dv], lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv for P = exp(s - lse) and delta = rowsum(d_out * out).

    out and lse need not come from `forward`: the `stock` backend passes those of the softmax with a
    sink.
    """
    if scale < 0:
        dq, dk, dv = backward(d_out, -q, k, v, out, lse, bias, causal, -scale)
        return -dq, dk, dv
    if (kernel := cuda_kernel(q, k, v, bias, causal)) is not None:
        return _cuda_backward(kernel, d_out, q, k, v, out, lse, causal, scale)
    if not uses_flash(q, k):
        return _plain_backward(d_out, q, k, v, out, lse, bias, causal, scale)
    D, Dv, width = q.shape[-1], v.shape[-1], max(q.shape[-1], v.shape[-1])
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _pad(d_out, width),
        _pad(q, width),
        _pad(k, width),
        _pad(v, width),
        _pad(out, width),
        lse,
        0.0,
        causal,
        attn_mask=bias,
        scale=scale,
    )
    return dq[..., :D], dk[..., :D], dv[..., :Dv]


def _pad(x: Tensor, width: int) -> Tensor:
    """Pad the last axis with zeros to `width` and make its stride 1, as the CPU kernel requires."""
    x = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _chunks(q: Tensor, k: Tensor) -> list[slice]:
    """Return slices of the queries, each with at most `SCORE_BUDGET` scores."""
    B, H, n, _ = q.shape
    rows = max(1, SCORE_BUDGET // max(1, B * H * k.shape[2]))
    return [slice(lo, min(lo + rows, n)) for lo in range(0, n, rows)]


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, rows: slice
) -> Tensor:
    """Return the masked logits `[B, Hk, G, rows, m]` in fp32 (fp64 for fp64 input), with G = Hq / Hk."""
    wide = spec.compute_dtype(q.dtype)
    B, Hq, _, D = q.shape
    Hk, m = k.shape[1:3]
    q = q[:, :, rows].to(wide).reshape(B, Hk, Hq // Hk, -1, D)
    s = scale * exact_matmul(q, k.to(wide)[:, :, None].mT)
    if causal:
        token = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        s = s.masked_fill(torch.arange(m, device=q.device) > token, -torch.inf)
    return s if bias is None else s.masked_fill(bias[:, :, None, rows] < 0, -torch.inf)


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for rows in _chunks(q, k):
        s = _scores(q, k, bias, causal, scale, rows)
        lse = s.logsumexp(-1)
        p = (s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
        outs.append((p @ v.to(s.dtype)[:, :, None]).flatten(1, 2).to(v.dtype))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = spec.compute_dtype(q.dtype)
    B, Hq, _, D = q.shape
    Hk, m, Dv = k.shape[1], k.shape[2], v.shape[3]
    G = Hq // Hk
    k_wide, v_wide = k.to(wide), v.to(wide)
    dk, dv = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    dqs = []
    for rows in _chunks(q, k):
        s = _scores(q, k, bias, causal, scale, rows)
        p = (s - lse[:, :, rows].reshape(B, Hk, G, -1, 1)).exp()
        d_rows = d_out[:, :, rows].to(wide)
        delta = (d_rows * out[:, :, rows].to(wide)).sum(-1).reshape(B, Hk, G, -1, 1)
        d_rows = d_rows.reshape(B, Hk, G, -1, Dv)
        ds = scale * p * (d_rows @ v_wide[:, :, None].mT - delta)
        dqs.append((ds @ k_wide[:, :, None]).flatten(1, 2).to(q.dtype))
        q_rows = q[:, :, rows].to(wide).reshape(B, Hk, -1, D)
        dk += ds.reshape(B, Hk, -1, m).mT @ q_rows
        dv += p.reshape(B, Hk, -1, m).mT @ d_rows.reshape(B, Hk, -1, Dv)
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)

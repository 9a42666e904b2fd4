"""A call as the kernels take it.

Shapes: q [B, Hq, Tq, D]; k [B, Hk, Tk, D]; v [B, Hk, Tk, V]; any strides with a last one of 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qknorm.ops.backends.fused import Inputs
from qknorm.ops.backends.ids import token_ids
from qknorm.ops.backends.triton import tiles as t

LOG2E = math.log2(math.e)


@functools.cache
def _architecture(device: torch.device) -> int:
    """Of the interpreter: any."""
    if device.type != "cuda":
        return 90
    return t.architecture(torch.cuda.get_device_capability(device))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call as the kernels take it: unit last strides, fp32 gains and tables, ids."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    sink: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    layout: str | None = None
    causal: bool
    window: int | None
    eps: float = 1e-6
    scale: float

    @staticmethod
    def of(x: Inputs) -> Problem:
        """From the arguments of the operators."""
        cos, sin, layout = x.cos, x.sin, x.layout
        if cos is not None and cos.shape[-1] == 0:
            cos = sin = layout = None
        query_ids, key_ids = token_ids(x.q, x.k, x.documents, x.key_padding)

        def small(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().float().contiguous()

        return Problem(
            q=readable(x.q),
            k=readable(x.k),
            v=readable(x.v),
            q_gain=small(x.q_gain),
            k_gain=small(x.k_gain),
            sink=None if x.sink is None else small(x.sink[:, 0]),
            cos=small(cos),
            sin=small(sin),
            query_ids=query_ids,
            key_ids=key_ids,
            layout=layout,
            causal=x.causal,
            # A window past both ends is as good as one that just covers them, and cannot overflow.
            window=None if x.window is None else min(x.window, x.q.shape[2] + x.k.shape[2]),
            eps=x.eps,
            scale=x.scale,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """B, Hq, Hk, Tq, Tk, D, V."""
        B, Hq, Tq, D = self.q.shape
        _, Hk, Tk, V = self.v.shape
        return B, Hq, Hk, Tq, Tk, D, V

    @property
    def mask(self) -> dict[str, Any]:
        """What every kernel of attention takes of it."""
        return {
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "IDS": self.key_ids is not None,
        }

    @property
    def rotary_width(self) -> int:
        """R; 2 without RoPE, which nothing reads."""
        return 2 if self.cos is None else 2 * self.cos.shape[-1]

    @property
    def log2_scale(self) -> float:
        """c with its sign."""
        return self.scale * LOG2E

    @property
    def rows_of_batch(self) -> int:
        """1 where every row of the batch has the same mask, else B."""
        return 1 if self.key_ids is None else self.q.shape[0]

    def is_prepared(self) -> bool:
        """Whether q and k are what is multiplied."""
        return self.q_gain is None and self.k_gain is None and self.cos is None

    def tiles(self, kernel: str) -> t.Tiles:
        """The tile sizes of a kernel for it."""
        width = max(self.q.shape[-1], self.v.shape[-1])
        is_fp32 = self.q.dtype == torch.float32
        return t.tiles(kernel, width, is_fp32=is_fp32, architecture=_architecture(self.q.device))

    def blocks(self) -> dict[str, int]:
        """Rounded widths."""
        return {"BLOCK_D": t.block(self.q.shape[-1]), "BLOCK_V": t.block(self.v.shape[-1])}

    def rope_stride(self) -> int:
        """From one row of the batch to the next, of cos and sin."""
        if self.cos is None or self.cos.dim() == 2 or self.cos.shape[0] == 1:
            return 0
        return self.cos.stride(0)


def readable(x: Tensor) -> Tensor:
    """Unit last stride, and offsets within a tile that fit 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(2) < 2**24 else x.contiguous()

"""`Problem`: the arguments of a call in the form that the kernels read.

Shapes: q [B, Hq, Tq, D]; k [B, Hk, Tk, D]; v [B, Hk, Tk, V]. The stride of the last axis is 1.
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
    """Return the architecture whose tile sizes fit a device. The interpreter can use those of any."""
    if device.type != "cuda":
        return 90
    return t.architecture(torch.cuda.get_device_capability(device))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The arguments of a call in the form that the kernels read.

    The last strides of q, k and v are 1. Gains, sinks and rotary tables are fp32 and contiguous.
    Documents and padding are ids, see `token_ids`.
    """

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
        """Return the problem for the arguments of an operator."""
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
            # A window of this size hides nothing. A larger one could overflow int32 in the kernels.
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
        """The constants of the mask that every attention kernel takes."""
        return {
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "IDS": self.key_ids is not None,
        }

    @property
    def rotary_width(self) -> int:
        """The rotary width R. Without RoPE it is 2, and no kernel uses it."""
        return 2 if self.cos is None else 2 * self.cos.shape[-1]

    @property
    def log2_scale(self) -> float:
        """scale * log2(e), with its sign."""
        return self.scale * LOG2E

    @property
    def rows_of_batch(self) -> int:
        """1 if all batch entries have the same mask, else B."""
        return 1 if self.key_ids is None else self.q.shape[0]

    def is_prepared(self) -> bool:
        """Whether q and k need neither norm nor RoPE before they are multiplied."""
        return self.q_gain is None and self.k_gain is None and self.cos is None

    def tiles(self, kernel: str) -> t.Tiles:
        """Return the tile sizes of a kernel for this problem."""
        width = max(self.q.shape[-1], self.v.shape[-1])
        is_fp32 = self.q.dtype == torch.float32
        return t.tiles(kernel, width, is_fp32=is_fp32, architecture=_architecture(self.q.device))

    def blocks(self) -> dict[str, int]:
        """Return the widths D and V, rounded up to the widths of tiles."""
        return {"BLOCK_D": t.block(self.q.shape[-1]), "BLOCK_V": t.block(self.v.shape[-1])}

    def rope_stride(self) -> int:
        """Return the stride of cos and sin along the batch; 0 if all batch entries share the table."""
        if self.cos is None or self.cos.dim() == 2 or self.cos.shape[0] == 1:
            return 0
        return self.cos.stride(0)


def readable(x: Tensor) -> Tensor:
    """Return x, copied if its last stride is not 1 or if offsets within a tile might exceed 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(2) < 2**24 else x.contiguous()

"""A cache of keys (normalised and rotated) and values for incremental decoding.

Shapes: B batch, Hk key heads, T tokens, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one layer, written in chunks or token by token; every layer needs its own.

    Keys are stored after norm and RoPE, so nothing is computed twice. Buffers are allocated once.

    Args:
        batch: B.
        num_kv_heads: Hk.
        max_length: capacity in tokens.
        head_dim: D.
        value_dim: Dv; D if None.
        dtype: of the buffers; torch's default if None. `Attention.new_cache` takes that of the layer.
        device: of the buffers; torch's default if None. `Attention.new_cache` takes that of the layer.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shape = (batch, num_kv_heads, max_length)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim or head_dim, dtype=dtype, device=device)
        self.length = 0

    @property
    def max_length(self) -> int:
        """Capacity in tokens."""
        return self.keys.shape[2]

    def room(self, k_hat: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values as they will be after `append`, as views. Writes nothing.

        Raises ValueError if keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]` do not fit.
        """
        expected = (*self.keys.shape[:2], k_hat.shape[2], self.keys.shape[3])
        if k_hat.shape != expected or v.shape != (*expected[:3], self.values.shape[3]):
            raise ValueError(
                f"the cache takes keys {list(self.keys.shape)} and values {list(self.values.shape)} in "
                f"pieces along axis 2; got {list(k_hat.shape)} and {list(v.shape)}"
            )
        if k_hat.dtype != self.keys.dtype or v.dtype != self.values.dtype:
            raise ValueError(
                f"the cache holds {self.keys.dtype}; got keys in {k_hat.dtype} and values in {v.dtype}"
            )
        if k_hat.device != self.keys.device or v.device != self.values.device:
            raise ValueError(
                f"the cache is on {self.keys.device}; got keys on {k_hat.device}, values on {v.device}"
            )
        end = self.length + k_hat.shape[2]
        if end > self.max_length:
            raise ValueError(
                f"the cache holds {self.max_length} tokens; {self.length} + {k_hat.shape[2]} do not fit"
            )
        return self.keys[:, :, :end], self.values[:, :, :end]

    def append(self, k_hat: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]`; return all so far, as views.

        Raises ValueError if they do not fit, in which case nothing is written.
        """
        keys, values = self.room(k_hat, v)
        keys[:, :, self.length :] = k_hat
        values[:, :, self.length :] = v
        self.length += k_hat.shape[2]
        return keys, values

    @contextmanager
    def adding(self, k_hat: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`append`, undone if what follows raises."""
        length = self.length
        try:
            yield self.append(k_hat, v)
        except BaseException:
            self.length = length
            raise

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens (speculative decoding, a shared prompt)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop to 0 ... {self.length} tokens; got {length}")
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Continue with batch rows `rows [B]`, repeats allowed (beam search)."""
        if rows.shape != self.keys.shape[:1]:
            raise ValueError(f"rows must be [{self.keys.shape[0]}]; got {list(rows.shape)}")
        self.keys, self.values = (x.index_select(0, rows) for x in (self.keys, self.values))

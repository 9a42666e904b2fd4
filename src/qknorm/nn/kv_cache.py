"""The KV cache for incremental decoding. It holds normalised and rotated keys, and values.

Shapes: B batch, Hk key heads, T tokens, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """The keys and values of earlier tokens for one layer. Each layer needs a cache of its own.

    Tokens are appended one by one or in chunks. Keys are stored after norm and RoPE, so nothing is
    computed twice. The buffers are allocated once. `Attention.new_cache` makes a cache that fits a
    layer.

    Args:
        batch: B.
        num_kv_heads: Hk.
        max_length: capacity in tokens.
        head_dim: D.
        value_dim: Dv; D if None.
        dtype: dtype of the buffers; torch's default dtype if None.
        device: device of the buffers; torch's default device if None.

    Attributes:
        keys: the buffer `[B, Hk, max_length, D]`, of which the first `length` tokens are in use.
        values: the buffer `[B, Hk, max_length, Dv]`, likewise.
        length: number of tokens in the cache.
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
        """The capacity in tokens."""
        return self.keys.shape[2]

    def room(self, k_hat: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of all keys and values as `append` would return them, but write nothing.

        Args:
            k_hat: the new keys `[B, Hk, n, D]`.
            v: the new values `[B, Hk, n, Dv]`.

        Returns:
            Views `[B, Hk, length + n, D]` and `[B, Hk, length + n, Dv]`, whose last n tokens are not
            written.

        Raises:
            ValueError: shape, dtype or device do not fit, or the cache has no room for n more tokens.
        """
        expected = (*self.keys.shape[:2], k_hat.shape[2], self.keys.shape[3])
        if k_hat.shape != expected or v.shape != (*expected[:3], self.values.shape[3]):
            raise ValueError(
                f"keys and values must have the shapes of the cache, {list(self.keys.shape)} and "
                f"{list(self.values.shape)}, except along axis 2; got {list(k_hat.shape)} and "
                f"{list(v.shape)}"
            )
        if k_hat.dtype != self.keys.dtype or v.dtype != self.values.dtype:
            raise ValueError(
                f"the cache holds {self.keys.dtype}; got keys in {k_hat.dtype} and values in {v.dtype}: "
                "give new_cache or KVCache their dtype"
            )
        if k_hat.device != self.keys.device or v.device != self.values.device:
            raise ValueError(
                f"the cache is on {self.keys.device}; got keys on {k_hat.device}, values on {v.device}"
            )
        end = self.length + k_hat.shape[2]
        if end > self.max_length:
            raise ValueError(
                f"the cache holds {self.max_length} tokens; {self.length} + {k_hat.shape[2]} "
                "do not fit: make it with a larger max_length"
            )
        return self.keys[:, :, :end], self.values[:, :, :end]

    def append(self, k_hat: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of n tokens, and return those of all tokens.

        Args:
            k_hat: the new keys `[B, Hk, n, D]`, normalised and rotated.
            v: the new values `[B, Hk, n, Dv]`.

        Returns:
            Views of all keys `[B, Hk, length, D]` and all values `[B, Hk, length, Dv]`.

        Raises:
            ValueError: they do not fit. Nothing is written then.
        """
        keys, values = self.room(k_hat, v)
        keys[:, :, self.length :] = k_hat
        values[:, :, self.length :] = v
        self.length += k_hat.shape[2]
        return keys, values

    @contextmanager
    def adding(self, k_hat: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Append like `append`, and take the tokens back if the body of the context raises.

        Args:
            k_hat: the new keys `[B, Hk, n, D]`, normalised and rotated.
            v: the new values `[B, Hk, n, Dv]`.

        Yields:
            Views of all keys and all values, as `append` returns them.

        Raises:
            ValueError: they do not fit. Nothing is written then.
        """
        length = self.length
        try:
            yield self.append(k_hat, v)
        except BaseException:
            self.length = length
            raise

    def crop(self, length: int) -> None:
        """Keep only the first `length` tokens, as speculative decoding or a shared prompt needs.

        Args:
            length: number of tokens to keep.

        Raises:
            ValueError: length is negative or larger than the number of tokens in the cache.
        """
        if not 0 <= length <= self.length:
            raise ValueError(
                f"length must be in 0 ... {self.length}, the number of tokens in the cache; got {length}"
            )
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Select and repeat batch entries, as beam search needs.

        Args:
            rows: integer `[B]`, the batch entry that each new entry continues.

        Raises:
            ValueError: rows does not have the shape `[B]`.
        """
        if rows.shape != self.keys.shape[:1]:
            raise ValueError(f"rows must be [{self.keys.shape[0]}]; got {list(rows.shape)}")
        self.keys, self.values = (x.index_select(0, rows) for x in (self.keys, self.values))

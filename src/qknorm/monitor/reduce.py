"""From the buffers of this rank to those of the whole model: three collectives for any number of layers.

Ranks may hold other layers (pipeline), other heads (tensor parallel), other tokens (data parallel), or
nothing at all: all of them join in. First they tell whether any of them has something new, and if so
agree on the layout; then the values follow.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qknorm.monitor.fields import FIELD, FIELDS

LOG = logging.getLogger("qknorm")

FIRST_OF_K = FIELD["k_rms"]
FACTS = 5
HOLDER = 4
RANK_BITS = 0xFFFF


class Key(NamedTuple):
    """One buffer of the model."""

    layer: str
    phase: str


class Place(NamedTuple):
    """The heads [q, q + heads) and [k, k + kv_heads) of a layer that a rank holds, and whether they are
    those of a fused pass."""

    q: int
    heads: int
    k: int
    kv_heads: int
    is_fused: bool


@dataclass(frozen=True, kw_only=True)
class Part:
    """One buffer.

    Attributes:
        buffer: `[len(FIELDS), heads]`.
        facts: `[FACTS]`, of which the largest of all ranks holds: |gain| of q and of k, and the bound,
            all -inf where nothing is known of them; inf for a bound that does not hold; whether rows
            were sampled; and the largest logit with its rank, see `_tagged`, -inf without a group.
        place: the heads.
    """

    buffer: Tensor
    facts: Tensor
    place: Place

    @property
    def gain_max(self) -> tuple[float, float] | None:
        """Largest |gain| of q and of k."""
        q, k = self.facts[:2].tolist()
        return None if q == -math.inf else (q, k)

    @property
    def bound(self) -> float | None:
        """The largest |logit| that the gains allow."""
        bound = float(self.facts[2])
        return bound if math.isfinite(bound) else None

    @property
    def is_sampled(self) -> bool:
        """Whether some of it is of sampled rows."""
        return bool(self.facts[3] > 0)

    @property
    def rank(self) -> int | None:
        """Which rank saw the largest logit; None without a group, and where nobody saw one."""
        holder = self.facts[HOLDER]
        return None if holder == -math.inf else int(holder.view(torch.int64)) & RANK_BITS


class Reducer:
    """Merges parts over a process group; without one it passes them on.

    Args:
        group: the ranks that join; None for all, if torch.distributed runs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.layout: dict[Key, Place] = {}  # of the whole model
        self.mine: dict[Key, Place] = {}

    @property
    def is_distributed(self) -> bool:
        """Whether there is anyone to merge with."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def reduce(self, parts: dict[Key, Part]) -> dict[Key, Part]:
        """Each buffer of the model, on the CPU in fp64, with the place of all its heads."""
        places = {key: part.place for key, part in parts.items()}
        if not self.is_distributed:
            self.layout = places
            device = next((part.buffer.device for part in parts.values()), torch.device("cpu"))
            maxima, sums = self._pack(parts, device)
            return dict(self._unpack(maxima.cpu().double(), sums.cpu().double()))
        device = self._device()
        is_new = any(self.mine.get(key) != place for key, place in places.items())
        self.mine |= places
        news = torch.tensor([is_new], dtype=torch.int32, device=device)
        dist.all_reduce(news, dist.ReduceOp.MAX, group=self.group)
        if news.item():
            self._agree()
        maxima, sums = self._pack(parts, device)
        if self.layout:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.group)
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.group)
        return dict(self._unpack(maxima.cpu().double(), sums.cpu().double()))

    def _device(self) -> torch.device:
        """Where the group's collectives want their tensors, also on a rank that has none."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or dist.get_backend(self.group) in ("gloo", "mpi"):
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _agree(self) -> None:
        gathered: list[dict[Key, Place]] = [{}] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, self.mine, group=self.group)
        self.layout = {}
        for one in gathered:
            for key, place in one.items():
                known = self.layout.get(key, Place(0, 0, 0, 0, place.is_fused))
                heads = max(known.heads, place.q + place.heads)
                kv_heads = max(known.kv_heads, place.k + place.kv_heads)
                self.layout[key] = Place(0, heads, 0, kv_heads, place.is_fused)

    def _pack(self, parts: dict[Key, Part], device: torch.device) -> tuple[Tensor, Tensor]:
        """What to merge by MAX and by SUM, in the order of the layout."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        maxima, sums = [], []
        for key, place in self.layout.items():
            total = torch.zeros(len(FIELDS), place.heads, dtype=wide, device=device)
            total[0] = -torch.inf
            facts = torch.full((FACTS,), -torch.inf, dtype=wide, device=device)
            if key in parts:
                try:
                    total, facts = _placed(parts[key], total, facts)
                    if self.is_distributed and wide == torch.float64:
                        facts[HOLDER] = _tagged(total[0].amax(), dist.get_rank())
                except Exception:  # the other ranks wait for what follows
                    LOG.exception("%s is left out of the step", key.layer)
            maxima += [total[0], facts]
            sums.append(total[1:].flatten())
        empty = [torch.zeros(0, dtype=wide, device=device)]
        packed = torch.cat(maxima or empty)
        # NaN does not survive every MAX; it does survive a sum.
        was_nan = packed.isnan()
        return packed.masked_fill(was_nan, torch.inf), torch.cat([was_nan.to(wide), *(sums or empty)])

    def _unpack(self, maxima: Tensor, sums: Tensor) -> Iterator[tuple[Key, Part]]:
        was_nan, sums = sums[: len(maxima)], sums[len(maxima) :]
        maxima = maxima.masked_fill(was_nan > 0, torch.nan)
        for key, place in self.layout.items():
            H, rest = place.heads, len(FIELDS) - 1
            top, facts, maxima = maxima.tensor_split((H, H + FACTS))
            found, sums = sums.tensor_split((H * rest,))
            yield key, Part(buffer=torch.cat((top[None], found.view(rest, H))), facts=facts, place=place)


def _placed(part: Part, total: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a part among those of all heads."""
    q, heads, k, kv_heads, _ = part.place
    buffer, total = part.buffer.to(total), total.clone()
    total[:FIRST_OF_K, q : q + heads] = buffer[:FIRST_OF_K]
    total[FIRST_OF_K:, k : k + kv_heads] = buffer[FIRST_OF_K:, :kv_heads]
    return total, part.facts.to(facts)


def _tagged(top: Tensor, rank: int) -> Tensor:
    """The largest logit, fp64 `[]`, with the rank in its lowest bits: MAX then tells who holds it.

    A logit that was computed in fp32 loses nothing. NaN and inf become the largest number, and -inf, the
    maximum of nothing, stays.
    """
    most = torch.finfo(torch.float64).max
    bits = top.nan_to_num(most, most, -most).view(torch.int64)
    return torch.where(top == -torch.inf, top, ((bits & ~RANK_BITS) | rank).view(torch.float64))

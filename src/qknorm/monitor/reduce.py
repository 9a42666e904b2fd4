"""From the buffers of this rank to those of the whole model: two collectives for any number of layers.

Ranks may hold other layers (pipeline), other heads (tensor parallel), other tokens (data parallel), or
nothing at all: all of them join in. The layout is agreed on once, and again when a rank finds that its
own has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qknorm.monitor.fields import FIELD, FIELDS

FIRST_OF_K = FIELD["k_rms"]


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
    """A buffer `[len(FIELDS), heads]`, which heads it covers, and what the gains say of the layer."""

    buffer: Tensor
    place: Place
    gain_max: tuple[float, float] | None = None
    bound: float | None = None

    @property
    def of_gains(self) -> list[float]:
        """As numbers of which the largest is the model's: -inf for what is not known."""
        q, k = self.gain_max or (-math.inf, -math.inf)
        return [q, k, -math.inf if self.bound is None else self.bound]


class Reducer:
    """Merges parts over a process group; without one it passes them on.

    Args:
        group: the ranks that join; None for all, if torch.distributed runs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.layout: dict[Key, Place] = {}  # of the whole model
        self.mine: dict[Key, Place] | None = None
        self.stale = True

    @property
    def is_distributed(self) -> bool:
        """Whether there is anyone to merge with."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    @property
    def device(self) -> torch.device:
        """Where the group's collectives want their tensors, also on a rank that has none."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or dist.get_backend(self.group) in ("gloo", "mpi"):
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def reduce(self, parts: dict[Key, Part]) -> dict[Key, Part]:
        """Each buffer of the model, on the CPU in fp64, with the place of all its heads."""
        if not self.is_distributed:
            return {key: replace(part, buffer=part.buffer.cpu().double()) for key, part in parts.items()}
        device = self.device
        mine = {key: part.place for key, part in parts.items()}
        if self.stale:
            self._agree(mine)
        wide = torch.float32 if device.type == "mps" else torch.float64
        maxima, sums = [], [torch.tensor([float(mine != self.mine)], dtype=wide, device=device)]
        for key, place in self.layout.items():
            total = torch.zeros(len(FIELDS), place.heads, dtype=wide, device=device)
            total[0] = -torch.inf
            part = parts.get(key)
            of_gains = [-math.inf] * 3
            # What does not fit what was agreed on waits until it is agreed on anew.
            if part is not None and part.place == (self.mine or {}).get(key):
                q, heads, k, kv_heads, _ = part.place
                buffer = part.buffer.to(device, wide)
                total[:FIRST_OF_K, q : q + heads] = buffer[:FIRST_OF_K]
                total[FIRST_OF_K:, k : k + kv_heads] = buffer[FIRST_OF_K:, :kv_heads]
                of_gains = part.of_gains
            # NaN does not survive every MAX; it does survive a sum.
            maxima.append(total[0].nan_to_num(nan=torch.inf, neginf=-torch.inf, posinf=torch.inf))
            maxima.append(torch.tensor(of_gains, dtype=wide, device=device))
            sums += [total[0].isnan().to(wide), total[1:].flatten()]
        packed_sums = torch.cat(sums)
        if maxima:
            packed_maxima = torch.cat(maxima)
            dist.all_reduce(packed_maxima, dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(packed_sums, dist.ReduceOp.SUM, group=self.group)
        self.stale = bool(packed_sums[0] > 0)  # somebody's layout is new: agree again next time
        return self._unpack(packed_maxima.cpu() if maxima else packed_sums[:0], packed_sums[1:].cpu())

    def _agree(self, mine: dict[Key, Place]) -> None:
        gathered: list[dict[Key, Place]] = [{}] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, mine, group=self.group)
        layout: dict[Key, Place] = {}
        for one in gathered:
            for key, place in one.items():
                known = layout.get(key, Place(0, 0, 0, 0, place.is_fused))
                layout[key] = Place(
                    0,
                    max(known.heads, place.q + place.heads),
                    0,
                    max(known.kv_heads, place.k + place.kv_heads),
                    place.is_fused,
                )
        self.layout = dict(sorted(layout.items()))
        self.mine = mine

    def _unpack(self, maxima: Tensor, sums: Tensor) -> dict[Key, Part]:
        found = {}
        for key, place in self.layout.items():
            H = place.heads
            top, (q, k, bound), maxima = maxima[:H], maxima[H : H + 3].tolist(), maxima[H + 3 :]
            was_nan, rest, sums = sums[:H], sums[H : H * len(FIELDS)], sums[H * len(FIELDS) :]
            top = torch.where(was_nan > 0, torch.nan, top)
            buffer = torch.cat((top[None], rest.view(len(FIELDS) - 1, H))).double()
            found[key] = Part(
                buffer=buffer,
                place=place,
                gain_max=None if q == -math.inf else (q, k),
                bound=None if bound == -math.inf else bound,
            )
        return found

"""Tile sizes, warps and pipeline stages: one table, read when a kernel is launched and when it is
compiled ahead of time for its budget. Nothing is tuned in the user's process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Rows and keys of a tile, warps of a program, stages of the software pipeline; whether a backward
    kernel has a loop of its own, without masks, for blocks that are visible as a whole: it saves integer
    work and costs registers."""

    rows: int
    keys: int
    warps: int
    stages: int
    full_loop: bool = True


# By kernel and rounded width. Half precision, as sm_90 wants it; where another architecture spills, its
# own sizes below; then fp32, whose products run on no tensor core.
_HALF: dict[str, dict[int, Tiles]] = {
    "forward": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)},
    "dq": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 2, False)},
    "dkdv": {
        64: Tiles(64, 64, 8, 2),
        128: Tiles(32, 64, 8, 2, False),
        256: Tiles(32, 32, 8, 1, False),
    },
    "decode": {64: Tiles(16, 64, 4, 3), 128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 2)},
    "logit_stats": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 64, 8, 2)},
    "prep": {64: Tiles(64, 0, 4, 1), 128: Tiles(32, 0, 4, 1), 256: Tiles(16, 0, 4, 1)},
}
_HALF_OF: dict[int, dict[tuple[str, int], Tiles]] = {
    80: {
        ("forward", 128): Tiles(128, 32, 8, 3),
        ("dkdv", 64): Tiles(32, 64, 8, 2),
        ("dq", 256): Tiles(64, 32, 8, 1, False),
    },
    90: {},
    100: {
        ("forward", 64): Tiles(128, 64, 8, 2),
        ("forward", 128): Tiles(64, 64, 8, 2),
        ("forward", 256): Tiles(64, 32, 8, 1),
        ("dq", 64): Tiles(64, 64, 8, 2),
        ("dkdv", 128): Tiles(32, 64, 8, 1, False),
        ("logit_stats", 128): Tiles(64, 64, 8, 2),
        ("decode", 256): Tiles(16, 32, 8, 2),
    },
}
_FP32: dict[str, dict[int, Tiles]] = {
    "forward": {64: Tiles(32, 32, 4, 1), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 16, 4, 1)},
    "dq": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 16, 8, 1), 256: Tiles(16, 16, 4, 1)},
    "dkdv": {
        64: Tiles(32, 32, 8, 1, False),
        128: Tiles(16, 32, 8, 1, False),
        256: Tiles(16, 16, 8, 1, False),
    },
    "decode": {64: Tiles(16, 32, 4, 1), 128: Tiles(16, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    "logit_stats": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    "prep": {64: Tiles(64, 0, 4, 1), 128: Tiles(32, 0, 4, 1), 256: Tiles(16, 0, 4, 1)},
}
MAX_WIDTH = 256
# Rows of a decoding tile, G * Tq at most; above it the forward kernel serves.
DECODE_ROWS = 16
# Keys that one program of a split reads; splits beyond MAX_SPLITS read more.
DECODE_KEYS = 512
MAX_SPLITS = 64
# Tokens per program that looks for the ids of a tile at once.
ID_CHUNK = 1024


def block(width: int) -> int:
    """A power of 2 that holds it, at least 16: what a tensor core multiplies."""
    return max(16, 1 << (width - 1).bit_length())


def architecture(capability: tuple[int, int]) -> int:
    """The one of 80, 90 and 100 whose sizes serve a device of this compute capability. Consumer cards of
    generation 12 have the shared memory and the tensor cores of generation 8."""
    return {9: 90, 10: 100, 11: 100}.get(capability[0], 80)


def tiles(kernel: str, width: int, *, is_fp32: bool, architecture: int) -> Tiles:
    """Those of a kernel for heads of this width (the larger of D and V)."""
    rounded = max(64, block(width))
    if is_fp32:
        return _FP32[kernel][rounded]
    return _HALF_OF[architecture].get((kernel, rounded)) or _HALF[kernel][rounded]

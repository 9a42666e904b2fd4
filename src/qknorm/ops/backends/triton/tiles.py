"""The table of tile sizes, warps and pipeline stages of the kernels.

It is read when a kernel is launched, and by the test that compiles the kernels ahead of time and checks
their registers. Nothing is tuned in the user's process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """The launch sizes of one kernel.

    Attributes:
        rows: rows of a tile.
        keys: keys of a tile.
        warps: warps of a program.
        stages: stages of the software pipeline.
        full_loop: whether a backward kernel has a separate loop without masks for blocks that are
            visible as a whole. That saves integer arithmetic and costs registers.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    full_loop: bool = True


# The sizes by kernel and rounded width. The first table is for half precision on sm_90. The second has
# the entries of other architectures on which those sizes would spill registers. The third is for fp32,
# whose products do not run on tensor cores.
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
# The largest number of rows G * Tq for which the decoding kernels are used instead of the forward
# kernel.
DECODE_ROWS = 16
# The number of keys in a split. Splits have more keys if there would be more than MAX_SPLITS of them.
DECODE_KEYS = 512
MAX_SPLITS = 64
# The number of tokens whose ids the kernel `tile_ranges` reads at once.
ID_CHUNK = 1024


def block(width: int) -> int:
    """Return the smallest power of 2 that holds `width`, at least 16, as tensor cores require."""
    return max(16, 1 << (width - 1).bit_length())


def architecture(capability: tuple[int, int]) -> int:
    """Return 80, 90 or 100, the architecture whose tile sizes fit a device of this compute capability.

    Consumer cards of generation 12 have the shared memory and the tensor cores of generation 8.
    """
    return {9: 90, 10: 100, 11: 100}.get(capability[0], 80)


def tiles(kernel: str, width: int, *, is_fp32: bool, architecture: int) -> Tiles:
    """Return the sizes of a kernel for heads of this width (the larger of D and V)."""
    rounded = max(64, block(width))
    if is_fp32:
        return _FP32[kernel][rounded]
    return _HALF_OF[architecture].get((kernel, rounded)) or _HALF[kernel][rounded]

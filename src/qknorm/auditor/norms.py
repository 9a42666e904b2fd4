"""The norms that an attention may apply to its projections, without their gains.

Shapes: H heads, D head width.
"""

from __future__ import annotations

from torch import Tensor

Key = tuple[str | None, str | None]  # norm and statistic, as in `Formula`

# "heads" is a statistic over the entries of all heads that have the same index.
NORMS: tuple[Key, ...] = (
    (None, None),
    ("rms", "head"),
    ("layer", "head"),
    ("rms", "full"),
    ("layer", "full"),
    ("rms", "heads"),
)


def shares(heads: int) -> list[Key]:
    """Return the RMS norms over groups of neighbouring heads, as ranks compute that hold a part of the
    heads each."""
    return [("rms", f"{n} heads") for n in range(2, heads) if heads % n == 0]


def by_share(y: Tensor, key: Key) -> Tensor:
    """Return y as `[..., groups, heads of a group, D]` if the statistic is one of `shares`."""
    statistic = key[1] or ""
    return y.unflatten(-2, (-1, int(statistic.split()[0]))) if statistic.endswith(" heads") else y


def axes_of(key: Key) -> tuple[int, ...]:
    """Return the axes of the statistic in the result of `by_share`."""
    return {"head": (-1,), "full": (-2, -1), "heads": (-2,)}.get(key[1] or "head", (-2, -1))


def centred(y: Tensor, key: Key) -> Tensor:
    """Return `by_share(y)`, without its mean if the norm subtracts it."""
    y = by_share(y, key)
    return y - y.mean(axes_of(key), keepdim=True) if key[0] == "layer" else y


def mean_square(y: Tensor, key: Key) -> Tensor:
    """Return the mean square of which the norm takes the root, with its axes kept."""
    return centred(y, key).square().mean(axes_of(key), keepdim=True)


def normalized(y: Tensor, key: Key, eps: float = 0.0) -> Tensor:
    """Return the norm of y, `[..., H, D]`, with this eps and without a gain."""
    if key[0] is None:
        return y
    return (centred(y, key) / (mean_square(y, key) + eps).sqrt()).reshape(y.shape)

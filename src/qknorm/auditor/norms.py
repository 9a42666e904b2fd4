"""The norms that an attention may apply to its projections, without their gains.

Shapes: H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Key = tuple[str | None, str | None]  # norm and statistic, as in `Formula`


def _rms(axes: tuple[int, ...], *, center: bool) -> Callable[[Tensor], Tensor]:
    def normalize(y: Tensor) -> Tensor:
        if center:
            y = y - y.mean(axes, keepdim=True)
        return y / y.square().mean(axes, keepdim=True).sqrt()

    return normalize


# Of `[..., H, D]`. "heads" is a statistic over the same entry of all heads.
NORMS: dict[Key, Callable[[Tensor], Tensor]] = {
    (None, None): lambda y: y,
    ("rms", "head"): _rms((-1,), center=False),
    ("layer", "head"): _rms((-1,), center=True),
    ("rms", "full"): _rms((-2, -1), center=False),
    ("layer", "full"): _rms((-2, -1), center=True),
    ("rms", "heads"): _rms((-2,), center=False),
}


def shares(heads: int) -> list[Key]:
    """RMS over some neighbouring heads at a time, as by ranks that hold a share of the heads each."""
    return [("rms", f"{n} heads") for n in range(2, heads) if heads % n == 0]


def by_share(y: Tensor, key: Key) -> Tensor:
    """`[..., H, D]` as `[..., shares, heads of one, D]` if the statistic is one of `shares`."""
    statistic = key[1] or ""
    return y.unflatten(-2, (-1, int(statistic.split()[0]))) if statistic.endswith(" heads") else y


def axes_of(key: Key) -> tuple[int, ...]:
    """Of the statistic, in what `by_share` gives."""
    return {"head": (-1,), "full": (-2, -1), "heads": (-2,)}.get(key[1] or "head", (-2, -1))


def normalized(y: Tensor, key: Key) -> Tensor:
    """`[..., H, D]`."""
    if key in NORMS:
        return NORMS[key](y)
    return NORMS["rms", "full"](by_share(y, key)).reshape(y.shape)

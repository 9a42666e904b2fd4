"""One attention of a model, ready to be asked: what do q, k and v become if the projections were these?

The module around it is called again with what it was called with, and the outputs of its projections
are replaced. Which of its products are the projections, and which of their columns belong to which
head, is read from gradients at the first token, where RoPE turns nothing.

Shapes: B batch, T tokens, H heads (Hq / Hk), D head width, N columns of a projection.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.audit.trace import Attention, Frame, Trace, run

MOST_DRAWS = 8


class NotUnderstoodError(Exception):
    """This attention cannot be asked, and why."""


@dataclass(frozen=True)
class Columns:
    """Where the heads of one side are in the projections: product `[H, D]` and column `[H, D]`."""

    product: Tensor
    column: Tensor


@dataclass(eq=False)
class Site:
    """An attention and the smallest module that holds its projections.

    Attributes:
        path: of that module.
        module: it, in fp32 or wider, or a copy that is.
        args, kwargs: what it was called with, in that dtype; original_arguments: in the model's own.
        q_heads, kv_heads, head_dim: Hq, Hk, D.
        key_heads: which of the heads of k as multiplied are distinct, `[Hk]`.
        q, k: their columns.
        feeders: the products on which q, k or v depend directly.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original_arguments: tuple[tuple[Any, ...], dict[str, Any]]
    occurrence: int
    attention: Attention
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    key_heads: Tensor = field(default_factory=lambda: torch.zeros(0))
    q: Columns | None = None
    k: Columns | None = None
    feeders: list[int] = field(default_factory=list)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)

    def columns(self, side: str) -> Columns:
        """Those of "q" or "k"."""
        columns = self.q if side == "q" else self.k
        assert columns is not None
        return columns

    def raw_shape(self, side: str) -> tuple[int, ...]:
        """`[B, T, H, D]` of what one side's columns hold."""
        return (self.batch, self.tokens, *self.columns(side).column.shape)

    @property
    def batch(self) -> int:
        """B."""
        return self.attention.q.shape[0]

    @property
    def tokens(self) -> int:
        """T."""
        return self.attention.q.shape[2]

    def ask(
        self, outputs: dict[int, Tensor] | None = None, *, module: nn.Module | None = None
    ) -> Attention:
        """The attention, with these outputs `[B, T, N]` of products; the others are what they were."""
        chosen = self.outputs | (outputs or {})

        def override(index: int, y: Tensor) -> Tensor:
            return chosen[index].to(y).reshape(y.shape) if index in chosen else y

        return self._run(override, module)

    def compose(self, q: Tensor | None = None, k: Tensor | None = None) -> dict[int, Tensor]:
        """Outputs of the projections whose columns of q `[B, T, Hq, D]` and k hold these values."""
        made: dict[int, Tensor] = {}
        for value, columns in ((q, self.q), (k, self.k)):
            if value is None or columns is None:
                continue
            for product in columns.product.unique().tolist():
                here = columns.product == product
                if product not in made:
                    made[product] = self.outputs[product].clone()
                made[product][:, :, columns.column[here]] = value[:, :, here].to(made[product])
        return made

    def q_and_k(
        self, q: Tensor | None = None, k: Tensor | None = None, *, module: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """q `[B, T, Hq, D]` and the distinct heads of k as they are multiplied, from raw ones."""
        with torch.no_grad():
            found = self.ask(self.compose(q, k), module=module)
        return found.q.transpose(1, 2), found.k[:, self.key_heads].transpose(1, 2)

    def _run(
        self,
        override: Any,
        module: nn.Module | None = None,
        products: dict[int, nn.Parameter] | None = None,
    ) -> Attention:
        module = module or self.module
        trace = Trace(module, override, stop_after=self.occurrence + 1)
        args, kwargs = (self.args, self.kwargs) if module is self.module else self.original_arguments
        run(trace, module, args, kwargs)
        if len(trace.attentions) <= self.occurrence:
            raise NotUnderstoodError(f"{self.path} attends only once when it is called again")
        if products is not None:
            products.update({one.index: one.parameter for one in trace.products})
        return trace.attentions[self.occurrence]


def find_sites(attentions: list[Attention]) -> tuple[list[Site], dict[str, str]]:
    """The sites of a run, and why others are none, by path."""
    sites: list[Site] = []
    refused: dict[str, str] = {}
    for attention in attentions:
        if attention.v is None:
            continue
        try:
            sites.append(_site(attention, attentions))
        except NotUnderstoodError as error:
            refused[attention.path] = str(error)
    return sites, refused


def _site(attention: Attention, attentions: list[Attention]) -> Site:
    for frame in reversed(attention.frames):
        if attention.last_product == frame.first_product:
            continue  # no projection in it
        inside = [a for a in attentions if any(f is frame for f in a.frames)]
        occurrence = next(i for i, a in enumerate(inside) if a is attention)
        site = _in_fp32(frame, occurrence, attention)
        if _understand(site):
            return site
    raise NotUnderstoodError("no linear projection was seen to lead to its q and k")


def _in_fp32(frame: Frame, occurrence: int, attention: Attention) -> Site:
    module, args, kwargs = frame.module, frame.args, frame.kwargs
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        module = copy.deepcopy(module).float()
        args, kwargs = _wide(args), _wide(kwargs)
    original = (frame.args, frame.kwargs)
    return Site(frame.path, module, _detached(args), _detached(kwargs), original, occurrence, attention)


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_map(item, change) for item in value)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _wide(value: Any) -> Any:
    low = (torch.float16, torch.bfloat16)

    def change(x: Tensor) -> Tensor:
        if x.dtype not in low:
            return x
        wide = x.float()
        # An additive mask hides by the lowest number of its dtype.
        return wide.masked_fill(x == torch.finfo(x.dtype).min, torch.finfo(torch.float32).min)

    return _map(value, change)


def _detached(value: Any) -> Any:
    return _map(value, lambda x: x.detach())


@torch.enable_grad()
def _understand(site: Site) -> bool:
    """Fill in heads and columns; False if no projection of this module leads to q and k."""
    leaves: dict[int, Tensor] = {}
    products: dict[int, nn.Parameter] = {}

    def cut(index: int, y: Tensor) -> Tensor:
        leaves[index] = y.detach().requires_grad_()
        return leaves[index]

    attention = site._run(cut, products=products)
    q, k, v = attention.q, attention.k, attention.v
    assert v is not None
    site.attention = attention
    B, Hq, T, D = q.shape
    distinct = _distinct_heads(k, v)
    site.q_heads, site.kv_heads, site.head_dim, site.key_heads = Hq, len(distinct), D, distinct
    order = sorted(leaves)
    direct = [_gradients(x, [leaves[i] for i in order]) for x in (q, k, v)]
    if any(all(g is None for g in found) for found in direct[:2]):
        return False
    site.feeders = [i for i, *gs in zip(order, *direct, strict=True) if any(g is not None for g in gs)]
    for index in site.feeders:
        leaf = leaves[index].detach()
        if leaf.numel() % (B * T):
            raise NotUnderstoodError("its projections do not have one row per token")
        site.outputs[index] = leaf.reshape(B, T, -1)
        site.parameters[index] = products[index]
    feeding = [[i for i, g in zip(order, found, strict=True) if g is not None] for found in direct[:2]]
    site.q, site.k = _columns(site, feeding, cut, leaves)
    return True


def _columns(
    site: Site, feeding: list[list[int]], cut: Any, leaves: dict[int, Tensor]
) -> tuple[Columns, Columns]:
    """For q and k the column that moves each entry of the first token most, over several random draws:
    an entry that a clamp holds fast in one is free in another."""
    sizes: list[dict[int, Tensor]] = [{}, {}]
    for draw in range(MOST_DRAWS):
        generator = torch.Generator().manual_seed(draw)
        spread = 1.0 if draw % 2 else 0.1

        def random_cut(
            index: int, y: Tensor, spread: float = spread, generator: torch.Generator = generator
        ) -> Tensor:
            if index in site.outputs:
                y = spread * torch.randn(y.shape, generator=generator).to(y)
            return cut(index, y)

        attention = site._run(random_cut)
        for side, x in enumerate((attention.q, attention.k[:, site.key_heads])):
            _add_sizes(sizes[side], x, {i: leaves[i] for i in feeding[side]})
        if draw >= 1:
            found = [
                _best(site, one, H) for one, H in zip(sizes, (site.q_heads, site.kv_heads), strict=True)
            ]
            if found[0] is not None and found[1] is not None:
                return found[0], found[1]
    raise NotUnderstoodError("the columns of its projections do not match the entries of its heads")


def _add_sizes(sizes: dict[int, Tensor], x_BHTD: Tensor, leaves: dict[int, Tensor]) -> None:
    """Add the |gradient| of each entry of the first token by each column, `[H * D, N]`."""
    B, _, T, _ = x_BHTD.shape
    entries = x_BHTD[:, :, 0].sum(0).flatten()  # rows of the batch do not meet before attention
    rows: dict[int, list[Tensor]] = {i: [] for i in leaves}
    for entry in entries:
        grads = torch.autograd.grad(entry, list(leaves.values()), retain_graph=True, allow_unused=True)
        for (index, leaf), grad in zip(leaves.items(), grads, strict=True):
            grad = torch.zeros_like(leaf) if grad is None else grad
            rows[index].append(grad.reshape(B, T, -1)[:, 0].abs().mean(0))
    for index, found in rows.items():
        total = torch.stack(found)
        total = total / total.max().clamp(min=1e-30)
        sizes[index] = sizes[index] + total if index in sizes else total


def _best(site: Site, sizes: dict[int, Tensor], heads: int) -> Columns | None:
    """The largest of each row; None if two entries share one."""
    order = list(sizes)
    ends = torch.tensor([sizes[i].shape[1] for i in order]).cumsum(0)
    top = torch.cat([sizes[i] for i in order], 1).argmax(1)
    if len(top.unique()) != len(top):
        return None
    place = torch.searchsorted(ends, top, right=True)
    column = top - torch.where(place > 0, ends[(place - 1).clamp(min=0)], 0)
    shape = (heads, site.head_dim)
    return Columns(torch.tensor(order)[place].view(shape), column.view(shape))


@torch.enable_grad()
def _gradients(x: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if not x.requires_grad:
        return [None] * len(leaves)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    found = torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True, allow_unused=True)
    return [g if g is not None and bool(g.any()) else None for g in found]


def _distinct_heads(k: Tensor, v: Tensor) -> Tensor:
    """The first of each run of equal heads: key heads that were repeated for their queries."""
    H = k.shape[1]
    first = [0]
    for head in range(1, H):
        same_v = v.shape[1] == H and torch.equal(v[:, head], v[:, first[-1]])
        if not (torch.equal(k[:, head], k[:, first[-1]]) and same_v):
            first.append(head)
    return torch.tensor(first)

"""One attention of a model, ready to be asked: what do q, k and v become if the projections were these?

The module around it is called again with what it was called with, and the outputs of its projections
are replaced. Which of its products are the projections is read from gradients; which of their columns
belong to which head, from what goes up and down together at the first token, where RoPE turns nothing.

Shapes: B batch, T tokens (Tq / Tk where keys are of another sequence), H heads (Hq / Hk), D head width,
N columns of a projection.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from qknorm.auditor import thresholds as at
from qknorm.auditor.draws import drawn
from qknorm.auditor.guard import Guarded, NotUnderstoodError
from qknorm.auditor.trace import Attention, Frame, Trace, run

STEP = 0.5  # by which an entry of a parameter is moved to see what follows
SAMPLES = 128  # by which a column is told from thousands of others
FEWEST_DRAWS = 16


@dataclass(frozen=True)
class Columns:
    """Where the heads of one side are in the projections: product `[H, D]` and column `[H, D]`."""

    product: Tensor
    column: Tensor


@dataclass(eq=False)
class Site:
    """An attention and the smallest module that holds its projections.

    Attributes:
        path: of the smallest module in which q is projected; a number follows if it attends repeatedly.
        original: the smallest module that holds the projections; module: the same in fp32 or wider.
        args, kwargs: what it was called with, in that dtype; original_arguments: in the model's own.
        q_heads, kv_heads, head_dim: Hq, Hk, D.
        key_heads: which of the heads of k as multiplied are distinct, `[Hk]`.
        key_of: the distinct head of k that each head of q meets, `[Hq]`.
        in_batch: how many heads were merged into the batch before they were multiplied.
        q, k: their columns.
        feeders: the products on which q, k or v depend directly.
        tokens_of: how many rows each of them has for a sequence.
        token_first: those whose rows are `[T, B]`.
        outputs: of the feeders, `[B, T, N]`; shapes: as they came; parameters: their weights.
    """

    original: nn.Module
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original_arguments: tuple[tuple[Any, ...], dict[str, Any]]
    occurrence: int
    attention: Attention
    path: str = ""
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    key_heads: Tensor = field(default_factory=lambda: torch.zeros(0))
    key_of: Tensor = field(default_factory=lambda: torch.zeros(0))
    in_batch: int = 1
    q: Columns | None = None
    k: Columns | None = None
    feeders: list[int] = field(default_factory=list)
    tokens_of: dict[int, int] = field(default_factory=dict)
    token_first: set[int] = field(default_factory=set)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)

    def columns(self, side: str) -> Columns:
        """Those of "q" or "k"."""
        columns = self.q if side == "q" else self.k
        assert columns is not None
        return columns

    def raw_shape(self, side: str) -> tuple[int, ...]:
        """`[B, T, H, D]` of what one side's columns hold."""
        x = self.attention.q if side == "q" else self.attention.k
        return (self.batch, x.shape[2], *self.columns(side).column.shape)

    def raw(self, side: str) -> Tensor:
        """What one side's columns held for the inputs of the model, `[B, T, H, D]`."""
        columns = self.columns(side)
        found = self.attention.q.new_zeros(self.raw_shape(side))
        for product in columns.product.unique().tolist():
            here = columns.product == product
            found[:, :, here] = self.outputs[product][:, :, columns.column[here]].to(found)
        return found

    @property
    def batch(self) -> int:
        """B."""
        return self.attention.q.shape[0]

    def ask(
        self, outputs: dict[int, Tensor] | None = None, *, module: nn.Module | None = None
    ) -> Attention:
        """The attention, with these outputs `[B, T, N]` of products; the others are what they were."""
        chosen = self.outputs | (outputs or {})

        def override(index: int, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
            if index not in chosen:
                return compute()
            cast = torch.is_autocast_enabled(parameter.device.type) or not parameter.is_floating_point()
            x = chosen[index].to(compute() if cast else parameter)  # of its dtype, on its device
            x = x.transpose(0, 1) if index in self.token_first else x
            return x.reshape(self.shapes[index]).clone()  # what the module may write into

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

    def answers(self, side: str, raw: Tensor, *, module: nn.Module | None = None) -> Tensor:
        """q, or the distinct heads of k, as they are multiplied, `[B, T, H, D]` in fp64, for raw ones of
        the same shape."""
        with torch.no_grad():
            found = self.ask(self.compose(**{side: raw}), module=module)
        x = found.q if side == "q" else found.k[:, self.key_heads]
        return x.transpose(1, 2).double()

    def _run(
        self,
        override: Any,
        module: nn.Module | None = None,
        products: dict[int, nn.Parameter] | None = None,
    ) -> Attention:
        module = module or self.module
        trace = Trace(module, override, stop_after=self.occurrence + 1)
        told = (self.args, self.kwargs) if module is self.module else self.original_arguments
        run(trace, module, *_copied(told))
        if len(trace.attentions) <= self.occurrence:
            again = "it attends only once when it is called again"
            raise NotUnderstoodError(trace.failed[0] if trace.failed else again)
        if products is not None:
            products.update({one.index: one.parameter for one in trace.products})
        attention = trace.attentions[self.occurrence]
        attention.to_cpu()
        _split_batch(attention, self.in_batch)
        return attention


def find_sites(attentions: list[Attention], refused: dict[str, list[str]]) -> Iterator[Site]:
    """The sites of a run one by one, for each may hold a copy of its module; why others are none is
    noted by path."""
    seen: Counter[str] = Counter()
    for attention in attentions:
        reasons: list[str] = []
        site = None
        with Guarded(reasons, "it"):
            site = _site(attention, attentions)
        if site is None:
            refused.setdefault(attention.path, []).extend(reasons)
            continue
        seen[site.path] += 1
        if seen[site.path] > 1:
            site.path = f"{site.path} #{seen[site.path]}"
        yield site


def _site(attention: Attention, attentions: list[Attention]) -> Site:
    path = None
    for frame in reversed(attention.frames):
        if attention.last_product == frame.first_product:
            continue  # no projection in it
        inside = [a for a in attentions if any(f is frame for f in a.frames)]
        occurrence = next(i for i, a in enumerate(inside) if a is attention)
        site = _in_fp32(frame, occurrence, attention)
        found = _understand(site)
        path = frame.path if path is None and "q" in found else path
        if path is not None and found == {"q", "k"}:
            site.path = path
            return site
    raise NotUnderstoodError("no linear projection was seen to lead to its q and k")


def _in_fp32(frame: Frame, occurrence: int, attention: Attention) -> Site:
    module, told = frame.module, (frame.args, frame.kwargs)
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        module = copy.deepcopy(module).float()
        told = _wide(told)
    return Site(frame.module, module, *told, (frame.args, frame.kwargs), occurrence, attention)


def _wide(value: Any) -> Any:
    low = (torch.float16, torch.bfloat16)
    made: dict[int, Tensor] = {}

    def change(x: Tensor) -> Tensor:
        if x.dtype not in low:
            return x
        if id(x) not in made:
            # An additive mask hides by the lowest number of its dtype.
            hides = x == torch.finfo(x.dtype).min
            made[id(x)] = x.float().masked_fill(hides, torch.finfo(torch.float32).min)
        return made[id(x)]

    return tree_map_only(Tensor, change, value)


def _copied(value: Any) -> Any:
    """Without a graph, and for the module to write into. What was one tensor stays one: modules ask
    whether their query is their key."""
    made: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda x: made.setdefault(id(x), x.detach().clone()), value)


@contextmanager
def nudged(parameter: nn.Parameter, entry: tuple[int, ...]) -> Iterator[None]:
    """One entry moved, and put back to the bit."""
    with torch.no_grad():
        before = parameter[entry].clone()
        parameter[entry] += STEP
        try:
            yield
        finally:
            parameter[entry] = before


@torch.enable_grad()
def _understand(site: Site) -> set[str]:
    """Of q and k, those to which projections of this module lead; if both, fill in heads and columns."""
    leaves: dict[int, Tensor] = {}
    products: dict[int, nn.Parameter] = {}

    def cut(index: int, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
        leaves[index] = compute().detach().requires_grad_()
        return leaves[index].clone()  # which may be written into, as a leaf may not

    attention = site._run(cut, products=products)
    q, k, v = attention.q, attention.k, attention.v
    assert v is not None
    order = sorted(leaves)
    direct = [_gradients(x, [leaves[i] for i in order]) for x in (q, k, v)]
    led = {name for name, found in zip("qk", direct, strict=False) if any(g is not None for g in found)}
    if len(led) < 2:
        return led
    grads = {i: gs for i, *gs in zip(order, *direct, strict=True) if any(g is not None for g in gs)}
    site.feeders = list(grads)
    site.in_batch = _heads_in_batch(q, [leaves[i] for i in site.feeders])
    _split_batch(attention, site.in_batch)
    site.attention = attention
    q, k, v = attention.q, attention.k, attention.v
    assert v is not None
    B, Hq, T, D = q.shape
    site.key_heads, key_of = _distinct_heads(k, v)
    site.key_of = key_of.repeat_interleave(Hq // len(key_of))
    site.q_heads, site.kv_heads, site.head_dim = Hq, len(site.key_heads), D
    of_query = {i for i, g in zip(order, direct[0], strict=True) if g is not None}
    for index in site.feeders:
        leaf = leaves[index].detach()
        site.tokens_of[index] = T if index in of_query else k.shape[2]
        if leaf.numel() % (B * site.tokens_of[index]):
            raise NotUnderstoodError("its projections do not have one row per token")
        if _is_token_first(q, k, v, leaves[index]):
            site.token_first.add(index)
        site.shapes[index] = leaf.shape
        site.outputs[index] = _rows(site, index, leaf)
        site.parameters[index] = products[index]
    addends = _addends(site, grads)
    for index, (main, factor) in addends.items():
        site.outputs[main] = site.outputs[main] + factor * site.outputs[index]
        site.outputs[index] = torch.zeros_like(site.outputs[index])
    feeding = [[i for i in grads if grads[i][n] is not None and i not in addends] for n in range(2)]
    site.q, site.k = _columns(site, feeding)
    return led


def _addends(site: Site, grads: dict[int, list[Tensor | None]]) -> dict[int, tuple[int, float]]:
    """Products that do nothing but add to one with a larger weight, as those of LoRA do, which one that
    is, and times what they are added: whatever depends on both has proportional gradients."""

    def factor(i: int, main: int) -> float | None:
        ratio = None
        for a, b in zip(grads[i], grads[main], strict=True):
            if a is None and b is None:
                continue
            if a is None or b is None or a.shape != b.shape:
                return None
            ratio = float((a * b).sum() / b.square().sum())
            if float((a - ratio * b).norm()) > at.SAME * float(a.norm()):
                return None
        return ratio

    found = {}
    by_size = sorted(grads, key=lambda i: (-site.parameters[i].numel(), i))
    for n, i in enumerate(by_size):
        for main in by_size[:n]:
            times = None if main in found else factor(i, main)
            if times is not None:
                found[i] = main, times
                break
    return found


def _heads_in_batch(q: Tensor, leaves: list[Tensor]) -> int:
    """How many rows of the batch are heads of one sequence: q has one head, and several rows for each
    sequence of its projections."""
    B, H, T, _ = q.shape
    for leaf in leaves:
        sequences, rest = divmod(leaf.numel() // leaf.shape[-1], T)
        if H > 1 or rest or not 0 < sequences < B or B % sequences:
            continue
        (grad,) = torch.autograd.grad(q[0].sum(), leaf, retain_graph=True, allow_unused=True)
        if grad is not None and bool(grad.any()):
            return B // sequences
    return 1


def _split_batch(attention: Attention, heads: int) -> None:
    """Give an attention the axis of heads that its batch holds, heads side by side."""
    if heads == 1:
        return

    def split(x: Tensor) -> Tensor:
        return x.squeeze(1).unflatten(0, (-1, heads))

    assert attention.v is not None
    attention.q, attention.k, attention.v = map(split, (attention.q, attention.k, attention.v))
    if attention.logits is not None:
        attention.logits = split(attention.logits)
    if attention.sink is not None:
        attention.sink = split(attention.sink)


def _is_token_first(q: Tensor, k: Tensor, v: Tensor, leaf: Tensor) -> bool:
    """Whether the second token of the first sequence is row 1 of B, and not row B."""
    for x in (q, k, v):
        B, _, T, _ = x.shape
        if x.requires_grad and leaf.dim() >= 3 and leaf.shape[:2] == (T, B) and T > 1:
            (grad,) = torch.autograd.grad(x[0, :, 1].sum(), leaf, retain_graph=True, allow_unused=True)
            if grad is not None and bool(grad.any()):
                return bool(grad[1, 0].any())
    return False


def _rows(site: Site, index: int, x: Tensor) -> Tensor:
    """The output of a product as `[B, T, N]`."""
    if index in site.token_first:
        return x.reshape(site.tokens_of[index], site.batch, -1).transpose(0, 1)
    return x.reshape(site.batch, site.tokens_of[index], -1)


@torch.no_grad()
def _columns(site: Site, feeding: list[list[int]]) -> tuple[Columns, Columns]:
    """For q and k the column with which each entry of the first token goes up and down most, whatever
    else it depends on, while random columns are drawn: an entry of a norm with the column of its own, a
    clamped one too. What differs from sequence to sequence and not from draw to draw is taken off."""
    raws: dict[int, list[Tensor]] = {i: [] for some in feeding for i in some}
    answers: tuple[list[Tensor], list[Tensor]] = ([], [])
    for n in range(max(FEWEST_DRAWS, math.ceil(SAMPLES / site.batch) + 1)):
        drawing = {i: drawn(site.outputs[i].shape, 10_000 * n + i) for i in raws}
        attention = site.ask(drawing)
        for i, y in drawing.items():
            raws[i].append(y[:, 0])
        for answer, x in zip(answers, (attention.q, attention.k[:, site.key_heads]), strict=True):
            answer.append(x[:, :, 0].flatten(1).float().nan_to_num())
    found = []
    for some, answer, heads in zip(feeding, answers, (site.q_heads, site.kv_heads), strict=True):
        y = _centred(answer)
        likeness = torch.cat([(y.mT @ _centred(raws[i])).abs() for i in some], 1)  # [H * D, all N]
        best, top = likeness.max(1)
        if float(best.min()) < at.ALIKE or len(top.unique()) != len(top):
            raise NotUnderstoodError(
                "the columns of its projections do not match the entries of its heads"
            )
        ends = torch.tensor([raws[i][0].shape[1] for i in some], device=top.device).cumsum(0)
        place = torch.searchsorted(ends, top, right=True)
        column = top - torch.where(place > 0, ends[(place - 1).clamp(min=0)], 0)
        shape = (heads, site.head_dim)
        found.append(
            Columns(torch.tensor(some, device=top.device)[place].view(shape), column.view(shape))
        )
    return found[0], found[1]


def _centred(draws: list[Tensor]) -> Tensor:
    """Draws `[B, N]` one below the other, without the mean of each sequence, of unit length."""
    x = torch.stack(draws)
    return F.normalize((x - x.mean(0)).flatten(0, 1), dim=0)


@torch.enable_grad()
def _gradients(x: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if not x.requires_grad:
        return [None] * len(leaves)
    found = torch.autograd.grad(
        (x * drawn(x.shape, 0).to(x)).sum(), leaves, retain_graph=True, allow_unused=True
    )
    return [g if g is not None and bool(g.any()) else None for g in found]


def _distinct_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The first of equal heads, repeated for their queries side by side or in turn, and which of these
    each head is."""
    H = k.shape[1]
    first: list[int] = []
    which = []
    for head in range(H):

        def is_same(other: int, head: int = head) -> bool:
            same_v = v.shape[1] == 1 or (v.shape[1] == H and torch.equal(v[:, head], v[:, other]))
            return same_v and torch.equal(k[:, head], k[:, other])

        same = next((i for i, other in enumerate(first) if is_same(other)), len(first))
        if same == len(first):
            first.append(head)
        which.append(same)
    return torch.tensor(first, device=k.device), torch.tensor(which, device=k.device)

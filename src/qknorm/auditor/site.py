"""Run one attention of a model again, with chosen values as the outputs of its projections.

The module around the attention is called again with its original arguments, while the outputs of its
projections are replaced. Gradients show which of its products are the projections. To find the head that
a column of a projection belongs to, the columns are drawn at random, and each entry of q and k is
matched with the column that correlates with it. This is done at the first token, which RoPE does not
rotate.

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
from qknorm.auditor.trace import Frame, SeenAttention, Trace, run

STEP = 0.5  # added to an entry of a parameter, to see what depends on it
SAMPLES = 128  # enough to tell one column from thousands of others by its correlation
FEWEST_DRAWS = 16  # even where a large batch gives SAMPLES in fewer draws


@dataclass(frozen=True)
class Columns:
    """The columns of the projections that hold the heads of q, or the heads of k.

    Attributes:
        product: int `[H, D]`, the index of the product that holds each entry.
        column: int `[H, D]`, the column of each entry in the output of that product.
    """

    product: Tensor
    column: Tensor


@dataclass(eq=False)
class Site:
    """An attention and the smallest module that holds its projections.

    The dictionaries have the indices of products as keys, as `Trace` counts them.

    Attributes:
        original: the smallest module that holds the projections.
        module: the same module, or a copy of it in fp32 if `original` is in a lower precision.
        args: positional arguments with which `module` is called.
        kwargs: keyword arguments with which `module` is called.
        original_arguments: `args` and `kwargs` in the dtype of `original`.
        occurrence: the position of this attention among those of one run of the module, from 0.
        attention: the attention, as it was seen in the run of the whole model or of the module.
        path: the path of the smallest module in which q is projected. If that module attends more than
            once, the path of its second attention ends in " #2", and so on.
        q_heads: Hq.
        kv_heads: Hk.
        head_dim: D.
        key_heads: int `[Hk]`, the distinct heads among the heads of k that are multiplied.
        key_of: int `[Hq]`, for each head of q the distinct head of k with which it is multiplied.
        in_batch: how many heads were merged into the batch axis before q and k were multiplied.
        q: the columns of q.
        k: the columns of k.
        feeders: the products on which q, k or v depends directly.
        tokens_of: the number of rows that each of these products has for a sequence.
        token_first: the products whose output has the axes `[T, B, ...]`.
        outputs: the outputs of these products for the inputs of the model, `[B, T, N]`.
        shapes: the shapes in which the module computed these outputs.
        parameters: the weights of these products.
    """

    original: nn.Module
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original_arguments: tuple[tuple[Any, ...], dict[str, Any]]
    occurrence: int
    attention: SeenAttention
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

    def columns(self, which: str) -> Columns:
        """Return the columns of "q" or of "k"."""
        columns = self.q if which == "q" else self.k
        assert columns is not None
        return columns

    def raw_shape(self, which: str) -> tuple[int, ...]:
        """Return the shape `[B, T, H, D]` of the entries in the columns of "q" or of "k"."""
        x = self.attention.q if which == "q" else self.attention.k
        return (self.batch, x.shape[2], *self.columns(which).column.shape)

    def raw(self, which: str) -> Tensor:
        """Return the projections of q or of k for the inputs of the model.

        Args:
            which: "q" or "k".

        Returns:
            The outputs of the projections, sorted into heads, `[B, T, H, D]`.
        """
        columns = self.columns(which)
        found = self.attention.q.new_zeros(self.raw_shape(which))
        for product in columns.product.unique().tolist():
            here = columns.product == product
            found[:, :, here] = self.outputs[product][:, :, columns.column[here]].to(found)
        return found

    @property
    def batch(self) -> int:
        """The batch size B."""
        return self.attention.q.shape[0]

    def rerun(
        self, outputs: dict[int, Tensor] | None = None, *, module: nn.Module | None = None
    ) -> SeenAttention:
        """Run the module again and return its attention.

        Args:
            outputs: what to put in the place of outputs of products, `[B, T, N]` by index. All other
                `feeders` keep the outputs that they had for the inputs of the model.
            module: the module to run, `original` or `module`; `module` if None.

        Returns:
            The attention, on the CPU, with the graph that autograd recorded.

        Raises:
            NotUnderstoodError: the module attends less often than in the run of the whole model.
        """
        chosen = self.outputs | (outputs or {})

        def override(index: int, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
            if index not in chosen:
                return compute()
            cast = torch.is_autocast_enabled(parameter.device.type) or not parameter.is_floating_point()
            x = chosen[index].to(compute() if cast else parameter)  # takes its dtype and its device
            x = x.transpose(0, 1) if index in self.token_first else x
            return x.reshape(self.shapes[index]).clone()  # because the module may write into it

        return self._run(override, module)

    def compose(self, q: Tensor | None = None, k: Tensor | None = None) -> dict[int, Tensor]:
        """Make outputs of the projections that hold chosen values of q and k.

        Args:
            q: values for the columns of q, `[B, T, Hq, D]`; None leaves them as they were.
            k: values for the columns of k, `[B, T, Hk, D]`; None leaves them as they were.

        Returns:
            The outputs `[B, T, N]` of the products that changed, by index.
        """
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

    def multiplied(self, which: str, raw: Tensor, *, module: nn.Module | None = None) -> Tensor:
        """Return the q or k that enters the product q.k, for chosen outputs of the projections.

        Args:
            which: "q" or "k".
            raw: entries for the columns of q or of k, `[B, T, H, D]`.
            module: the module to run, `original` or `module`; `module` if None.

        Returns:
            q, or the distinct heads of k, in fp64, `[B, T, H, D]`.
        """
        with torch.no_grad():
            found = self.rerun(self.compose(**{which: raw}), module=module)
        x = found.q if which == "q" else found.k[:, self.key_heads]
        return x.transpose(1, 2).double()

    def _run(
        self,
        override: Any,
        module: nn.Module | None = None,
        products: dict[int, nn.Parameter] | None = None,
    ) -> SeenAttention:
        module = module or self.module
        trace = Trace(module, override, stop_after=self.occurrence + 1)
        arguments = (self.args, self.kwargs) if module is self.module else self.original_arguments
        run(trace, module, *_copied(arguments))
        if len(trace.attentions) <= self.occurrence:
            fewer = "it attends less often when it is called again"
            raise NotUnderstoodError(trace.failed[0] if trace.failed else fewer)
        if products is not None:
            products.update({one.index: one.parameter for one in trace.products})
        attention = trace.attentions[self.occurrence]
        attention.to_cpu()
        _split_batch(attention, self.in_batch)
        return attention


def find_sites(
    attentions: list[SeenAttention], refused: list[SeenAttention], not_probed: list[str]
) -> Iterator[Site]:
    """Find the module of each attention that can be called again.

    Args:
        attentions: all attentions of a run, in the order of the run.
        refused: receives the attentions that have a softmax and for which no module was found.
        not_probed: receives a sentence for each refused attention.

    Yields:
        One site after the other. Each may hold a copy of its module, so a caller should not keep them.
    """
    seen: Counter[str] = Counter()
    for attention in attentions:
        site, why = None, list[str]()
        with Guarded(why, attention.path or "the model"):
            site = _site(attention, attentions)
        if site is None:
            refused += [attention] * attention.has_softmax
            not_probed += why * attention.has_softmax
            continue
        seen[site.path] += 1
        if seen[site.path] > 1:
            site.path = f"{site.path} #{seen[site.path]}"
        yield site


def _site(attention: SeenAttention, attentions: list[SeenAttention]) -> Site:
    path = None
    for frame in reversed(attention.frames):
        if attention.last_product == frame.first_product:
            continue  # this module computes no projection before the attention
        inside = [a for a in attentions if any(f is frame for f in a.frames)]
        occurrence = next(i for i, a in enumerate(inside) if a is attention)
        site = _in_fp32(frame, occurrence, attention)
        found = _understand(site)
        path = frame.path if path is None and "q" in found else path
        if path is not None and found == {"q", "k"}:
            site.path = path
            return site
    raise NotUnderstoodError("its q and k do not come from linear projections that were seen")


def _in_fp32(frame: Frame, occurrence: int, attention: SeenAttention) -> Site:
    module, arguments = frame.module, (frame.args, frame.kwargs)
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        module = copy.deepcopy(module).float()
        arguments = _wide(arguments)
    return Site(frame.module, module, *arguments, (frame.args, frame.kwargs), occurrence, attention)


def _wide(value: Any) -> Any:
    """Return the arguments with bf16 and fp16 tensors in fp32. A repeated tensor is cast once."""
    low = (torch.float16, torch.bfloat16)
    made: dict[int, Tensor] = {}

    def change(x: Tensor) -> Tensor:
        if x.dtype not in low:
            return x
        if id(x) not in made:
            # An additive mask holds the lowest number of its dtype where a pair is hidden.
            is_hidden = x == torch.finfo(x.dtype).min
            made[id(x)] = x.float().masked_fill(is_hidden, torch.finfo(torch.float32).min)
        return made[id(x)]

    return tree_map_only(Tensor, change, value)


def _copied(value: Any) -> Any:
    """Copy the tensors of the arguments, without their graphs, since the module may write into them.

    A tensor that is passed twice is copied once, because some modules check whether the query is the
    same object as the key.
    """
    made: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda x: made.setdefault(id(x), x.detach().clone()), value)


@contextmanager
def nudged(parameter: nn.Parameter, entry: tuple[int, ...]) -> Iterator[None]:
    """Add STEP to one entry of a parameter, and restore the entry to the bit afterwards."""
    with torch.no_grad():
        before = parameter[entry].clone()
        parameter[entry] += STEP
        try:
            yield
        finally:
            parameter[entry] = before


@torch.enable_grad()
def _understand(site: Site) -> set[str]:
    """Find the projections of q and k in the module of a site, and fill in the heads and the columns.

    Returns:
        Those of "q" and "k" that depend on a projection in this module. The site is filled in only if
        both do.
    """
    leaves: dict[int, Tensor] = {}
    products: dict[int, nn.Parameter] = {}

    def cut(index: int, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor:
        leaves[index] = compute().detach().requires_grad_()
        return leaves[index].clone()  # because autograd forbids that the module writes into a leaf

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
    """Find the products that are only added to the output of a larger product, as LoRA does.

    The gradients of q, k and v with respect to such a product and to the larger one are proportional.

    Returns:
        For each such product, the index of the larger product and the factor of the addition.
    """

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
    """Return how many heads were merged into the batch axis, 1 if none were.

    If they were, q has one head and several rows of the batch for each sequence of its projections.
    """
    B, H, T, _ = q.shape
    for leaf in leaves:
        sequences, rest = divmod(leaf.numel() // leaf.shape[-1], T)
        if H > 1 or rest or not 0 < sequences < B or B % sequences:
            continue
        (grad,) = torch.autograd.grad(q[0].sum(), leaf, retain_graph=True, allow_unused=True)
        if grad is not None and bool(grad.any()):
            return B // sequences
    return 1


def _split_batch(attention: SeenAttention, heads: int) -> None:
    """Move heads from the batch axis to the axis of heads. The heads of a sequence are consecutive rows
    of the batch."""
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
    """Whether the output of a product has the axes `[T, B, ...]`, so that token 1 of sequence 0 has the
    index `[1, 0]`."""
    for x in (q, k, v):
        B, _, T, _ = x.shape
        if x.requires_grad and leaf.dim() >= 3 and leaf.shape[:2] == (T, B) and T > 1:
            (grad,) = torch.autograd.grad(x[0, :, 1].sum(), leaf, retain_graph=True, allow_unused=True)
            if grad is not None and bool(grad.any()):
                return bool(grad[1, 0].any())
    return False


def _rows(site: Site, index: int, x: Tensor) -> Tensor:
    """Return the output of a product as `[B, T, N]`."""
    if index in site.token_first:
        return x.reshape(site.tokens_of[index], site.batch, -1).transpose(0, 1)
    return x.reshape(site.batch, site.tokens_of[index], -1)


@torch.no_grad()
def _columns(site: Site, feeding: list[list[int]]) -> tuple[Columns, Columns]:
    """Match each entry of q and k at the first token with a column of the projections.

    Random columns are drawn, and an entry is matched with the column that has the largest correlation
    with it. An entry behind a norm or a clamp depends on other columns too, but most on its own. The
    mean over draws is subtracted for each sequence, since what differs only between sequences is no
    effect of the drawn columns.
    """
    raws: dict[int, list[Tensor]] = {i: [] for some in feeding for i in some}
    multiplied: tuple[list[Tensor], list[Tensor]] = ([], [])
    for n in range(max(FEWEST_DRAWS, math.ceil(SAMPLES / site.batch) + 1)):
        drawing = {i: drawn(site.outputs[i].shape, 10_000 * n + i) for i in raws}
        attention = site.rerun(drawing)
        for i, y in drawing.items():
            raws[i].append(y[:, 0])
        for seen, x in zip(multiplied, (attention.q, attention.k[:, site.key_heads]), strict=True):
            seen.append(x[:, :, 0].flatten(1).float().nan_to_num())
    found = []
    for some, seen, heads in zip(feeding, multiplied, (site.q_heads, site.kv_heads), strict=True):
        y = _centred(seen)
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
    """Stack draws `[B, N]` as rows, subtract the mean over draws, and give each column unit length."""
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
    """Find the distinct heads of k, since grouped-query attention may repeat a head before the product.

    Returns:
        The index of the first of each set of equal heads, int `[Hk]`, and for each head of k its
        position in this list.
    """
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

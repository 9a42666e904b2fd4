"""Which norms made q and k of a layer: those whose forward ran before the layer's attention did.

Every module that could be such a norm says when it is called. What was called, for which of q and k by
its name or by its place in the order, and whether q and k have the RMS that its gains give, decides.

The gains are read while the norm's own forward runs, where its parameters are whole: outside of it they
may be sharded over ranks, freed, or on their way. This is done once in an observed step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qknorm.monitor.forward import ATTRIBUTE, Switch, Watcher, watch
from qknorm.monitor.gains import Gains, gains_of
from qknorm.monitor.operators import TOKEN
from qknorm.nn import QKNorm

# Names under which wrappers of torch keep what they wrap.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Three roundings to bf16, of q, k and their norm's result, may pass a bound by this factor.
ROUNDING = (1 + 2.0**-8) ** 3
# How far the RMS of q and k may be from what the gains of an unnamed norm say, for its eps.
SLACK = 0.05


class Norm(Watcher):
    """A module that may normalise q, k or both.

    Attributes:
        gains: by phase; None if it did not answer.
        trouble: why it did not.
        layers: those that it may serve.
    """

    def __init__(self, module: nn.Module, switch: Switch) -> None:
        super().__init__(module, switch)
        self.around = _call_and_ask
        self.gains: dict[str, Gains | None] = {}
        self.trouble: str | None = None
        self.layers: list[Norms] = []

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Ask it. What it does not answer is not known."""
        try:
            work(*args)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self.trouble = f"its norm does not tell its gains: {type(error).__name__}: {first}"

    def ask(self) -> None:
        """It is called: tell the layers, and read its gains, once."""
        for layer in self.layers:
            layer.called[self] += 1
        phase = "train" if self.module.training else "eval"
        if phase not in self.gains:
            self.gains[phase] = None  # whatever comes of it, it is asked once
            with torch.inference_mode(False), torch.no_grad():
                self.gains[phase] = gains_of(self.module)


def _call_and_ask(
    norm: Norm, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    torch.ops.qknorm.monitor_ask(TOKEN, norm.handle)
    return original(module, *args, **kwargs)


class Heads(NamedTuple):
    """q or k of one layer: how many heads of which width, and the sums of their RMS, or None if these
    are of q and k before their norm. See `fields.FIELDS`."""

    number: int
    width: int
    sums: Tensor | None  # [3, number]: RMS, its square, rows


class Norms:
    """The norms of one layer, by the names under which the layer or the module around it holds them.

    Attributes:
        paths: of every module that may be one.
        called: how often each was called since the layer attended last.
        users: by phase, how often each was called before the layer attended first.
    """

    def __init__(self, paths: dict[Norm, str]) -> None:
        self.paths = paths
        self.called: Counter[Norm] = Counter()
        self.users: dict[str, Counter[Norm]] = {}
        for norm in paths:
            norm.layers.append(self)

    def attend(self, phase: str) -> None:
        """The layer attends: what was called so far may have made its q and k. After the first time that
        would include what normalised the output of the attention before."""
        if self.called:
            self.users.setdefault(phase, self.called.copy())
        self.called.clear()

    def trouble(self, phase: str) -> str | None:
        """Why the gains are not known."""
        sides = self._sides(phase, None)
        used = () if sides is None else (*sides.q, *sides.k)
        return next((norm.trouble for norm in used if norm.trouble is not None), None)

    def clear(self) -> None:
        """Begin anew, as after a step."""
        self.called.clear()
        self.users.clear()
        for norm in self.paths:
            norm.gains.clear()
            norm.trouble = None

    def found(self, phase: str, q: Heads, k: Heads, scale: float) -> Tensor | None:
        """Largest |gain| of q and of k, and the largest |logit| that they allow under any rotation, inf
        if that is not known: `[3]`, fp32; -inf where these norms did not make q and k. None if the gains
        are not known."""
        sides = self._sides(phase, q.width)
        if sides is None:
            return None
        of_q = [norm.gains.get(phase) for norm in sides.q]
        of_k = [norm.gains.get(phase) for norm in sides.k]
        answers = [answer for answer in (*of_q, *of_k) if answer is not None]
        if len(answers) < len(of_q) + len(of_k):
            return None
        device = answers[0].of_q.device
        q_gains = [answer.of_q.to(device) for answer in answers[: len(of_q)]]
        k_gains = [answer.of_k.to(device) for answer in answers[len(of_q) :]]
        reach_q = _reach(q_gains, q, is_per_head=_is_numbered(sides.q, self.paths))
        reach_k = _reach(k_gains, k, is_per_head=_is_numbered(sides.k, self.paths))
        bound = abs(scale) * (reach_q * reach_k.repeat_interleave(len(reach_q) // len(reach_k))).amax()
        is_known = _below(q_gains, q) & _below(k_gains, k)
        for answer in answers:
            is_known = is_known & ~answer.is_shifted.to(device)
        bound = torch.where(is_known, bound, torch.inf)
        tops = [torch.stack([gain.amax() for gain in gains]).amax() for gains in (q_gains, k_gains)]
        facts = torch.stack([*tops, bound])
        if sides.is_named:
            return facts
        fits = _is_of(q_gains, q) & _is_of(k_gains, k)
        return torch.where(fits, facts, -torch.inf)

    def _sides(self, phase: str, width: int | None) -> _Sides | None:
        """Those of q and those of k among what was called; None if nothing was called for both. Those
        without a telling name have to be norms over `width` entries."""
        users = self.users.get(phase)
        if not users:
            return None
        told = {norm: _told(self.paths[norm], norm.module) for norm in users}
        q = [norm for norm, side in told.items() if "q" in side]
        k = [norm for norm, side in told.items() if "k" in side]
        if q or k:
            return _Sides(q, k, True) if q and k else None
        # Without a name: one for both, one for each in the usual order, or any of them for either.
        unnamed = [
            norm
            for norm, side in told.items()
            if side == "" and (answer := norm.gains.get(phase)) and answer.of_q.shape == (width,)
        ]
        if sum(users[norm] for norm in unnamed) < 2:
            return None
        if len(unnamed) == 2:
            return _Sides(unnamed[:1], unnamed[1:], False)
        return _Sides(unnamed, unnamed, False)


class _Sides(NamedTuple):
    """The norms of q and those of k, and whether their names said so."""

    q: list[Norm]
    k: list[Norm]
    is_named: bool


def _told(path: str, module: nn.Module) -> str:
    """ "q", "k" or "qk" if a name says what the norm is for, "-" if it is for something else, "" if no
    name tells."""
    if isinstance(module, QKNorm):
        return "qk"
    for name in reversed(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", path)):
        word = re.sub(r"^(layer|rms|norm|ln)+|(layer|rms|norm|ln|n)+$", "", name.lower())
        if word in _SIDES:
            return _SIDES[word]
    return ""


_SIDES = {
    **dict.fromkeys(("q", "qs", "query", "queries"), "q"),
    **dict.fromkeys(("k", "ks", "key", "keys"), "k"),
    **dict.fromkeys(("qk", "kq"), "qk"),
    **dict.fromkeys(("v", "vs", "value", "values", "kv", "qkv", "out", "output", "o"), "-"),
}


def _is_numbered(norms: list[Norm], paths: dict[Norm, str]) -> bool:
    """Whether they stand in one list, as where there is one for each head."""
    return len({re.sub(r"\d+", "", paths[norm]) for norm in norms}) == 1


def _reach(gains: list[Tensor], heads: Heads, *, is_per_head: bool) -> Tensor:
    """`[heads.number]`: how long a vector of each head may be. One statistic over n entries lets the
    square of one of them be n, also where these are of all heads."""
    if is_per_head and len(gains) == heads.number:
        gains = [torch.stack(gains)]
    reach = []
    for gain in gains:
        flat = gain.flatten()
        is_whole = flat.numel() % heads.width == 0
        largest = flat.view(-1, heads.width).amax(-1) if is_whole else flat.amax()[None]
        if len(largest) != heads.number:
            largest = largest.amax().expand(heads.number)
        reach.append(largest * gain.shape[-1] ** 0.5)
    return torch.stack(reach).amax(0)


def _below(gains: list[Tensor], heads: Heads) -> Tensor:
    """Whether the vectors are no longer than the gains allow: something else may stretch them after
    their norm. Bool `[]`."""
    top = torch.stack([gain.amax() for gain in gains]).amax()
    if heads.sums is None:
        return top > -torch.inf
    _, squares, rows = heads.sums
    if all(gain.shape[-1] == heads.width for gain in gains):
        mean_square = (squares / rows.clamp(min=1)).amax()
    else:
        mean_square = squares.sum() / rows.sum().clamp(min=1)
    return mean_square <= (top * ROUNDING).square().to(mean_square)


def _is_of(gains: list[Tensor], heads: Heads) -> Tensor:
    """Whether the vectors of every head have the RMS that a norm per head with these gains gives: it
    lies between the smallest and the largest |gain|, and so does not spread further. Bool `[]`."""
    low = torch.stack([gain.amin() for gain in gains]).amin()
    top = torch.stack([gain.amax() for gain in gains]).amax()
    if heads.sums is None or any(gain.shape[-1] != heads.width for gain in gains):
        return low > torch.inf
    low, top = low.to(heads.sums), top.to(heads.sums)
    sums, squares, rows = heads.sums
    mean = sums / rows.clamp(min=1)
    deviation = (squares / rows.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
    fits = (mean >= low * (1 - SLACK)) & (deviation <= (top - low) / 2 + SLACK * mean)
    return (fits | (rows == 0)).all()


def install(
    module: nn.Module, around: Iterable[nn.Module], switch: Switch
) -> tuple[Norms, Callable[[], None]]:
    """Watch whatever may be a norm of q or k of an attention module, and how to undo it.

    It may stand anywhere inside the module, or in one of those `around` it under a name that says what
    it is for.
    """
    found = dict(_norms_in(module, inside=True))
    for holder in around:
        found |= {
            m: path for m, path in _norms_in(holder, inside=False) if _told(path, m) in ("q", "k", "qk")
        }
    with ExitStack() as undo:
        norms = Norms({_watched(m, switch, undo): path for m, path in found.items()})
        return norms, undo.pop_all().close


def _watched(module: nn.Module, switch: Switch, undo: ExitStack) -> Norm:
    known = module.__dict__.get(ATTRIBUTE)
    if isinstance(known, Norm):  # of two layers
        return known
    norm = Norm(module, switch)
    module.__dict__[ATTRIBUTE] = norm
    undo.callback(module.__dict__.pop, ATTRIBUTE, None)
    undo.callback(watch(norm))
    return norm


def _norms_in(holder: nn.Module, prefix: str = "", *, inside: bool) -> Iterator[tuple[nn.Module, str]]:
    """The innermost modules that look like norms, with their paths. Not inside: only children, and what
    lists of modules and modules that look like norms hold."""
    for name, child in holder.named_children():
        module, path = _bare(child), f"{prefix}{name}"
        if isinstance(module, torch.jit.ScriptModule):
            continue
        is_norm = _is_norm(name, module)
        below: list[tuple[nn.Module, str]] = []
        if inside or is_norm or isinstance(module, nn.ModuleList | nn.ModuleDict):
            below = list(_norms_in(module, f"{path}.", inside=inside))
        yield from below or ([(module, path)] if is_norm else [])


# What is called a norm and is none of single vectors.
_OTHERS = (nn.Identity, nn.modules.batchnorm._NormBase, nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _is_norm(name: str, module: nn.Module) -> bool:
    """By what it is called: nothing else tells a norm before it runs."""
    names = (name, *(cls.__name__ for cls in type(module).__mro__))
    return not isinstance(module, _OTHERS) and any(_NAME.search(name) for name in names)


_NAME = re.compile(r"norm|(^|_)(ln|[qk]n)(_|$)|rms", re.IGNORECASE)


def _bare(module: nn.Module) -> nn.Module:
    while name := next((name for name in WRAPPERS if name in module._modules), None):
        module = module.get_submodule(name)
    return module

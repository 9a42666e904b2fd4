"""The QK-norm of a layer: which modules it is, and the gains that they apply.

A norm is asked while its own forward runs, where its parameters are whole: outside of it they may be
sharded over ranks, freed, or on their way. In an observed step, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qknorm.monitor.forward import ATTRIBUTE, Switch, Watcher, watch
from qknorm.monitor.operators import TOKEN
from qknorm.nn import QKNorm

# Names under which wrappers of torch keep what they wrap.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Gains(NamedTuple):
    """What a norm answered: |gain| of q and of k, of which the last axis is that of the statistic, and
    whether it also adds a bias, bool `[]`."""

    of_q: Tensor
    of_k: Tensor
    is_shifted: Tensor


class Norm(Watcher):
    """A module that normalises q, k or both.

    Attributes:
        gains: by phase; None if it did not answer.
        trouble: why it did not.
    """

    def __init__(self, module: nn.Module, switch: Switch) -> None:
        super().__init__(module, switch)
        self.around = _ask_and_run
        self.gains: dict[str, Gains | None] = {}
        self.trouble: str | None = None

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Ask it. What it does not answer is not known."""
        try:
            work(*args)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self.trouble = f"its norm does not tell its gains: {type(error).__name__}: {first}"

    def ask(self) -> None:
        """Look at its gains, in its own call."""
        phase = "train" if self.module.training else "eval"
        if phase not in self.gains:
            self.gains[phase] = None  # whatever comes of it, it is asked once
            with torch.inference_mode(False), torch.no_grad():
                self.gains[phase] = _gains(self.module)


def _ask_and_run(
    norm: Norm, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    torch.ops.qknorm.monitor_ask(TOKEN, norm.handle)
    return original(module, *args, **kwargs)


class Norms:
    """Those of one layer, a list for q and one for k: a norm may be a module for each head."""

    def __init__(self, q: list[Norm], k: list[Norm]) -> None:
        self.q, self.k = q, k

    @property
    def trouble(self) -> str | None:
        """Why the gains are not known."""
        return next((norm.trouble for norm in (*self.q, *self.k) if norm.trouble is not None), None)

    def clear(self) -> None:
        """Ask anew."""
        for norm in (*self.q, *self.k):
            norm.gains.clear()
            norm.trouble = None

    def found(self, phase: str, *, heads: int, kv_heads: int, width: int, scale: float) -> Tensor | None:
        """Largest |gain| of q and of k, and the largest |logit| that they allow under any rotation, -inf
        if that is not known: `[3]`, fp32. None if the gains are not known."""
        answers = [[norm.gains.get(phase) for norm in side] for side in (self.q, self.k)]
        found = [[answer for answer in side if answer is not None] for side in answers]
        if any(len(some) < len(side) for some, side in zip(found, answers, strict=True)):
            return None
        sides = [_joined([answer.of_q for answer in found[0]]), _joined([a.of_k for a in found[1]])]
        sides[1] = sides[1].to(sides[0].device)
        q, k = (_reach(g, n, width) for g, n in zip(sides, (heads, kv_heads), strict=True))
        bound = abs(scale) * (q * k.repeat_interleave(len(q) // len(k))).amax()
        for answer in (*found[0], *found[1]):
            bound = torch.where(answer.is_shifted, -torch.inf, bound)
        return torch.stack([*(gain.amax() for gain in sides), bound])


def _joined(gains: list[Tensor]) -> Tensor:
    return gains[0] if len(gains) == 1 else torch.stack(gains)


def _reach(gain: Tensor, heads: int, width: int) -> Tensor:
    """`[heads]`: how long a vector of each head may be. One statistic over n entries lets the square of
    one of them be n, also where these are of all heads."""
    n = gain.shape[-1]
    flat = gain.flatten()
    largest = flat.view(-1, width).amax(-1) if flat.numel() % width == 0 else flat.amax()[None]
    if len(largest) != heads:
        largest = largest.amax().expand(heads)
    return largest * n**0.5


def install(holders: Iterable[nn.Module], switch: Switch) -> tuple[Norms | None, Callable[[], None]]:
    """Watch the norms of q and k that the first of the modules holds that holds any; and how to undo it.

    They are its children of which one normalises both, as `QKNorm` does, or whose names differ in q
    and k only, or in query and key.
    """
    with ExitStack() as undo:
        for holder in holders:
            pair = _pair(holder)
            if pair is None:
                continue
            sides: list[list[Norm]] = []
            for norm in pair:
                parts = getattr(norm, "norms", None)  # one norm per head
                modules = list(parts) if isinstance(parts, nn.ModuleList) else [norm]
                sides.append([_watched(_bare(module), switch, undo) for module in modules])
            return Norms(*sides), undo.pop_all().close
    return None, undo.close


def _watched(module: nn.Module, switch: Switch, undo: ExitStack) -> Norm:
    known = module.__dict__.get(ATTRIBUTE)
    if isinstance(known, Norm):  # of two layers, or of q and k
        return known
    norm = Norm(module, switch)
    module.__dict__[ATTRIBUTE] = norm
    undo.callback(module.__dict__.pop, ATTRIBUTE, None)
    undo.callback(watch(norm))
    return norm


def _pair(holder: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    norms = {name: child for name, child in holder.named_children() if _is_norm(name, _bare(child))}
    for name, norm in norms.items():
        if isinstance(_bare(norm), QKNorm):
            return norm, norm
        for q, k in (("query", "key"), ("q", "k")):
            other = norms.get(name.replace(q, k, 1)) if q in name else None
            if other is not None:
                return norm, other
    return None


def _is_norm(name: str, module: nn.Module) -> bool:
    """By what it is called: nothing else tells a norm."""
    names = (name, *(cls.__name__ for cls in type(module).__mro__))
    return not isinstance(module, torch.jit.ScriptModule) and any("norm" in n.lower() for n in names)


def _bare(module: nn.Module) -> nn.Module:
    while name := next((name for name in WRAPPERS if name in module._modules), None):
        module = module.get_submodule(name)
    return module


def _gains(norm: nn.Module) -> Gains:
    if not isinstance(norm, QKNorm):
        return _probed(norm)
    of_q, of_k = (g.detach().abs().float() for g in norm.effective_gains())
    if norm.dialect.statistic == "full":
        of_q, of_k = of_q.flatten(), of_k.flatten()
    return Gains(of_q, of_k, of_q.new_zeros((), dtype=torch.bool))


def _probed(norm: nn.Module) -> Gains:
    """The norm is asked for the answer to a large vector of mean 0, beside which its eps is nothing, and
    to the opposite vector, which tells gain from bias."""
    weight = _weight(norm)
    x = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
    x[..., 1::2] = -1.0
    if x.shape[-1] % 2:
        x[..., -3:] = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float32)
    unit = x.abs() / x.square().mean(-1, keepdim=True).sqrt()
    x = (x * 2.0**7).to(weight.dtype)  # fp16 holds its square
    with torch.autocast(weight.device.type, enabled=False):
        plus, minus = (norm.forward(v[None])[0].float() for v in (x, -x))
    if plus.shape != weight.shape:
        raise ValueError(f"a vector of shape {tuple(weight.shape)} comes out as {tuple(plus.shape)}")
    gain = ((plus - minus) / 2).abs() / unit
    return Gains(gain, gain, (plus + minus).abs().amax() > 1e-6 * plus.abs().amax())


def _weight(norm: nn.Module) -> Tensor:
    """What has the shape and the dtype of its gains. A wrapper may keep it beside the parameters."""
    candidates = (getattr(norm, "weight", None), *norm._parameters.values(), *vars(norm).values())
    for value in candidates:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] > 1:
            return value
    shape = getattr(norm, "normalized_shape", None)
    if shape is None:
        raise ValueError(f"{type(norm).__name__} has no weight")
    return torch.empty(shape, dtype=torch.float32, device="cpu")

"""One attention layer under observation: what its tap tells, and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.monitor import fields, measure, operators
from qknorm.monitor.fields import FIELD
from qknorm.monitor.forward import Switch, Watcher
from qknorm.monitor.norms import Heads, Norms
from qknorm.monitor.operators import TOKEN
from qknorm.monitor.reduce import FACTS, Key, Part, Place
from qknorm.monitor.view import MaskOf, ScoreMod, score_modified, softcap
from qknorm.ops import Stats
from qknorm.spec import default_scale

LOG = logging.getLogger("qknorm")


class Teller:
    """What a tap says of a call, in code that may be traced: it writes no Python object.

    Attributes:
        handle: of the layer that is called; None for the one whose forward runs.
    """

    handle: Tensor | None = None

    def tell(self, translate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Let `translate(self, *args, **kwargs)` say it. An error is noted and never the training's."""
        try:
            translate(self, *args, **kwargs)
        except Exception as error:
            if torch.compiler.is_compiling():
                self.refuse("it is called in a way that is not understood")
            else:
                self.refuse(_sentence(error))

    def refuse(self, why: str) -> None:
        """The call cannot be measured."""
        torch.ops.qknorm.monitor_note(TOKEN, self.handle, why)

    def observe(
        self,
        q: Tensor,
        k: Tensor,
        *,
        mask: Tensor | MaskOf | None = None,
        documents: Tensor | None = None,
        sink: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        cross: bool = False,
    ) -> None:
        """One call: q `[B, Hq, Tq, D]` and k `[B, Hk, Tk, D]` as they enter the product; see
        `measure.Seen`."""
        device = q.device.type
        if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
            # The product that follows rounds them so.
            low = torch.get_autocast_dtype(device)
            q, k = q.to(low), k.to(low)
        if torch.compiler.is_compiling():  # no operator takes a function
            if score_mod is not None:
                self.refuse(
                    "score_mod inside a compiled model cannot be measured; compile flex_attention"
                )
                return
            if mask is not None and not isinstance(mask, Tensor):
                mask = mask(*(torch.arange(x.shape[2], device=q.device) for x in (q, k)))
        call = (q.detach(), k.detach(), mask, documents, sink, causal, window, scale, softcap)
        if score_mod is None and (mask is None or isinstance(mask, Tensor)):
            torch.ops.qknorm.monitor_measure(TOKEN, self.handle, *call, cross)
        else:
            operators.tell(self.handle, "measure", *call, cross, score_mod)


class Layer(Watcher, Teller):
    """A layer: its tap tells, and while the model runs the operators call `measure`, `take` and `note`.

    Attributes:
        name: the module's path in the model.
        is_fused: its statistics are those of a fused pass, over q and k before their norm.
        norms: its QK-norm, as far as it can be asked.
        heads, kv_heads, width: Hq and Hk of this rank and D, once it was called.
        buffers: of training and evaluation since the last `clear`, see `measure.FIELDS`.
        is_sampled: some of it is of sampled rows.
        trouble: why a call was not measured.
        unseen: why no call of it can be seen.
    """

    handle: Tensor

    def __init__(self, name: str, module: nn.Module, switch: Switch, *, is_fused: bool) -> None:
        super().__init__(module, switch)
        self.name, self.is_fused = name, is_fused
        self.norms: Norms | None = None
        self.heads = self.kv_heads = self.width = 0
        self.scale = 0.0
        self.buffers: dict[str, Tensor] = {}
        self.is_sampled = False
        self.trouble: str | None = None
        self.unseen: str | None = None
        self._told: set[str] = set()

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Do a part of the observation. An error costs the call's record, and never the training."""
        try:
            work(*args)
        except Exception as error:
            self.note(_sentence(error))

    def note(self, why: str) -> None:
        """Something could not be measured. Said once in the log."""
        self.trouble = why
        if why not in self._told and len(self._told) < 8:
            self._told.add(why)
            LOG.warning("%s: something was not measured: %s", self.name, why)

    def measure(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | MaskOf | None,
        documents: Tensor | None,
        sink: Tensor | None,
        causal: bool,
        window: int | None,
        scale: float | None,
        limit: float | None,
        cross: bool,
        score_mod: ScoreMod | None = None,
    ) -> None:
        """Add one call, see `Teller.observe`; `limit` is that of a soft-cap."""
        if q.numel() == 0 or k.numel() == 0:
            return
        change = None if score_mod is None else score_modified(score_mod)
        seen = measure.Seen(
            scale=default_scale(q.shape[3]) if scale is None else scale,
            mask=mask,
            documents=documents,
            sink=sink,
            causal=causal,
            window=window,
            change=change if limit is None else softcap(limit),
            change_hides=score_mod is not None,
            sample=self.switch.sample,
            cross=cross,
        )
        self._add(q, k, scale, lambda: measure.of_call(q, k, seen))
        self.is_sampled |= seen.sample is not None and seen.sample < q.shape[2]

    def wants(self) -> bool:
        """Whether this step is observed."""
        return self.switch.on

    def add(self, q: Tensor, k: Tensor, stats: Stats, scale: float | None) -> None:
        """What a fused pass found of q and k, which are seen before norm and RoPE. May be traced."""
        self.tell(_add_fused, q, k, stats, scale)

    def take(self, q: Tensor, k: Tensor, scale: float | None, *found: Tensor) -> None:
        """Add what a fused pass found."""
        self._add(q, k, scale, lambda: measure.of_fused_call(q, k, *found))

    def _add(self, q: Tensor, k: Tensor, scale: float | None, measured: Callable[[], Tensor]) -> None:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            self.note("it was recorded into a CUDA graph, which runs without the monitor")
            return
        if self.heads not in (0, q.shape[1]):
            self.note(
                f"it is called with {self.heads} heads and with {q.shape[1]}: only the first count"
            )
            return
        found = measured()
        self.heads, self.kv_heads, self.width = q.shape[1], k.shape[1], q.shape[3]
        self.scale = default_scale(self.width) if scale is None else scale
        phase = "train" if self.module.training else "eval"
        if self.norms is not None:
            self.norms.attend(phase)
        if phase in self.buffers:
            fields.merge_(self.buffers[phase], found)
        else:
            self.buffers[phase] = found

    def parts(self, shard: int) -> dict[Key, Part]:
        """What was seen since the last `clear`; of the ranks among which heads are split this is one."""
        Hq, Hk = self.heads, self.kv_heads
        place = Place(shard * Hq, Hq, shard * Hk, Hk, self.is_fused)
        return {
            Key(self.name, phase): Part(buffer=buffer, facts=self._facts(phase, buffer), place=place)
            for phase, buffer in self.buffers.items()
        }

    def _facts(self, phase: str, buffer: Tensor) -> Tensor:
        facts = buffer.new_full((FACTS,), -torch.inf)  # which rank it is, `reduce` tells
        facts[3] = float(self.is_sampled)
        if self.norms is not None:
            self.attempt(self._add_gains, facts, phase, buffer)
        return facts

    def _add_gains(self, facts: Tensor, phase: str, buffer: Tensor) -> None:
        assert self.norms is not None

        def heads(name: str, count: int) -> Heads:
            at = FIELD[f"{name}_rms"]
            return Heads(count, self.width, None if self.is_fused else buffer[at : at + 3, :count])

        found = self.norms.found(phase, heads("q", self.heads), heads("k", self.kv_heads), self.scale)
        if found is not None:
            facts[:3] = found

    def note_of_record(self, phase: str) -> str | None:
        """Why something is missing in what was recorded of it."""
        return self.trouble or (None if self.norms is None else self.norms.trouble(phase))

    @property
    def silence(self) -> str:
        """Why nothing was recorded of it."""
        usual = "it was not called, or every query of it was padding or saw no key"
        return self.unseen or self.trouble or ("its tap saw no call" if self.heads == 0 else usual)

    def clear(self) -> None:
        """Begin anew, as after a step."""
        self.buffers.clear()
        self.is_sampled, self.trouble = False, None
        if self.norms is not None:
            self.norms.clear()


def _add_fused(layer: Teller, q: Tensor, k: Tensor, stats: Stats, scale: float | None) -> None:
    torch.ops.qknorm.monitor_take(
        TOKEN,
        layer.handle,
        q.detach(),
        k.detach(),
        scale,
        stats.max_logit,
        stats.entropy_sum,
        stats.ratio_sum,
        stats.sink_sum,
        stats.row_count,
        stats.ratio_count,
    )


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

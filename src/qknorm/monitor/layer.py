"""One attention layer under observation: its name, its buffers, and what its tap reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.monitor.measure import MAX_HEADS, MaskOf, ScoreMod, new_buffer, observe_functions
from qknorm.ops import Stats

# Set on a module while it is observed. A plain attribute: no hook, which a compiled model may never run.
ATTRIBUTE = "_qknorm_layer"


@dataclass(eq=False)
class Switch:
    """Shared by the layers of one monitor: whether this step is observed, and how."""

    on: bool = True
    rows: int | None = None


@dataclass(eq=False)
class Layer:
    """Where a tap puts what it sees.

    Attributes:
        name: the module's path in the model.
        tap: which kind of tap serves it.
        heads: Hq of this rank.
        kv_heads: Hk of this rank.
        buffers: training and evaluation, see `measure.FIELDS`, MAX_HEADS wide: they exist before the
            first call shows the number of heads, so that no compiled graph depends on when they came.
        exact: False once rows were sampled.
        trouble: why a call could not be measured.
        failed: a call raised an error; nothing more is measured.
    """

    name: str
    module: nn.Module
    tap: str
    switch: Switch
    heads: int = 0
    kv_heads: int = 0
    scale: float | None = None
    buffers: dict[str, Tensor] = field(init=False)
    exact: bool = True
    trouble: str | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        parameter = next(self.module.parameters(), None)
        device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
        with torch.inference_mode(False):
            self.buffers = {phase: new_buffer(MAX_HEADS, device) for phase in ("train", "eval")}

    # A copy of a watched module, in memory or in a file, is not watched.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def attempt(self, observe: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Observe a call, unless this step is not observed. An error ends the watching of this layer,
        and never the training."""
        if not self.switch.on or self.failed:
            return
        if torch.compiler.is_compiling():
            observe(*args, **kwargs)
            return
        try:
            observe(*args, **kwargs)
        except Exception as error:
            self.failed = True
            self.trouble = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            logging.getLogger("qknorm").warning("%s is watched no more: %s", self.name, self.trouble)

    def observe(
        self,
        q: Tensor,
        k: Tensor,
        *,
        mask: Tensor | MaskOf | None = None,
        sink: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        cross: bool = False,
    ) -> None:
        """Add one call: q `[B, Hq, Tq, D]` and k `[B, Hk, Tk, D]` as they enter the product."""
        if not self._takes(q):
            return
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        device = q.device.type
        if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
            # The product that follows rounds them so.
            low = torch.get_autocast_dtype(device)
            q, k = q.to(low), k.to(low)
        rows = self.switch.rows
        if rows is not None and rows < q.shape[2]:
            self.exact = False
        if torch.compiler.is_compiling():
            if score_mod is not None:
                self.trouble = (
                    "score_mod inside a compiled model cannot be measured; compile flex_attention"
                )
                return
            if mask is not None and not isinstance(mask, Tensor):  # no operator takes a function
                mask = mask(*(torch.arange(x.shape[2], device=q.device) for x in (q, k)))
        if score_mod is not None or not (mask is None or isinstance(mask, Tensor)):
            observe_functions(
                self.buffer(q, k, scale),
                q.detach(),
                k.detach(),
                mask,
                sink,
                causal,
                window,
                scale,
                softcap,
                score_mod,
                rows,
                cross,
            )
            return
        torch.ops.qknorm.monitor_observe(
            self.buffer(q, k, scale),
            q.detach(),
            k.detach(),
            mask,
            sink,
            causal,
            window,
            scale,
            softcap,
            rows,
            cross,
        )

    @property
    def silence(self) -> str:
        """Why nothing was recorded of it."""
        if self.trouble is not None:
            return self.trouble
        if self.heads == 0:
            return "its tap saw no call"
        return "it was not called, or every query of it was padding or saw no key"

    def wants(self) -> bool:
        """Whether this step is observed."""
        return self.switch.on and not self.failed

    def add(self, q: Tensor, k: Tensor, stats: Stats) -> None:
        """Statistics from a fused pass over q and k, which are seen before norm and RoPE."""
        if not self._takes(q):
            return
        torch.ops.qknorm.monitor_add(
            self.buffer(q, k, None),
            q.detach(),
            k.detach(),
            stats.max_logit,
            torch.stack((stats.entropy_sum, stats.ratio_sum, stats.sink_sum)),
            torch.stack((stats.row_count, stats.ratio_count)),
        )

    def buffer(self, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        """The buffer of the phase that the module is in."""
        phase = "train" if self.module.training else "eval"
        self.heads, self.kv_heads, self.scale = q.shape[1], k.shape[1], scale
        if self.buffers[phase].device != q.device:
            with torch.inference_mode(False):
                self.buffers = {name: buffer.to(q.device) for name, buffer in self.buffers.items()}
        return self.buffers[phase]

    def _takes(self, q: Tensor) -> bool:
        """Whether a call of so many heads belongs with the earlier ones."""
        if q.shape[1] > MAX_HEADS:
            self.trouble = f"{q.shape[1]} heads; at most {MAX_HEADS} can be watched in a layer"
        elif torch.compiler.is_compiling():
            return True  # a look at what the first call leaves behind would be one more variant
        elif self.heads not in (0, q.shape[1]):
            self.trouble = (
                f"it is called with {self.heads} heads and with {q.shape[1]}: only the first count"
            )
        else:
            return True
        return False

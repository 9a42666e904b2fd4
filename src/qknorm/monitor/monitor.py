"""The monitor: attach it to a model, call `step()` after each optimizer step, read records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qknorm.monitor.gains import gain_and_bound
from qknorm.monitor.layer import ATTRIBUTE, Layer, Switch
from qknorm.monitor.measure import FIELD, clear_
from qknorm.monitor.record import LayerRecord, Record, layer_record
from qknorm.monitor.reduce import Key, Part, Place, Reducer
from qknorm.monitor.taps import TAPS, own
from qknorm.monitor.to.delivery import Delivery, Destination

# Names under which wrappers of torch keep what they wrap.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Monitor:
    """Max logit and entropy of every attention layer of a model, without changing what it computes.

    Made by `attach`, undone by `detach`; also a context manager. Between calls of `step()` everything
    that the model computes in training mode makes one record, so gradient accumulation needs no care;
    what it computes in evaluation mode makes a record of its own. An evaluation between step N and the
    next is observed if N is a multiple of `every`.

        monitor = Monitor.attach(model, every=10)
        for batch in data:
            ...
            optimizer.step()
            for record in monitor.step():
                print(record.step, record.max_logit)
    """

    def __init__(
        self,
        layers: dict[str, Layer],
        switch: Switch,
        undo: ExitStack,
        *,
        every: int,
        reducer: Reducer,
        heads_offset: Callable[[str, int], int] | None,
        to: list[Destination],
    ) -> None:
        self.layers = layers
        self.every = every
        self.step_count = 0
        self.to = to
        self._deliver = Delivery()
        self._switch, self._undo = switch, undo
        self._attached = True  # also with no layer on this rank: it joins in
        self._reducer, self._offset = reducer, heads_offset

    @classmethod
    def attach(
        cls,
        model: nn.Module | Sequence[nn.Module],
        *,
        every: int = 10,
        rows: int | None = None,
        group: dist.ProcessGroup | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
        to: Destination | Iterable[Destination] = (),
    ) -> Monitor:
        """Observe every attention layer of the model that a tap serves.

        Args:
            model: holds `qknorm.nn.Attention`, Hugging Face attention, `nn.MultiheadAttention`, or
                modules that call `F.scaled_dot_product_attention` or `flex_attention`. A compiled
                model is compiled anew. Several: the parts of a pipelined model on this rank.
            every: steps between observed ones; 1 for all.
            rows: look at this many evenly spaced queries of each sequence instead of all; records then
                say "sampled". Layers of `qknorm.nn` are always exact.
            group: the ranks whose layers, heads and tokens make up the model; all if None.
            tensor_parallel: the ranks among which heads are split, in the order of the heads.
            to: called with every record on every rank, each on its own: one that raises is logged once.

        Raises:
            ValueError: no layer has a tap, the model is watched already, or an option makes no sense.
        """
        destinations = [to] if callable(to) else list(to)
        if every < 1:
            raise ValueError(f"every must be at least 1 step; got {every}")
        if rows is not None and rows < 1:
            raise ValueError(f"rows must be at least 1, or None for all; got {rows}")
        offset = None
        if tensor_parallel is not None:
            rank = dist.get_rank(tensor_parallel)
            if rank < 0:
                raise ValueError("this rank is no member of the tensor_parallel group")

            def offset(_: str, heads: int) -> int:
                return rank * heads

        switch = Switch(rows=rows)
        layers: dict[str, Layer] = {}
        parts = [_bare(m) for m in ([model] if isinstance(model, nn.Module) else model)]
        for name, module in (named for part in parts for named in part.named_modules()):
            if module.__dict__.get(ATTRIBUTE) is not None:
                raise ValueError(
                    f"{name or type(module).__name__} is watched already: detach that first"
                )
            tap = next((tap for tap in TAPS if tap.serves(module)), None)
            if tap is not None:
                name = _plain_name(name)
                if name in layers:
                    raise ValueError(f"two parts of the model have a layer {name}: names must differ")
                layers[name] = Layer(name=name, module=module, tap=tap.NAME, switch=switch)
        if not layers and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"{', '.join(type(part).__name__ for part in parts)} has no attention that can be "
                "watched: no qknorm.nn.Attention, Hugging Face attention, nn.MultiheadAttention, "
                "or a module that calls "
                "F.scaled_dot_product_attention or flex_attention"
            )
        taps = {tap.NAME: tap for tap in TAPS}
        with ExitStack() as undo:  # a failure half-way leaves nothing behind
            for layer in layers.values():
                undo.callback(layer.module.__dict__.pop, ATTRIBUTE, None)
                layer.module.__dict__[ATTRIBUTE] = layer
                undo.callback(taps[layer.tap].install(layer))
            # What is compiled already would go on without us.
            torch.compiler.reset()
            reducer = Reducer(group)
            return cls(
                layers,
                switch,
                undo.pop_all(),
                every=every,
                reducer=reducer,
                heads_offset=offset,
                to=destinations,
            )

    def detach(self) -> None:
        """Leave the model as it was found. Records end, and destinations write what they keep back."""
        self._switch.on = False
        if self._attached:
            self._deliver.flush(self.to)
            self._attached = False
            self._undo.close()
            torch.compiler.reset()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def is_observing(self) -> bool:
        """Whether the current step is observed."""
        return self._switch.on

    def step(self) -> list[Record]:
        """End a step, on every rank. Returns its records: none if it was not observed."""
        records = self._collect() if self._switch.on else []
        self.step_count += 1
        self._switch.on = self._attached and self.step_count % self.every == 0
        self._send(records)
        return records

    def _send(self, records: list[Record]) -> None:
        for record in records:
            for send in self.to:
                self._deliver(send, record)

    def flush(self) -> list[Record]:
        """What was seen since the last step, such as a last evaluation; on every rank."""
        seen = [r for r in self._collect() if r.layers] if self._switch.on else []
        self._send(seen)
        return seen

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"step_count": self.step_count, "every": self.every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` ended; `every` may differ. What was seen since the last step is lost."""
        self._clear()
        self.step_count = int(state["step_count"])
        self._switch.on = self._attached and self.step_count % self.every == 0

    def _collect(self) -> list[Record]:
        parts: dict[Key, Part] = {}
        for layer in self.layers.values():
            if layer.heads == 0:  # never called
                continue
            gain_max, bound = gain_and_bound(layer.module, layer.heads, layer.kv_heads, layer.scale)
            for phase, buffer in layer.buffers.items():
                q = k = 0
                if self._offset is not None:
                    q, k = (self._offset(layer.name, n) for n in (layer.heads, layer.kv_heads))
                place = Place(q, layer.heads, k, layer.kv_heads, layer.tap == own.NAME)
                parts[Key(layer.name, phase)] = Part(
                    buffer=buffer[:, : layer.heads], place=place, gain_max=gain_max, bound=bound
                )
        merged = self._reducer.reduce(parts)
        by_phase: dict[str, dict[str, LayerRecord]] = {"train": {}}
        for (name, phase), part in merged.items():
            if part.buffer[FIELD["rows"]].sum() > 0:
                by_phase.setdefault(phase, {})[name] = self._record(name, part)
        self._clear()
        seen = set().union(*by_phase.values())
        silent = {name: layer.silence for name, layer in self.layers.items() if name not in seen}
        # A step in which nothing trains has no record of training.
        trains = any(layer.module.training for layer in self.layers.values()) or not self.layers
        records = []
        for phase, found in by_phase.items():
            if found or (phase == "train" and trains and not seen):
                records.append(Record(step=self.step_count, phase=phase, layers=found, silent=silent))
        for layer in self.layers.values():
            layer.trouble = layer.trouble if layer.failed else None
        return records

    def _clear(self) -> None:
        for layer in self.layers.values():
            for buffer in layer.buffers.values():
                clear_(buffer)

    def _record(self, name: str, part: Part) -> LayerRecord:
        layer = self.layers.get(name)  # None: it lives on another rank
        fused = part.place.is_fused
        exact = fused or self._switch.rows is None or (layer is not None and layer.exact)
        return layer_record(part, is_exact=exact)


def _plain_name(path: str) -> str:
    """Without what compilation and checkpointing put in between: a layer keeps its name."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _bare(model: nn.Module) -> nn.Module:
    """Without what wraps a whole model."""
    while True:
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                "nn.DataParallel computes with copies of the model, which cannot be watched: "
                "use DistributedDataParallel"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model

"""The monitor: attach it to a model, call `step()` after each optimizer step, read records."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qknorm.monitor import norms, operators
from qknorm.monitor.fields import FIELD
from qknorm.monitor.forward import ATTRIBUTE, Switch
from qknorm.monitor.layer import Layer
from qknorm.monitor.norms import WRAPPERS
from qknorm.monitor.record import LayerRecord, Record, layer_record
from qknorm.monitor.reduce import Key, Part, Reducer
from qknorm.monitor.taps import TAPS, own
from qknorm.monitor.to.delivery import Delivery, Destination, destinations


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
        shard: int,
        to: list[Destination],
    ) -> None:
        self.layers = layers
        self.every = every
        self.step_count = 0
        self.to = to
        self._deliver = Delivery()
        self._started: list[Destination] = []
        self._switch, self._undo = switch, undo
        self._attached = True  # also with no layer on this rank: it joins in
        self._reducer, self._shard = reducer, shard

    @classmethod
    def attach(
        cls,
        model: nn.Module | Sequence[nn.Module],
        *,
        every: int = 10,
        sample: int | None = None,
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
            sample: look at this many evenly spaced queries of each sequence instead of all; records then
                say "sampled". Layers of `qknorm.nn` are always exact.
            group: the ranks whose layers, heads and tokens make up the model; all if None.
            tensor_parallel: the ranks among which heads are split, in the order of the heads.
            to: called with every record on every rank, each on its own: one that raises is logged once.
                Those with `run_started` and `run_ended`, such as `JsonLines`, are told what is watched
                as the run begins, and when it is over.

        Raises:
            ValueError: no layer has a tap, the model is watched already, or an option makes no sense.
            TypeError: a destination cannot be called.
        """
        receivers = destinations(to)
        if every < 1:
            raise ValueError(f"every must be at least 1 step; got {every}")
        if sample is not None and sample < 1:
            raise ValueError(f"sample must be at least 1 query, or None for all; got {sample}")
        shard = 0 if tensor_parallel is None else dist.get_rank(tensor_parallel)
        if shard < 0:
            raise ValueError("this rank is no member of the tensor_parallel group")
        switch = Switch(sample)
        layers: dict[str, tuple[Layer, Any, list[nn.Module]]] = {}
        parts = [_bare(m) for m in ([model] if isinstance(model, nn.Module) else model)]
        for part in parts:
            for path, module in part.named_modules():
                if isinstance(module.__dict__.get(ATTRIBUTE), Layer):
                    raise ValueError(
                        f"{path or type(module).__name__} is watched already: detach that first"
                    )
                tap = next((tap for tap in TAPS if tap.serves(module)), None)
                if tap is None:
                    continue
                name = _plain_name(path)
                if name in layers:
                    raise ValueError(f"two parts of the model have a layer {name}: names must differ")
                layer = Layer(name, module, switch, is_fused=tap is own)
                # Some projects keep the norms in the module around the one that attends.
                layers[name] = layer, tap, _around(part, path)
        if not layers and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"{', '.join(type(part).__name__ for part in parts)} has no attention that can be "
                "watched: no qknorm.nn.Attention, Hugging Face attention, nn.MultiheadAttention, "
                "or a module that calls "
                "F.scaled_dot_product_attention or flex_attention"
            )
        with ExitStack() as undo:  # a failure half-way leaves nothing behind
            for layer, tap, around in layers.values():
                undo.callback(layer.module.__dict__.pop, ATTRIBUTE, None)
                layer.module.__dict__[ATTRIBUTE] = layer
                undo.callback(tap.install(layer))
                layer.norms, undo_norms = norms.install(layer.module, around, switch)
                undo.callback(undo_norms)
            # What is compiled already would go on without us.
            torch.compiler.reset()
            return cls(
                {name: layer for name, (layer, _, _) in layers.items()},
                switch,
                undo.pop_all(),
                every=every,
                reducer=Reducer(group),
                shard=shard,
                to=receivers,
            )

    def detach(self, *, failed: bool = False) -> None:
        """Leave the model as it was found. Records end, and destinations write what they keep back.

        Args:
            failed: the run did not come to its end, so that no log says that it did.
        """
        self._switch.on = False
        if self._attached:
            self._deliver.flush(self.to)
            for send in self._started if not failed else ():
                self._deliver.tell(send, "run_ended", {"steps": self.step_count})
            self._attached = False
            self._undo.close()
            torch.compiler.reset()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach(failed=kind is not None)

    @property
    def is_observing(self) -> bool:
        """Whether the current step is observed."""
        return self._switch.on

    def step(self) -> list[Record]:
        """End a step, on every rank. Returns its records: none if it was not observed.

        Whatever goes wrong in it is logged, and the training goes on.
        """
        records = self._collect() if self._switch.on else []
        self.step_count += 1
        self._switch.on = self._attached and self.step_count % self.every == 0
        self._send(records)
        return records

    def _send(self, records: list[Record]) -> None:
        for send in self.to:
            if records and not any(send is one for one in self._started):
                self._started.append(send)
                self._deliver.tell(send, "run_started", self._facts())
        for record in records:
            for send in self.to:
                self._deliver(send, record)

    def _facts(self) -> dict[str, Any]:
        """What a log says of the run before its first record."""
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return {
            "every": self.every,
            "sample": self._switch.sample,
            "ranks": world,
            "layers": {name: type(layer.module).__name__ for name, layer in self.layers.items()},
            "versions": {
                "qknorm": version("qknorm"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

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
        operators.forget_running()
        try:
            return self._records(self._reducer.reduce(self._parts()))
        except Exception:
            logging.getLogger("qknorm").exception("step %d has no record", self.step_count)
            return []
        finally:
            self._clear()

    def _parts(self) -> dict[Key, Part]:
        """Of this rank. A layer that fails is left out: the other ranks wait for what follows."""
        parts: dict[Key, Part] = {}
        for layer in self.layers.values():
            layer.attempt(lambda layer=layer: parts.update(layer.parts(self._shard)))
        return parts

    def _records(self, merged: dict[Key, Part]) -> list[Record]:
        by_phase: dict[str, dict[str, LayerRecord]] = {"train": {}}
        for (name, phase), part in merged.items():
            if part.buffer[FIELD["rows"]].sum() > 0:
                layer = self.layers.get(name)  # None: it lives on another rank
                note = None if layer is None else layer.note_of_record(phase)
                by_phase.setdefault(phase, {})[name] = layer_record(part, note=note)
        seen = set().union(*by_phase.values())
        silent = {name: layer.silence for name, layer in self.layers.items() if name not in seen}
        # A step in which nothing trains has no record of training.
        trains = any(layer.module.training for layer in self.layers.values()) or not self.layers
        return [
            Record(step=self.step_count, phase=phase, layers=found, silent=silent)
            for phase, found in by_phase.items()
            if found or (phase == "train" and trains and not seen)
        ]

    def _clear(self) -> None:
        for layer in self.layers.values():
            layer.clear()


def _plain_name(path: str) -> str:
    """Without what compilation and checkpointing put in between: a layer keeps its name."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _around(model: nn.Module, path: str) -> list[nn.Module]:
    """The module that holds the one at `path`, without what wraps it."""
    names = path.split(".")[:-1]
    while names and names[-1] in WRAPPERS:
        names.pop()
    holder = model.get_submodule(".".join(names))
    return [] if not path else [holder]


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

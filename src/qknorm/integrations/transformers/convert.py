"""Bring a model from another class of transformers into `QKNormForCausalLM`, and back.

A conversion is exact or refused: every tensor has one place, gains are only stored in another form if no
bit of their meaning is lost, and both models are run and compared before anything is returned.

Shapes: H heads, D head width, R rotated entries of a head, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qknorm.integrations.transformers.config import QKNormConfig
from qknorm.integrations.transformers.families import FAMILIES, Family
from qknorm.integrations.transformers.model import QKNormForCausalLM
from qknorm.spec import NormDialect, RopeLayout

TOKENS = 48  # of the comparison
STARTS = (0, 37, 1001)  # of its positions
# Rounding in fp32 stays far below this share of the largest value, and any mistake far above.
CLOSE = 1e-4
State = dict[str, Tensor]


def family_of(config: Any) -> Family:
    """Return the family of a configuration. Raises ValueError for one that is not known."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in FAMILIES:
        raise ValueError(f"{kind} is no family that can be converted: known are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def to_qknorm(model: PreTrainedModel) -> QKNormForCausalLM:
    """Return the same model as `QKNormForCausalLM`, in the same dtype and with its own weights.

    Args:
        model: a causal language model of one of the `FAMILIES`.

    Raises:
        ValueError: the family is not known, the model has something that cannot be expressed, or the two
            models differ. The message names the tensor or the layer, and the size of a difference.
    """
    family = family_of(model.config)
    config = family.to_ours(model.config)
    ours = _empty(QKNormForCausalLM, config, model)
    names = {name: family.name_of(name) for name in weights_of(ours)}
    found = dict(model.state_dict())
    load_exactly(
        ours, {mine: found.pop(other) for mine, other in names.items() if other in found}, left=found
    )
    compare(model, ours)
    return ours


def from_qknorm(model: QKNormForCausalLM, family: str) -> PreTrainedModel:
    """Return the same model in the class of another family, in the same dtype and with its own weights.

    Args:
        model: any `QKNormForCausalLM`.
        family: one of `FAMILIES`, such as "qwen3".

    Raises:
        ValueError: the family cannot express the model exactly, or the two models differ.
    """
    if family not in FAMILIES:
        raise ValueError(f"{family} is no family that can be converted: known are {', '.join(FAMILIES)}")
    known = FAMILIES[family]
    config = known.from_ours(model.config)
    layout: RopeLayout = known.to_ours(config).rope_layout  # type: ignore[assignment]
    dialect = known.to_ours(config).dialect
    state = stored_as(model.config, weights_of(model), dialect=dialect, layout=layout)
    theirs = _empty(known.model, config, model)
    renamed = {known.name_of(name): tensor for name, tensor in state.items()}
    load_exactly(theirs, renamed, left={})
    compare(model, theirs)
    return theirs


def with_layout(model: QKNormForCausalLM, layout: RopeLayout) -> QKNormForCausalLM:
    """Return the same model with RoPE in another layout: the rows of q and k are put in its order.

    Args:
        model: any `QKNormForCausalLM`.
        layout: "half" or "interleaved".
    """
    values = model.config.to_dict() | {"rope_layout": layout}
    made = _empty(QKNormForCausalLM, QKNormConfig(**values), model)
    load_exactly(
        made,
        stored_as(model.config, weights_of(model), dialect=model.config.dialect, layout=layout),
        left={},
    )
    compare(model, made)
    return made


def stored_as(
    config: QKNormConfig, state: State, *, dialect: NormDialect | None, layout: RopeLayout
) -> State:
    """Return a state dict of ours with gains in the form of a dialect and heads in a layout of RoPE.

    Raises ValueError if a gain has no exact form in the dialect.
    """
    attention, source = config.attention(0), config.dialect
    D, heads = attention.width, {"q_gain": attention.num_heads, "k_gain": attention.kv_heads}
    order = None
    if layout != config.rope_layout and config.rotary_dim:
        order = head_order(D, config.rotary_dim, layout)
    made = {}
    for name, x in state.items():
        parts = name.split(".")
        if source is not None and dialect is not None and parts[-1] in heads:
            x = regained(name, x, source, dialect, heads=heads[parts[-1]], head_dim=D)
        if order is not None and (parts[-1] in heads or {"q_proj", "k_proj"} & set(parts)):
            x = reordered(x, order, is_gain=parts[-1] in heads)
        made[name] = x
    return made


def head_order(head_dim: int, rotary_dim: int, layout: RopeLayout) -> Tensor:
    """Return which entry of a head in the other layout comes to each place of this one, int64 `[D]`."""
    entries = torch.arange(rotary_dim)
    rotated = entries.view(2, -1).T if layout == "interleaved" else entries.view(-1, 2).T
    return torch.cat((rotated.flatten(), torch.arange(rotary_dim, head_dim)))


def reordered(x: Tensor, order: Tensor, *, is_gain: bool) -> Tensor:
    """Return a weight `[H D, C]`, a bias `[H D]` or a gain with the entries of each head in an order.

    A gain is `[D]`, `[H, D]` or `[H D]`.
    """
    D = len(order)
    if is_gain:
        return x.view(-1, D)[:, order].view(x.shape)
    return x.unflatten(0, (-1, D))[:, order].flatten(0, 1)


def regained(
    name: str, stored: Tensor, source: NormDialect, target: NormDialect, *, heads: int, head_dim: int
) -> Tensor:
    """Return a gain in the form of another dialect. Raises ValueError if it has no exact one."""
    if (source.gain, source.offset) == (target.gain, target.offset):
        return stored
    gain = (stored.double() + source.offset).view(-1, head_dim).expand(heads, head_dim)
    if target.gain == "shared":
        if gap := float((gain - gain[:1]).abs().max()):
            raise ValueError(f"{name} differs by up to {gap:.3g} between heads, which would share it")
        gain = gain[0]
    elif target.gain == "full":
        gain = gain.flatten()
    form = (gain - target.offset).to(stored.dtype)
    if gap := float((form.double() + target.offset - gain).abs().max()):
        raise ValueError(f"{name} stored as {target.offset:g} + w would be off by up to {gap:.3g}")
    return form


@torch.no_grad()
def compare(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Run both models in fp32 on the same tokens at several positions.

    Raises ValueError that names the first layer whose output differs, and by how much.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(source.config.vocab_size, (2, TOKENS), generator=generator)
    first, second = (_in_fp32(model) for model in (source, target))
    for start in STARTS:
        positions = torch.arange(start, start + TOKENS)[None]
        wanted, found = (_outputs(model, tokens, positions) for model in (first, second))
        for name, x in wanted.items():
            size, gap = float(x.abs().max()), float((x - found[name]).abs().max())
            if not gap <= CLOSE * max(size, 1e-3):
                raise ValueError(
                    f"the models differ at {name}: by {gap:.3g} where values go up to {size:.3g}, at "
                    f"positions from {start} on"
                )


def _outputs(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the output of each attention and of each layer, and the logits, in the order of the run."""
    found: dict[str, Tensor] = {}
    model.set_attn_implementation("eager")

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            found[name] = out[0] if isinstance(out, tuple) else out

        return hook

    with ExitStack() as undo:
        for i, layer in enumerate(model.model.layers):
            undo.callback(layer.self_attn.register_forward_hook(keep(f"layer {i}, attention")).remove)
            undo.callback(layer.register_forward_hook(keep(f"layer {i}")).remove)
        out = model(input_ids=tokens, position_ids=positions, use_cache=False)
    return found | {"the logits": out.logits}


def _in_fp32(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in fp32 on the CPU, made anew: a cast model may hold rounded frequencies of RoPE."""
    made = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32).eval()
    made.load_state_dict(model.state_dict())
    return made


def _empty(kind: Any, config: Any, like: PreTrainedModel) -> Any:
    """Return a model of a class with the dtype, the device and the mode of another."""
    return kind._from_config(config, dtype=like.dtype).to(like.device).train(like.training)


def weights_of(model: nn.Module) -> State:
    """Return the tensors of a state dict that hold weights. What gains mean is in the configuration."""
    return {name: x for name, x in model.state_dict().items() if not name.endswith("gain_offset")}


@torch.no_grad()
def load_exactly(model: nn.Module, state: Mapping[str, Tensor], *, left: Mapping[str, Tensor]) -> None:
    """Fill a model with exactly these tensors.

    Raises ValueError for a tensor that is missing, left over, of another shape, or rounded.
    """
    wanted = weights_of(model)
    missing, extra = wanted.keys() - state.keys(), state.keys() - wanted.keys() | left.keys()
    if missing:
        raise ValueError(f"the source has no tensor for {', '.join(sorted(missing)[:5])}")
    if extra:
        raise ValueError(f"the target has no place for {', '.join(sorted(extra)[:5])}")
    for name, place in wanted.items():
        x = state[name]
        if x.shape != place.shape:
            raise ValueError(f"{name} is {list(x.shape)} and has to be {list(place.shape)}")
        gap = float((x.double() - x.to(place.dtype).double()).abs().max()) if x.numel() else 0.0
        if gap:
            raise ValueError(
                f"{name} would be rounded by up to {gap:.3g} in {str(place.dtype)[6:]}: convert the "
                "model in float32"
            )
        place.copy_(x)

"""Parameter groups: what decays, and what a matrix optimizer such as Muon may take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn import Parameter

from qknorm.nn.marks import GAIN, marked_parameters

# What output heads are called, as whole parts of a name.
HEADS = frozenset(("head", "heads", "lm_head", "lm_heads", "output", "output_layer", "embed_out"))
# What embeddings are called that are bare parameters: tables of positions, and PEFT's adapters.
EMBEDDINGS = ("wte", "wpe", "tok_emb", "pos_emb", "pos_embed", "lora_embedding_A", "lora_embedding_B")


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    gain_decay: float = 0.0,
    no_matrix: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for AdamW, or for a matrix optimizer such as Muon beside it.

    Groups, each with a `name`, empty ones left out:
      * `matrix`: weights with two axes outside embeddings and output heads; decayed. The only group
        that a matrix optimizer may take.
      * `decay`: other weights with two axes or more; decayed.
      * `gain`: gains stored as 1 + w, only with `gain_decay > 0`, whose decay pulls them to 1.
      * `no_decay`: gains, sinks, biases and all that belongs to a norm.

    An embedding is known by its type, or by one of `EMBEDDINGS` as a whole part of its name; a head
    that is tied to it by being the same parameter; a head of its own by one of `HEADS` as a whole part
    of its name, outside of numbered blocks; a norm by a class whose name ends with "Norm". Frozen
    parameters are left out, shared ones are listed once.

    Args:
        model: any module, before it is wrapped in `FullyShardedDataParallel`.
        weight_decay: for `matrix` and `decay`.
        gain_decay: for gains stored as 1 + w. Undecayed gains can run away at high learning rates.
        no_matrix: further parts of names, such as "router", that keep a weight out of `matrix`;
            whole parts, anywhere in a name.

    Raises:
        ValueError: `gain_decay` for gains stored as w, which it would pull to zero; or a model whose
            parameters have lost their shapes.
    """
    kinds = {id(p): (kind, offset) for _, p, kind, offset in marked_parameters(model)}
    embeddings: set[int] = set()
    norms: set[int] = set()
    for module in model.modules():
        kind_name = type(module).__name__
        if kind_name == "FullyShardedDataParallel":
            raise ValueError(
                "FullyShardedDataParallel flattens parameters, and matrices are vectors then: call "
                "param_groups before wrapping with use_orig_params=True, or use fully_shard"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.update(map(id, module.parameters()))
        elif kind_name.endswith("Norm"):
            norms.update(map(id, module.parameters(recurse=False)))
    apart = frozenset((*no_matrix, *EMBEDDINGS))
    groups: dict[str, list[Parameter]] = {"matrix": [], "decay": [], "gain": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.split(".")
        kind, offset = kinds.get(id(parameter), ("", 0.0))
        if kind == GAIN and gain_decay > 0:
            if offset != 1.0:
                raise ValueError(
                    f"gain_decay would pull {name} to 0, since it is stored as w: build the model with "
                    "NormDialect(offset=1.0), whose gains 1 + w decay to 1"
                )
            groups["gain"].append(parameter)
        elif kind or parameter.ndim < 2 or id(parameter) in norms or parts[-1].startswith("bias"):
            groups["no_decay"].append(parameter)
        elif (
            parameter.ndim == 2
            and min(parameter.shape) > 1
            and id(parameter) not in embeddings
            and not _is_head(parts)
            and apart.isdisjoint(parts)
        ):
            groups["matrix"].append(parameter)
        else:
            groups["decay"].append(parameter)
    decays = {"matrix": weight_decay, "decay": weight_decay, "gain": gain_decay, "no_decay": 0.0}
    return [
        {"name": name, "params": params, "weight_decay": decays[name]}
        for name, params in groups.items()
        if params
    ]


def _is_head(parts: list[str]) -> bool:
    """Whether a name is that of an output head. The `output` of a numbered block (BERT) is none."""
    for part in parts:
        if part.isdigit():
            return False
        if part in HEADS:
            return True
    return False

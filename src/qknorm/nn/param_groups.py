"""Parameter groups: which parameters decay, and which a matrix optimizer such as Muon may optimize."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from torch.nn import Parameter

from qknorm.nn.marks import GAIN, marked_parameters
from qknorm.nn.row_blocks import fused_rows, row_blocks

# Names of output heads, compared with whole parts of a parameter's name.
HEADS = frozenset(("head", "heads", "lm_head", "lm_heads", "output", "output_layer", "embed_out"))
# Names of embeddings that are bare parameters, such as position tables and the adapters of PEFT.
EMBEDDINGS = ("wte", "wpe", "tok_emb", "pos_emb", "pos_embed", "lora_embedding_A", "lora_embedding_B")


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    gain_decay: float = 0.0,
    no_matrix: Iterable[str] = (),
    split: Literal["qkv", "heads"] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for AdamW, or for a matrix optimizer such as Muon together with AdamW.

    There are up to four groups. Each has a `name`, and empty ones are left out:

    * `matrix`: weights with two axes that belong to no embedding and no output head. They decay. This is
      the only group that a matrix optimizer may optimize.
    * `decay`: all other weights with two axes or more. They decay.
    * `gain`: gains stored as 1 + w, if `gain_decay` > 0. Their decay pulls them to 1.
    * `no_decay`: all other gains, sinks, biases, and the parameters of norms. They do not decay.

    An embedding is recognised by its type, or by one of `EMBEDDINGS` in its name. An output head is
    recognised by one of `HEADS` in its name before any number; a head that shares its weight with an
    embedding counts as an embedding. Names are split at the dots, and only whole parts are compared. A
    norm is recognised by a class whose name ends with "Norm". Frozen parameters are left out, and shared
    ones are listed once.

    Args:
        model: any module, before it is wrapped in `FullyShardedDataParallel`.
        weight_decay: weight decay of `matrix` and `decay`.
        gain_decay: weight decay of gains stored as 1 + w. Without it gains can run away at high learning
            rates.
        no_matrix: further parts of names, such as "router", that keep a weight out of `matrix`.
        split: "qkv" lists the rows of q, k and v of a fused projection as matrices of their own in
            `matrix`, and "heads" those of each head, see `row_blocks`; None leaves the projection whole.
            Known are `qknorm.nn.Attention` and `torch.nn.MultiheadAttention`. Call `zero_grad` of the
            optimizer then, not of the model.

    Returns:
        A list of dicts with the keys `name`, `params` and `weight_decay`, as `torch.optim` expects them.

    Raises:
        ValueError: `gain_decay` is given but a gain is stored as w, so decay would pull it to zero; or
            `FullyShardedDataParallel` has flattened the parameters; or a weight to split is sharded.
    """
    kinds = {id(p): (kind, offset) for _, p, kind, offset in marked_parameters(model)}
    embeddings: set[int] = set()
    norms: set[int] = set()
    for module in model.modules():
        kind_name = type(module).__name__
        if kind_name == "FullyShardedDataParallel":
            raise ValueError(
                "FullyShardedDataParallel has flattened matrices to vectors: call param_groups before "
                "wrapping with use_orig_params=True, or use fully_shard"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.update(map(id, module.parameters()))
        elif kind_name.endswith("Norm"):
            norms.update(map(id, module.parameters(recurse=False)))
    excluded = frozenset((*no_matrix, *EMBEDDINGS))
    if split not in (None, "qkv", "heads"):
        raise ValueError(f'split must be "qkv", "heads" or None; got {split!r}')
    fused = {} if split is None else fused_rows(model, per_head=split == "heads")
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
            and excluded.isdisjoint(parts)
        ):
            rows = fused.get(id(parameter))
            groups["matrix"] += [parameter] if rows is None else row_blocks(parameter, rows)
        else:
            groups["decay"].append(parameter)
    decays = {"matrix": weight_decay, "decay": weight_decay, "gain": gain_decay, "no_decay": 0.0}
    return [
        {"name": name, "params": params, "weight_decay": decays[name]}
        for name, params in groups.items()
        if params
    ]


def _is_head(parts: list[str]) -> bool:
    """Whether a name belongs to an output head. The `output` of a numbered block (BERT) does not."""
    for part in parts:
        if part.isdigit():
            return False
        if part in HEADS:
            return True
    return False

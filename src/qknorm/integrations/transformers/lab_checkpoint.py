"""Checkpoints of `qknorm.lab` as `QKNormForCausalLM`, and back.

A checkpoint is taken as the plain values that its file holds, so the lab itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qknorm.integrations.transformers.config import QKNormConfig
from qknorm.integrations.transformers.convert import load_exactly, weights_of
from qknorm.integrations.transformers.model import QKNormForCausalLM

OUTSIDE = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
LAYER = {
    "self_attn.o_proj": "attention.out",
    "self_attn.gate_proj": "attention.gate",
    "self_attn.qk_norm": "attention.norm",
    "self_attn.sinks": "attention.sink_logit",
    "attention_norm": "attention_norm",
    "mlp_norm": "mlp_norm",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
Plain = dict[str, Any]


def from_lab(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> QKNormForCausalLM:
    """Return the model of a checkpoint of the lab.

    Args:
        config: the fields of `qknorm.lab.model.ModelConfig`, as the checkpoint holds them.
        state: the state dict of the model.

    Raises:
        ValueError: the arm caps its logits or has a sink token, or a tensor is missing or left over.
    """
    if config["cap"] is not None:
        raise ValueError("the arm caps its logits, which the model class does not do")
    if config["sink"] == "token":
        raise ValueError("the arm has a sink token, which attention in transformers cannot take")
    width = config["head_dim"] or config["dim"] // config["heads"]
    ours = QKNormForCausalLM(
        QKNormConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["dim"],
            intermediate_size=int(config["mlp_ratio"] * config["dim"]),
            num_hidden_layers=config["layers"],
            num_attention_heads=config["heads"],
            num_key_value_heads=config["kv_heads"],
            head_dim=width,
            qk_norm=config["norm"],
            sink=config["sink"],
            gate=config["gate"],
            layer_types=[_kind(config)] * config["layers"],
            sliding_window=config["window"],
            rotary_dim=round(config["rotary_share"] * width),
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_base"]},
            hidden_act="gelu",
            gated_mlp=False,
        )
    ).eval()
    rest = {name: x for name, x in state.items() if not name.endswith("gain_offset")}
    heads = ours.config.attention(0)
    sizes = [heads.num_heads * width, heads.kv_heads * width, heads.kv_heads * width]
    renamed: dict[str, Tensor] = {}
    for i in range(config["layers"]):
        parts = rest.pop(f"blocks.{i}.attention.qkv.weight").split(sizes)
        renamed |= {f"model.layers.{i}.{name}": x for name, x in zip(QKV, parts, strict=True)}
    for name in weights_of(ours).keys() - renamed.keys():
        if (theirs := _name_of(name)) in rest:
            renamed[name] = rest.pop(theirs)
    load_exactly(ours, renamed, left=rest)
    return ours


def to_lab(model: QKNormForCausalLM) -> tuple[Plain, dict[str, Tensor]]:
    """Return configuration and state dict as a checkpoint of the lab holds them.

    Args:
        model: one that the lab's model can express, such as a result of `from_lab`.

    Raises:
        ValueError: it has something that the lab's model does not have.
    """
    c = model.config
    wrong = {
        "block": c.block == "pre",
        "stream_norm": c.stream_norm == "rms" and c.norm_eps == 1e-6 and not c.norm_offset,
        "gated_mlp": not c.gated_mlp and c.hidden_act == "gelu",
        "attention_bias": not c.attention_bias,
        "attention_scale": c.attention_scale is None,
        "rope_layout": c.rope_layout == "half",
        "rope_parameters": all(r is None or r[1] is None for r in map(c.rope_of, c.layer_types or [])),
        "layer_types": len(set(c.layer_types or [])) == 1,
        "embedding_scale": c.embedding_scale == c.logit_scale == 1.0,
        "final_logit_softcapping": c.final_logit_softcapping is None,
        "tie_word_embeddings": not c.tie_word_embeddings,
    }
    if lost := [f"{name}={getattr(c, name)!r}" for name, holds in wrong.items() if not holds]:
        raise ValueError(f"the lab's model cannot express {', '.join(lost)}")
    rope = c.rope_of((c.layer_types or [])[0])
    config = {
        "vocab_size": c.vocab_size,
        "layers": c.num_hidden_layers,
        "dim": c.hidden_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "mlp_ratio": c.intermediate_size / c.hidden_size,
        "rotary_share": (c.rotary_dim or 0) / c.attention(0).width,
        "rope_base": 10_000.0 if rope is None else rope[0],
        "window": c.window_of(0),
        "norm": c.qk_norm,
        "sink": c.sink,
        "cap": None,
        "gate": c.gate,
        "backend": "auto",
    }
    state: dict[str, Tensor] = {}
    tensors = model.state_dict()
    for i in range(c.num_hidden_layers):
        parts = [tensors.pop(f"model.layers.{i}.{name}") for name in QKV]
        state[f"blocks.{i}.attention.qkv.weight"] = torch.cat(parts)
    return config, state | {_name_of(name): x for name, x in tensors.items()}


def _kind(config: Mapping[str, Any]) -> str:
    return "full_attention" if config["window"] is None else "sliding_attention"


def _name_of(ours: str) -> str:
    """Return the name in the lab's model of a tensor that is no part of qkv."""
    if not ours.startswith("model.layers."):
        module, _, last = ours.rpartition(".")
        return f"{OUTSIDE[module]}.{last}"
    number, rest = ours.removeprefix("model.layers.").split(".", 1)
    for mine, other in LAYER.items():
        if rest == mine or rest.startswith(f"{mine}."):
            return f"blocks.{number}.{other}{rest.removeprefix(mine)}"
    raise ValueError(f"the lab's model has no place for {ours}")

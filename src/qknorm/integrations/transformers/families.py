"""How other model classes of transformers say what `QKNormConfig` says, a family each.

A family gives the fields of a `QKNormConfig` for a configuration of its own, and the other way round.
It needs no list of what it cannot express: a configuration is expressed if it comes back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from transformers import PretrainedConfig

from qknorm.integrations.transformers.config import LAYER_TYPES, QKNormConfig
from qknorm.spec import default_scale

Fields = dict[str, Any]

# Fields that have the same name and meaning everywhere.
SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "use_cache",
)
# Fields that describe the function directly.
PLAIN = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rotary_dim",
    "sink",
    "gate",
    "attention_bias",
    "block",
    "stream_norm",
    "norm_offset",
    "norm_eps",
    "hidden_act",
    "gated_mlp",
    "embedding_scale",
    "logit_scale",
    "final_logit_softcapping",
    "tie_word_embeddings",
)
# Ours -> theirs, below a layer or the model; the rest of a name stays.
PROJECTIONS = {f"self_attn.{n}": f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
MLP = {f"mlp.{n}": f"mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")}
MODEL = {"model.embed_tokens": "model.embed_tokens", "model.norm": "model.norm", "lm_head": "lm_head"}
PRE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def gains(q: str, k: str) -> dict[str, str]:
    """Return the names of the gains; theirs are weights of modules."""
    return {"self_attn.qk_norm.q_gain": f"{q}.weight", "self_attn.qk_norm.k_gain": f"{k}.weight"}


Q_NORM = gains("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        model: the class with the output head.
        config: its configuration class.
        fields: the fields of a `QKNormConfig` beyond SHARED, from a configuration of theirs. Raises
            ValueError for what no `QKNormConfig` expresses.
        options: theirs beyond SHARED, from one of ours; what it cannot express may be left out.
        layer: names below a layer, ours -> theirs.
        outside: names of the rest.
    """

    model: type[Any]
    config: type[PretrainedConfig]
    fields: Callable[[Any], Fields]
    options: Callable[[QKNormConfig], Fields]
    layer: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=lambda: MODEL)

    def to_ours(self, config: PretrainedConfig) -> QKNormConfig:
        """Return the configuration of the same model in our class.

        Raises ValueError if there is none.
        """
        shared = {name: getattr(config, name) for name in SHARED if hasattr(config, name)}
        return QKNormConfig(**shared | self.fields(config))

    def from_ours(self, config: QKNormConfig) -> PretrainedConfig:
        """Return theirs, if it describes the same model but for the form in which gains are stored.

        Raises ValueError that names what the family cannot express.
        """
        theirs = self.config(**{name: getattr(config, name) for name in SHARED} | self.options(config))
        wanted, found = meaning(config), meaning(self.to_ours(theirs))
        if lost := [f"{name}={value!r}" for name, value in wanted.items() if found[name] != value]:
            raise ValueError(f"{self.config.model_type} cannot express {', '.join(lost)}")
        return theirs

    def name_of(self, ours: str) -> str:
        """Return their name of a tensor of ours."""
        prefix, names, rest = "", self.outside, ours
        if ours.startswith("model.layers."):
            model, layers, number, rest = ours.split(".", 3)
            prefix, names = f"{model}.{layers}.{number}.", self.layer
        for mine, other in names.items():
            if rest == mine or rest.startswith(f"{mine}."):
                return prefix + other + rest.removeprefix(mine)
        raise ValueError(f"{self.config.model_type} has no place for {ours}")


def meaning(config: QKNormConfig) -> Fields:
    """Return what a configuration says about the function that the model computes, but for gains.

    The form in which gains are stored is left out, since weights can be brought from one to another.
    """
    layers = range(config.num_hidden_layers)
    dialect, attention = config.dialect, config.attention(0)
    return {name: getattr(config, name) for name in PLAIN} | {
        "qk_norm": None if dialect is None else replace(dialect, gain="per_head", offset=0.0),
        "attention_scale": attention.scale or default_scale(attention.width),
        "windows": [config.window_of(layer) for layer in layers],
        "rope": [config.rope_of((config.layer_types or [])[layer]) for layer in layers],
    }


def one_rope(config: QKNormConfig) -> Any:
    """Return the rotation of the first layer as the parameters of a family that has one for all."""
    parameters, kind = config.rope_parameters or {}, (config.layer_types or ["full_attention"])[0]
    return _copied(parameters.get(kind, parameters))


def _rope(config: Any) -> Fields:
    return {"rope_parameters": _copied(config.rope_parameters), "rotary_dim": _rotary_dim(config)}


def _rotary_dim(config: Any) -> int:
    parameters = config.rope_parameters or {}
    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    return int(_head_dim(config) * (1.0 if share is None else share))


def _head_dim(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def _copied(rope: Any) -> Any:
    return {k: _copied(v) for k, v in rope.items()} if isinstance(rope, dict) else rope


def _rope_by_type(config: QKNormConfig) -> Fields:
    parameters = config.rope_parameters or {}
    return {kind: _copied(parameters.get(kind, parameters)) for kind in LAYER_TYPES}


def _rms(eps: float, gain: str, **other: Any) -> Fields:
    return {"gain": gain, "eps": eps} | other


def _qwen3(config: Any) -> Fields:
    return _rope(config) | {
        "head_dim": config.head_dim,
        "qk_norm": _rms(config.rms_norm_eps, "shared"),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
    }


def _to_qwen3(config: QKNormConfig) -> Fields:
    return {
        "head_dim": config.head_dim,
        "rope_parameters": one_rope(config),
        "layer_types": config.layer_types,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.hidden_act,
    }


def _gemma3(config: Any) -> Fields:
    if config.use_bidirectional_attention:
        raise ValueError("gemma3_text with use_bidirectional_attention cannot be expressed")
    if config.attn_logit_softcapping is not None:
        raise ValueError("gemma3_text with attn_logit_softcapping cannot be expressed")
    return {
        "head_dim": config.head_dim,
        "rope_parameters": _copied(config.rope_parameters),
        "rotary_dim": config.head_dim,
        "qk_norm": _rms(config.rms_norm_eps, "shared", offset=1.0),
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "block": "sandwich",
        "norm_offset": 1.0,
        "norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_activation,
        "embedding_scale": config.hidden_size**0.5,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _to_gemma3(config: QKNormConfig) -> Fields:
    scale = config.attention_scale or config.head_dim**-0.5  # type: ignore[operator]
    exact = round(scale**-2)
    return {
        "head_dim": config.head_dim,
        "rope_parameters": _rope_by_type(config),
        "query_pre_attn_scalar": exact if exact**-0.5 == scale else scale**-2,
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "rms_norm_eps": config.norm_eps,
        "hidden_activation": config.hidden_act,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _olmo2(config: Any) -> Fields:
    return _rope(config) | {
        "head_dim": _head_dim(config),
        "qk_norm": _rms(config.rms_norm_eps, "full", statistic="full"),
        "block": "post",
        "norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
    }


def _to_olmo2(config: QKNormConfig) -> Fields:
    return {
        "head_dim": config.head_dim,
        "rope_parameters": one_rope(config),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.hidden_act,
    }


def _cohere(config: Any) -> Fields:
    norm = _rms(config.layer_norm_eps, "per_head", centered=True) if config.use_qk_norm else None
    return _rope(config) | {
        "head_dim": _head_dim(config),
        "qk_norm": norm,
        "rope_layout": "interleaved",
        "block": "parallel",
        "stream_norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "hidden_act": config.hidden_act,
        "logit_scale": config.logit_scale,
    }


def _to_cohere(config: QKNormConfig) -> Fields:
    return {
        "head_dim": config.head_dim,
        "rope_parameters": one_rope(config),
        "use_qk_norm": config.qk_norm is not None,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": config.hidden_act,
        "logit_scale": config.logit_scale,
    }


def _lfm2(config: Any) -> Fields:
    if other := sorted(set(config.layer_types) - {"full_attention"}):
        raise ValueError(f"lfm2 has layers of the type {', '.join(other)}, which are no attention")
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return _rope(config) | {
        "intermediate_size": width,
        "head_dim": _head_dim(config),
        "qk_norm": _rms(config.norm_eps, "shared"),
        "norm_eps": config.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def _to_lfm2(config: QKNormConfig) -> Fields:
    return {
        "head_dim": config.head_dim,
        "rope_parameters": one_rope(config),
        "norm_eps": config.norm_eps,
        "layer_types": config.layer_types,
        "block_auto_adjust_ff_dim": False,
    }


def _llama(config: Any) -> Fields:
    if getattr(config, "mlp_bias", False):
        raise ValueError("llama with mlp_bias cannot be expressed")
    return _rope(config) | {
        "head_dim": _head_dim(config),
        "qk_norm": None,
        "norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
    }


def _to_llama(config: QKNormConfig) -> Fields:
    return {
        "head_dim": config.head_dim,
        "rope_parameters": one_rope(config),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.hidden_act,
    }


FAMILIES = {
    "qwen3": Family(
        model=transformers.Qwen3ForCausalLM,
        config=transformers.Qwen3Config,
        fields=_qwen3,
        options=_to_qwen3,
        layer=PROJECTIONS | MLP | PRE | Q_NORM,
    ),
    "gemma3_text": Family(
        model=transformers.Gemma3ForCausalLM,
        config=transformers.Gemma3TextConfig,
        fields=_gemma3,
        options=_to_gemma3,
        layer=PROJECTIONS
        | MLP
        | Q_NORM
        | {
            "attention_norm": "input_layernorm",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        },
    ),
    "olmo2": Family(
        model=transformers.Olmo2ForCausalLM,
        config=transformers.Olmo2Config,
        fields=_olmo2,
        options=_to_olmo2,
        layer=PROJECTIONS
        | MLP
        | Q_NORM
        | {
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        },
    ),
    "cohere": Family(
        model=transformers.CohereForCausalLM,
        config=transformers.CohereConfig,
        fields=_cohere,
        options=_to_cohere,
        layer=PROJECTIONS | MLP | Q_NORM | {"attention_norm": "input_layernorm"},
    ),
    "lfm2": Family(
        model=transformers.Lfm2ForCausalLM,
        config=transformers.Lfm2Config,
        fields=_lfm2,
        options=_to_lfm2,
        layer=PROJECTIONS
        | gains("self_attn.q_layernorm", "self_attn.k_layernorm")
        | {
            "self_attn.o_proj": "self_attn.out_proj",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "attention_norm": "operator_norm",
            "mlp_norm": "ffn_norm",
        },
        outside=MODEL | {"model.norm": "model.embedding_norm"},
    ),
    "llama": Family(
        model=transformers.LlamaForCausalLM,
        config=transformers.LlamaConfig,
        fields=_llama,
        options=_to_llama,
        layer=PROJECTIONS | MLP | PRE,
    ),
}

"""Small Hugging Face models, and the formula of their attention as their source files state it.

Line numbers are of `modeling_<name>.py` in transformers 5.24. Shapes: H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")

Hq, Hk, D, VOCABULARY, WINDOW, EPS = 4, 2, 16, 97, 5, 3e-5


@dataclass(frozen=True)
class Expected:
    """One attention layer: what probing should find, weights aside."""

    q_norm: str | None = None
    k_norm: str | None = None
    statistic: str | None = None
    gain: str | None = None
    k_gain: str | None = None
    eps: float | None = None
    eps_place: str | None = None
    order: str | None = None
    rope: str | None = "half"
    rotary_width: int = D
    v_norm: bool = False
    scale: float = 0.25  # D**-0.5
    softcap: float | None = None
    window: int | None = None
    sink: str | None = None
    causal: bool = True
    q_heads: int = Hq
    kv_heads: int = Hk
    head_dim: int = D


PLAIN = Expected()
RMS = Expected(
    q_norm="rms",
    k_norm="rms",
    statistic="head",
    gain="shared",
    k_gain="shared",
    eps=EPS,
    eps_place="inside",
    order="before",
)
FULL = replace(RMS, statistic="full", gain="full", k_gain="full")
LAYER = replace(RMS, q_norm="layer", k_norm="layer")
LAYER_OF_HEADS = replace(LAYER, gain="head", k_gain="head")
# Without a gain the norm is the same on either side of a rotation, wherever the source puts it.
GAINLESS = replace(RMS, gain=None, k_gain=None, order="not identifiable")


def nope(expected: Expected) -> Expected:
    return replace(expected, rope=None, rotary_width=0, order=None)


def windowed(expected: Expected) -> Expected:
    return replace(expected, window=WINDOW)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from a seed, the caller's own generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Architecture:
    """One architecture: how to build it, its formula by layer, where its gains are stored."""

    name: str
    config: str
    options: dict[str, Any]
    layers: dict[int, Expected]
    q_gains: tuple[str, ...] = ()  # below the attention module; of several, one for each head
    k_gains: tuple[str, ...] = ()
    offset: float = 0.0  # effective gain = offset + stored
    attention: str = "model.layers.{}.self_attn"
    model: str = "AutoModelForCausalLM"
    image: tuple[int, int, int] | None = None

    @property
    def expected(self) -> dict[str, Expected]:
        """By the path of the attention module."""
        return {self.attention.format(layer): formula for layer, formula in self.layers.items()}

    def make(self, implementation: str = "eager", seed: int = 0, **options: Any) -> nn.Module:
        """A model in evaluation mode, the same at every call."""
        config = getattr(transformers, self.config)(**(self.options | options))
        config._attn_implementation = implementation
        model = getattr(transformers, self.model)
        with seeded(seed):
            return getattr(model, "from_config", model)(config).eval()

    def inputs(self, seed: int = 0, batch: int = 2, length: int = 11) -> dict[str, Tensor]:
        """What the model is called with; a vision model takes no length."""
        with seeded(seed):
            if self.image is not None:
                return {"pixel_values": torch.randn(batch, *self.image)}
            return {"input_ids": torch.randint(6, VOCABULARY, (batch, length))}

    def gain_names(self, path: str, side: str) -> list[str]:
        """Full names of the parameters that hold the gain of side "q" or "k" of an attention module."""
        return [f"{path}.{name}" for name in (self.q_gains if side == "q" else self.k_gains)]

    def randomise_(self, model: nn.Module, seed: int) -> None:
        """Effective gains evenly spread over 0.5 to 1.5, in random places: no two of one norm alike."""
        parameters = dict(model.named_parameters())
        with seeded(seed), torch.no_grad():
            for path, side in product(self.expected, "qk"):
                stored = [parameters[name] for name in self.gain_names(path, side)]
                size = sum(parameter.numel() for parameter in stored)
                gains = 0.5 + (torch.randperm(size) + 0.5) / max(size, 1)
                for parameter in stored:
                    parameter.copy_(gains[: parameter.numel()].view(parameter.shape) - self.offset)
                    gains = gains[parameter.numel() :]

    def gain(self, model: nn.Module, path: str, side: str) -> Tensor | None:
        """The stored effective gain of a side, `[H, D]`; ones without a gain, None without a norm."""
        formula = self.expected[path]
        if (formula.q_norm if side == "q" else formula.k_norm) is None:
            return None
        heads = formula.q_heads if side == "q" else formula.kv_heads
        names = self.gain_names(path, side)
        if not names:
            return torch.ones(heads, formula.head_dim)
        parameters = dict(model.named_parameters())
        stored = torch.cat([parameters[name].detach().flatten() for name in names])
        return (stored + self.offset).view(-1, formula.head_dim).expand(heads, -1).clone()


# Large weights, so that logits are of order 1 and a softcap or a mask shows.
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": Hq,
    "initializer_range": 0.15,
}
TOKENS = {
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = SIZES | TOKENS | {"num_key_value_heads": Hk, "rms_norm_eps": EPS, "head_dim": D}
# Some sources have no head_dim: there D is hidden_size / heads.
NARROW = {name: value for name, value in DECODER.items() if name != "head_dim"} | {"hidden_size": Hq * D}
LAYER_NORM = NARROW | {"layer_norm_eps": EPS}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NORM = {"q_gains": ("q_norm.weight",), "k_gains": ("k_norm.weight",)}
LAYERNORM = {"q_gains": ("q_layernorm.weight",), "k_gains": ("k_layernorm.weight",)}


def rotary(**options: Any) -> dict[str, Any]:
    """The options that make RoPE of one kind, by default over the whole head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | options}


def both(expected: Expected) -> dict[int, Expected]:
    return {0: expected, 1: expected}


def mixed(expected: Expected) -> dict[int, Expected]:
    """A sliding layer, then a full one."""
    return {0: windowed(expected), 1: expected}


TABLE = (
    # llama 206-273, LlamaAttention
    Architecture("llama", "LlamaConfig", DECODER, both(PLAIN)),
    # qwen2 168-229, Qwen2Attention
    Architecture("qwen2", "Qwen2Config", DECODER, both(PLAIN)),
    # qwen3 203-275, Qwen3Attention; 50-64, Qwen3RMSNorm
    Architecture("qwen3", "Qwen3Config", DECODER, both(RMS), **NORM),
    # qwen3_moe 122-193, Qwen3MoeAttention
    Architecture("qwen3_moe", "Qwen3MoeConfig", DECODER | MOE, both(RMS), **NORM),
    # gemma2 211-283, Gemma2Attention; 195-198 of eager_attention_forward for the softcap
    Architecture(
        "gemma2",
        "Gemma2Config",
        DECODER | MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 20},
        mixed(replace(PLAIN, scale=20**-0.5, softcap=5.0)),
    ),
    # gemma3 280-358, Gemma3Attention; 119-133, Gemma3RMSNorm: 1 + w
    Architecture(
        "gemma3",
        "Gemma3TextConfig",
        DECODER | MIXED | {"query_pre_attn_scalar": 20},
        mixed(replace(RMS, scale=20**-0.5)),
        offset=1.0,
        **NORM,
    ),
    # olmo2 188-261, Olmo2Attention: normed before the heads are split
    Architecture("olmo2", "Olmo2Config", DECODER, both(FULL), **NORM),
    # olmo3 137-213, Olmo3Attention
    Architecture("olmo3", "Olmo3Config", DECODER | MIXED, mixed(FULL), **NORM),
    # olmoe 197-277, OlmoeAttention: the width of its norms allows no head_dim
    Architecture("olmoe", "OlmoeConfig", NARROW | MOE, both(FULL), **NORM),
    # flex_olmo 200-273, FlexOlmoAttention
    Architecture("flex_olmo", "FlexOlmoConfig", DECODER | MOE, both(FULL), **NORM),
    # cohere 203-287, CohereAttention; 51-65, CohereLayerNorm of [H, D]; 167-172, rotate_half
    Architecture(
        "cohere",
        "CohereConfig",
        DECODER | {"use_qk_norm": True, "layer_norm_eps": EPS},
        both(replace(LAYER_OF_HEADS, rope="interleaved")),
        **NORM,
    ),
    # cohere2 178-248, Cohere2Attention: line 222, RoPE in the sliding layers only
    Architecture(
        "cohere2",
        "Cohere2Config",
        LAYER_NORM | MIXED,
        {0: windowed(replace(PLAIN, rope="interleaved")), 1: nope(PLAIN)},
    ),
    # chameleon 244-338, ChameleonAttention; 187-202, ChameleonLayerNorm: eps 1e-5, whatever the config
    Architecture(
        "chameleon",
        "ChameleonConfig",
        NARROW
        | {
            "vq_config": {"embed_dim": 8, "latent_dim": 8, "base_channels": 32, "num_embeddings": 8}
            | {"channel_multiplier": [1], "num_res_blocks": 1, "double_latent": False, "resolution": 8},
            "vocabulary_map": {"<image>": 5},
        },
        both(replace(LAYER_OF_HEADS, eps=1e-5)),
        attention="layers.{}.self_attn",
        model="ChameleonModel",
        **NORM,
    ),
    # phi3 189-255, Phi3Attention: one projection, cut into q, k, v; 180-186, rotary_dim
    Architecture(
        "phi3",
        "Phi3Config",
        DECODER | rotary(partial_rotary_factor=0.75),
        both(replace(PLAIN, rotary_width=12)),
    ),
    # mistral 122-181, MistralAttention; 355, the mask
    Architecture(
        "mistral", "MistralConfig", DECODER | {"sliding_window": WINDOW}, both(windowed(PLAIN))
    ),
    # gpt_oss 259-330, GptOssAttention; 243-251 of eager_attention_forward, sinks
    Architecture(
        "gpt_oss",
        "GptOssConfig",
        DECODER | MIXED | rotary() | {"num_local_experts": 4, "num_experts_per_tok": 2},
        mixed(replace(PLAIN, sink="logit")),
    ),
    # The same with the RoPE of its checkpoints: cos and sin times 0.1 ln 32 + 1, the scale its square.
    Architecture(
        "gpt_oss_yarn",
        "GptOssConfig",
        DECODER
        | MIXED
        | rotary(rope_type="yarn", factor=32.0, original_max_position_embeddings=16)
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
        mixed(replace(PLAIN, sink="logit", scale=0.25 * 1.3465735902799727**2)),
    ),
    # gpt2 76-230, GPT2Attention; 100-101, one over the layer's number
    Architecture(
        "gpt2",
        "GPT2Config",
        TOKENS
        | {"n_embd": Hq * D, "n_layer": 2, "n_head": Hq, "n_positions": 512, "initializer_range": 0.15}
        | {"scale_attn_by_inverse_layer_idx": True},
        {0: replace(nope(PLAIN), kv_heads=Hq), 1: replace(nope(PLAIN), kv_heads=Hq, scale=0.125)},
        attention="transformer.h.{}.attn",
    ),
    # gpt_neox 169-227, GPTNeoXAttention: q, k, v side by side within each head
    Architecture(
        "gpt_neox",
        "GPTNeoXConfig",
        LAYER_NORM | rotary(partial_rotary_factor=0.25),
        both(replace(PLAIN, rotary_width=4, kv_heads=Hq)),
        attention="gpt_neox.layers.{}.attention",
    ),
    # granite 115-182, GraniteAttention: line 124
    Architecture(
        "granite",
        "GraniteConfig",
        DECODER | {"attention_multiplier": 0.4},
        both(replace(PLAIN, scale=0.4)),
    ),
    # stablelm 210-319, StableLmAttention; 156-168, StableLmLayerNormPerHead, no bias
    Architecture(
        "stablelm",
        "StableLmConfig",
        LAYER_NORM | rotary(partial_rotary_factor=0.25) | {"qk_layernorm": True},
        both(replace(LAYER_OF_HEADS, rotary_width=4)),
        q_gains=tuple(f"q_layernorm.norms.{head}.weight" for head in range(Hq)),
        k_gains=tuple(f"k_layernorm.norms.{head}.weight" for head in range(Hk)),
    ),
    # phi 152-237, PhiAttention: nn.LayerNorm over hidden_size / heads, its bias zero
    Architecture(
        "phi",
        "PhiConfig",
        LAYER_NORM | rotary(partial_rotary_factor=0.5) | {"qk_layernorm": True},
        both(replace(LAYER, rotary_width=8)),
        **LAYERNORM,
    ),
    # persimmon 176-300, PersimmonAttention: q, k, v side by side within each head
    Architecture(
        "persimmon",
        "PersimmonConfig",
        LAYER_NORM | rotary(partial_rotary_factor=0.5),
        both(replace(LAYER, rotary_width=8, kv_heads=Hq)),
        **LAYERNORM,
    ),
    # llama4 301-393, Llama4TextAttention: 331, no norm without RoPE; 225-234, pairs as complex numbers;
    # 106-115, Llama4TextL2Norm: the mean of squares, so "rms". In the source the norm is after RoPE.
    # Line 360 scales q by 1 below position 8191. A chunk is longer than any test.
    Architecture(
        "llama4",
        "Llama4TextConfig",
        DECODER
        | {"intermediate_size_mlp": 32, "num_local_experts": 2, "interleave_moe_layer_step": 2}
        | {"no_rope_layers": [1, 0]},
        {0: replace(GAINLESS, rope="interleaved"), 1: nope(PLAIN)},
    ),
    # smollm3 166-242, SmolLM3Attention: line 192, a 1 in no_rope_layers means RoPE
    Architecture(
        "smollm3", "SmolLM3Config", DECODER | {"no_rope_layers": [1, 0]}, {0: PLAIN, 1: nope(PLAIN)}
    ),
    # glm4 198-263, Glm4Attention; 151-195, interleaved and partial
    Architecture(
        "glm4",
        "Glm4Config",
        DECODER | rotary(partial_rotary_factor=0.5),
        both(replace(PLAIN, rope="interleaved", rotary_width=8)),
    ),
    # ernie4_5 185-245, Ernie4_5Attention; 107-111, rotate_half
    Architecture("ernie4_5", "Ernie4_5Config", DECODER, both(replace(PLAIN, rope="interleaved"))),
    # hunyuan_v1_dense 154-225, HunYuanDenseV1Attention: 199-201, RoPE first
    Architecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1Config",
        DECODER,
        both(replace(RMS, order="after")),
        q_gains=("query_layernorm.weight",),
        k_gains=("key_layernorm.weight",),
    ),
    # apertus 197-268, ApertusAttention
    Architecture("apertus", "ApertusConfig", DECODER | rotary(), both(RMS), **NORM),
    # dots1 183-255, Dots1Attention
    Architecture(
        "dots1",
        "Dots1Config",
        DECODER
        | MIXED
        | {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
        mixed(RMS),
        **NORM,
    ),
    # minimax_m2 276-340, MiniMaxM2Attention; 254-266, rotary_dim
    Architecture(
        "minimax_m2",
        "MiniMaxM2Config",
        DECODER | rotary(partial_rotary_factor=0.5) | {"num_local_experts": 4, "num_experts_per_tok": 2},
        both(replace(FULL, rotary_width=8)),
        **NORM,
    ),
    # bert 140-207, BertSelfAttention
    Architecture(
        "bert",
        "BertConfig",
        SIZES | TOKENS | {"hidden_size": Hq * D},
        both(replace(nope(PLAIN), kv_heads=Hq, causal=False)),
        attention="encoder.layer.{}.attention.self",
        model="AutoModel",
    ),
    # vit 192-240, ViTAttention
    Architecture(
        "vit",
        "ViTConfig",
        SIZES | {"head_dim": D, "image_size": 12, "patch_size": 4, "num_channels": 1},
        both(replace(nope(PLAIN), kv_heads=Hq, causal=False)),
        attention="layers.{}.attention",
        model="AutoModel",
        image=(1, 12, 12),
    ),
    # internvl 101-173, InternVLVisionAttention: 129, eps left at the 1e-6 of the class
    Architecture(
        "internvl_vision",
        "InternVLVisionConfig",
        SIZES
        | {"hidden_size": Hq * D, "image_size": [12, 12], "patch_size": [4, 4], "num_channels": 1}
        | {"use_qk_norm": True, "layer_norm_eps": EPS},
        both(replace(nope(FULL), kv_heads=Hq, causal=False, eps=1e-6)),
        attention="encoder.layer.{}.attention",
        model="InternVLVisionModel",
        image=(1, 12, 12),
        **NORM,
    ),
    # esmc 180-248, EsmcAttention: 206, nn.LayerNorm over hidden_size, eps left at 1e-5
    Architecture(
        "esmc",
        "EsmcConfig",
        NARROW | {"num_key_value_heads": Hq},
        both(replace(FULL, q_norm="layer", k_norm="layer", kv_heads=Hq, causal=False, eps=1e-5)),
        attention="layers.{}.self_attn",
        model="AutoModel",
        **NORM,
    ),
    # nanochat 174-248, NanoChatAttention: the norm after RoPE, no gain; 167-171 turns the other way
    Architecture("nanochat", "NanoChatConfig", DECODER, both(GAINLESS)),
    # afmoe 299-388, AfmoeAttention: 360, RoPE in the sliding layers only; a gate on the output
    Architecture(
        "afmoe",
        "AfmoeConfig",
        DECODER | MIXED | MOE | {"num_shared_experts": 1},
        {0: windowed(RMS), 1: nope(RMS)},
        **NORM,
    ),
    # exaone4 186-260, Exaone4Attention: 234, RoPE in the sliding layers only
    Architecture("exaone4", "Exaone4Config", DECODER | MIXED, {0: windowed(RMS), 1: nope(RMS)}, **NORM),
    # lfm2 202-260, Lfm2Attention; the other layer is a convolution
    Architecture(
        "lfm2",
        "Lfm2Config",
        DECODER | {"layer_types": ["conv", "full_attention"], "norm_eps": EPS},
        {1: RMS},
        **LAYERNORM,
    ),
    # gemma3n 1150-1247, Gemma3nTextAttention: V normed, no scale; 118-136, Gemma3nRMSNorm: w, not 1 + w
    Architecture(
        "gemma3n",
        "Gemma3nTextConfig",
        DECODER
        | MIXED
        | {"num_kv_shared_layers": 0, "laurel_rank": 4}
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
        mixed(replace(RMS, v_norm=True, scale=1.0)),
        **NORM,
    ),
    # gemma4 1141-1253, Gemma4TextAttention: full layers with wider heads. Their RoPE has R = 8 but pairs
    # i with i + 16, as over the whole head: the other frequencies are 0 (modeling_rope_utils 247-264).
    Architecture(
        "gemma4",
        "Gemma4TextConfig",
        DECODER
        | MIXED
        | {"global_head_dim": 32, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCABULARY},
        {
            0: windowed(replace(RMS, v_norm=True, scale=1.0)),
            1: replace(RMS, v_norm=True, scale=1.0, head_dim=32, rotary_width=8),
        },
        **NORM,
    ),
    # qwen3_next 229-306, Qwen3NextAttention: q_proj makes a gate too; 126-140, 1 + w. Layer 0 is linear.
    Architecture(
        "qwen3_next",
        "Qwen3NextConfig",
        DECODER
        | MOE
        | rotary(partial_rotary_factor=0.25)
        | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        {1: replace(RMS, rotary_width=4)},
        offset=1.0,
        **NORM,
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in TABLE}

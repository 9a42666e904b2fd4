"""Small models of Hugging Face with unequal random weights, and batches to run them on.

Shapes: B batch, T tokens, Hq / Hk heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")

B, T, WIDTH, Hq, Hk, D, VOCABULARY = 2, 19, 48, 6, 2, 8, 97
WINDOW = 5

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": Hq,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = SIZES | {"num_key_value_heads": Hk, "attention_dropout": 0.1, "use_cache": False}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

# The effective gains of q and k of an attention module, and over how many entries each norm runs.
Norms = Callable[[nn.Module], tuple[Tensor, Tensor, int, int]]


@dataclass(frozen=True)
class Family:
    """One architecture: how to build it, and what its attention is, said without asking the model."""

    config: str
    options: dict[str, Any]
    implementations: tuple[str, ...] = ("eager", "sdpa")
    attention: str = "layers.{}.self_attn"
    is_causal: bool = True
    windows: tuple[int | None, int | None] = (None, None)
    norms: Norms | None = None
    logits: float = 1.6  # spread of the weights of q and k
    layouts: tuple[str, ...] = ("plain", "ones", "right", "left", "packed", "long")
    key_heads: int = Hk
    build: Callable[[Any], nn.Module] | None = None

    @property
    def layers(self) -> list[str]:
        return [self.attention.format(i) for i in range(2)]

    def make(self, implementation: str, **options: Any) -> nn.Module:
        """A model in training mode, the same at every call."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.options | options))
        config._attn_implementation = implementation
        model = (self.build or transformers.AutoModel.from_config)(config)
        randomize(model, self.logits)
        return model.train()


def randomize(model: nn.Module, logits: float) -> None:
    """Logits of order 1 to 10; no two gains, biases or sinks alike, the largest gain of q negative."""
    generator = torch.Generator().manual_seed(3)

    def normal(parameter: Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    for path, module in model.named_modules():
        is_norm = "Norm" in type(module).__name__ and "Group" not in type(module).__name__
        is_of_q_or_k = path.endswith(
            ("q_proj", "k_proj", "qkv_proj", "c_attn", "query", "key", ".q", ".k")
        )
        for name, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                if is_norm and name == "weight":
                    gain = 0.4 + 1.2 * torch.rand(parameter.shape, generator=generator)
                    gain.view(-1)[1] = -1.9 if "q_" in path else 1.7
                    parameter.copy_(gain - 1 if type(module).__name__.startswith("Gemma") else gain)
                elif isinstance(module, nn.Embedding) or name == "sinks":
                    normal(parameter, 1.0)
                elif parameter.ndim < 2:
                    normal(parameter, 0.2)
                else:
                    fan_in = parameter.shape[0 if type(module).__name__ == "Conv1D" else -1]
                    normal(parameter, (logits if is_of_q_or_k else 1.0) * fan_in**-0.5)


def per_head(module: Any) -> tuple[Tensor, Tensor, int, int]:
    return module.q_norm.weight, module.k_norm.weight, D, D


def per_head_plus_one(module: Any) -> tuple[Tensor, Tensor, int, int]:
    return 1 + module.q_norm.weight, 1 + module.k_norm.weight, D, D


def over_all_heads(module: Any) -> tuple[Tensor, Tensor, int, int]:
    return module.q_norm.weight, module.k_norm.weight, Hq * D, Hk * D


def list_of_norms(module: Any) -> tuple[Tensor, Tensor, int, int]:
    q, k = (
        torch.stack([norm.weight for norm in norms.norms])
        for norms in (module.q_layernorm, module.k_layernorm)
    )
    return q, k, D, D


def chameleon(config: Any) -> nn.Module:
    """The text half; the image tokenizer is never run."""
    return transformers.ChameleonModel(config)


GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": Hq,
    "n_positions": 512,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": D}
TEXT = ("plain", "ones", "right", "left", "long")

FAMILIES = {
    "llama": Family("LlamaConfig", DECODER),
    "qwen2": Family("Qwen2Config", DECODER),
    "qwen3": Family("Qwen3Config", DECODER | {"head_dim": D}, norms=per_head),
    "qwen3_moe": Family("Qwen3MoeConfig", DECODER | MOE, norms=per_head),
    "mixtral": Family(
        "MixtralConfig",
        DECODER | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None},
    ),
    "gemma2": Family(
        "Gemma2Config",
        DECODER
        | SLIDING_AND_FULL
        | {"head_dim": D, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 6},
        implementations=("eager",),
        windows=(WINDOW, None),
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        DECODER | SLIDING_AND_FULL | {"head_dim": D, "query_pre_attn_scalar": 5},
        windows=(WINDOW, None),
        norms=per_head_plus_one,
    ),
    "olmo2": Family("Olmo2Config", DECODER, norms=over_all_heads),
    "mistral": Family("MistralConfig", DECODER | {"sliding_window": WINDOW}, windows=(WINDOW, WINDOW)),
    "gpt_oss": Family(
        "GptOssConfig",
        DECODER | SLIDING_AND_FULL | {"head_dim": D, "num_local_experts": 2, "num_experts_per_tok": 1},
        implementations=("eager",),
        windows=(WINDOW, None),
        # Its mask knows nothing of position_ids: documents see each other, whatever their positions.
        layouts=("plain", "ones", "right", "left", "unpacked", "long"),
    ),
    "gpt2": Family("GPT2Config", GPT2, attention="h.{}.attn", key_heads=Hq),
    "gpt2_inverse": Family(
        "GPT2Config",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        attention="h.{}.attn",
        key_heads=Hq,
        logits=2.0,
    ),
    "bert": Family(
        "BertConfig",
        SIZES,
        attention="encoder.layer.{}.attention.self",
        is_causal=False,
        layouts=TEXT,
        key_heads=Hq,
    ),
    "t5_encoder": Family(
        "T5Config",
        {
            "d_model": WIDTH,
            "d_kv": D,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": Hq,
            "vocab_size": VOCABULARY,
            "relative_attention_num_buckets": 8,
            "pad_token_id": 0,
        },
        attention="encoder.block.{}.layer.0.SelfAttention",
        is_causal=False,
        layouts=TEXT,
        key_heads=Hq,
        logits=0.9,
        build=transformers.T5EncoderModel,
    ),
    "vit": Family(
        "ViTConfig",
        {key: SIZES[key] for key in list(SIZES)[:4]}
        | {"image_size": 12, "patch_size": 4, "num_channels": 1, "attention_probs_dropout_prob": 0.1},
        attention="layers.{}.attention",
        is_causal=False,
        layouts=("plain", "long"),
        key_heads=Hq,
    ),
    "cohere": Family("CohereConfig", DECODER | {"use_qk_norm": True}, norms=per_head),
    "chameleon": Family(
        "ChameleonConfig",
        DECODER
        | {
            "vq_config": {"embed_dim": 8, "latent_dim": 8, "base_channels": 32, "num_embeddings": 8}
            | {"channel_multiplier": [1], "num_res_blocks": 1, "double_latent": False, "resolution": 8},
            "vocabulary_map": {"<image>": 5},
        },
        norms=per_head,
        build=chameleon,
    ),
    "phi3": Family("Phi3Config", DECODER),
    "granite": Family("GraniteConfig", DECODER | {"attention_multiplier": 0.5}),
    "stablelm": Family(
        "StableLmConfig",
        DECODER | {"qk_layernorm": True, "partial_rotary_factor": 0.5},
        norms=list_of_norms,
    ),
}
PAIRS = [(name, how) for name, family in FAMILIES.items() for how in family.implementations]


@dataclass(frozen=True)
class Layout:
    """A batch: which tokens are real and to which document each belongs, and how a model is told."""

    real: Tensor  # [B, T]
    document: Tensor  # [B, T]
    options: dict[str, Any] = field(default_factory=dict)
    mask: Tensor | None = None  # [B, T, T] bool, if the caller makes it

    def visible(self, *, is_causal: bool, window: int | None) -> Tensor:
        """`[B, T, T]`, over queries and keys."""
        if self.mask is not None:
            return self.mask
        row, column = torch.arange(self.real.shape[1])[:, None], torch.arange(self.real.shape[1])
        seen = self.real[:, :, None] & self.real[:, None]
        seen = seen & (self.document[:, :, None] == self.document[:, None])
        if is_causal:
            seen = seen & (column <= row)
        if window is not None:
            seen = seen & (row - column < window)
        return seen

    def first(self) -> Tensor:
        """`[B, T]`: the position of the first real token of the document of each row."""
        same = (self.document[:, :, None] == self.document[:, None]) & self.real[:, None]
        return same.int().argmax(-1)


def layout(kind: str) -> Layout:
    length = 300 if kind == "long" else T
    real = torch.ones(B, length, dtype=torch.bool)
    document = torch.zeros(B, length, dtype=torch.long)
    if kind in ("plain", "long"):
        return Layout(real, document)
    if kind in ("packed", "unpacked"):
        # Unequal over the batch; one document of a single token, one longer than the window.
        lengths = ([7, 1, 11], [4, 9, 6])
        position = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        if kind == "packed":
            document = (position == 0).long().cumsum(-1)
        return Layout(real, document, {"position_ids": position})
    if kind == "right":
        real[0, 12:] = False
    elif kind == "left":
        real[0, :7] = False
    else:
        assert kind == "ones"
    return Layout(real, document, {"attention_mask": real.long()})


def arguments(name: str, batch: Layout, seed: int = 1) -> dict[str, Any]:
    """What the model is called with."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch.real.shape
    if name == "vit":
        image = torch.randn(shape[0], 1, 4, 4 * (shape[1] - 1), generator=generator)
        return {"pixel_values": image, "interpolate_pos_encoding": True}
    return {"input_ids": torch.randint(6, VOCABULARY, shape, generator=generator), **batch.options}

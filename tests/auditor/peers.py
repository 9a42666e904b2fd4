"""Released projects' own attention, as it is, and its formula as their source files state it.

Line numbers are of x-transformers 2.31.10 and diffusers 0.42.1. Shapes: H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import D, Expected, Hk, Hq, seeded

x_transformers = pytest.importorskip("x_transformers", reason="needs the dependency group `peers`")
diffusers = pytest.importorskip("diffusers", reason="needs the dependency group `peers`")
from diffusers.models.attention_processor import Attention, AttnProcessor  # noqa: E402
from diffusers.models.transformers import transformer_flux  # noqa: E402, F401 - for the tests

DIM, TOKENS, VOCABULARY = Hq * D, 11, 97
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """One configuration: how to build it, what probing should find, where its gains are stored.

    Attributes:
        formulas: by module path.
        codes, notes: of warnings and errors, and of infos.
        refused: modules that are not probed, and a part of the reason.
        q_gain, k_gain: names below the module; effective gain = offset + stored.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Inputs]]
    formulas: dict[str, Expected]
    codes: str = ""
    notes: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    q_gain: str | None = None
    k_gain: str | None = None
    offset: float = 0.0

    def build(self, seed: int = 0) -> tuple[nn.Module, Inputs]:
        """A model in evaluation mode with random weights and gains, the same at every call."""
        with seeded(seed):
            model, inputs = self.make()
            for path in self.formulas:
                for name in (self.q_gain, self.k_gain):
                    if name is not None:
                        parameter = model.get_submodule(path).get_parameter(name)
                        parameter.data.add_(torch.rand_like(parameter) - 0.5)
        return model.eval(), inputs

    def gain(self, model: nn.Module, path: str, side: str) -> Tensor | None:
        """The effective gain `[H, D]` of side "q" or "k"; None without a norm."""
        formula = self.formulas[path]
        norm, heads = (
            (formula.q_norm, formula.q_heads) if side == "q" else (formula.k_norm, formula.kv_heads)
        )
        if norm is None:
            return None
        name = self.q_gain if side == "q" else self.k_gain
        gain = torch.ones(1, formula.head_dim)
        if name is not None:
            gain = model.get_submodule(path).get_parameter(name).detach() + self.offset
        unit = formula.head_dim**-0.5 if norm == "l2" else 1.0
        return unit * gain.reshape(-1, formula.head_dim).expand(heads, -1)


# x_transformers.py 2287-2760, Attention; attend.py 492-666, Attend.
PLAIN = Expected(rope=None, rotary_width=0, kv_heads=Hq)
# x_transformers.py 2422-2427 and 227-230: F.normalize, whose eps is a clamp of the length at 1e-12; 2155
# and attend.py 556, logits times qk_norm_scale, 10.
COSINE = replace(
    PLAIN, q_norm="l2", k_norm="l2", statistic="head", eps=1e-12, eps_place="clamp", scale=10.0
)
# 2076-2080: gains [H, 1, D], at first D^0.25; the scale is D^-0.5.
COSINE_GAINS = replace(COSINE, gain="head", k_gain="head", scale=D**-0.5)
# 2431-2432 and 1114-1132: F.normalize times sqrt(D), gains 1 + gamma [H, 1, D].
RMS = replace(COSINE_GAINS, q_norm="rms", k_norm="rms")
# 893-917 and 2459-2480: pairs (2i, 2i + 1) of the first rotary_emb_dim entries, after the norm.
ROPE = replace(PLAIN, rope="interleaved", rotary_width=8)


def decoder(**options: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def make() -> tuple[nn.Module, Inputs]:
        layers = x_transformers.Decoder(
            dim=DIM, depth=2, heads=Hq, attn_dim_head=D, verbose=False, **options
        )
        model = x_transformers.TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers
        )
        return model, {"x": torch.randint(0, VOCABULARY, (2, TOKENS))}

    return make


GAINS = {"q_gain": "qk_norm_q_scale", "k_gain": "qk_norm_k_scale"}
GAMMAS: dict[str, Any] = {"q_gain": "q_rmsnorm.gamma", "k_gain": "k_rmsnorm.gamma", "offset": 1.0}


def language(
    name: str,
    formula: Expected,
    codes: str,
    notes: str,
    options: dict[str, Any],
    **gains: Any,
) -> Peer:
    """A decoder of two layers of x-transformers."""
    paths = ("attn_layers.layers.0.1", "attn_layers.layers.2.1")
    return Peer(name, decoder(**options), dict.fromkeys(paths, formula), codes, notes, **gains)


QK_NORM: dict[str, Any] = {"attn_qk_norm": True}
DIM_SCALE: dict[str, Any] = QK_NORM | {"attn_qk_norm_dim_scale": True}
RMSNORM: dict[str, Any] = {"attn_qk_rmsnorm": True}
FLASH: dict[str, Any] = {"attn_flash": True}
ROTARY: dict[str, Any] = {"rotary_pos_emb": True, "rotary_emb_dim": 8}

LANGUAGE = (
    language("plain", PLAIN, "", "QK001", {}),
    language("plain-flash", PLAIN, "", "QK001", FLASH),
    language("rope", ROPE, "", "QK001", ROTARY),
    # attend.py 529-532: heads repeated in turn; einsum without the axis of heads for one
    language("kv_heads", replace(PLAIN, kv_heads=Hk), "", "QK001", {"attn_kv_heads": Hk}),
    language("kv_heads-flash", replace(PLAIN, kv_heads=Hk), "", "QK001", {"attn_kv_heads": Hk} | FLASH),
    # attend.py 84-86 and 572-573: a scripted function
    language(
        "softclamp",
        replace(PLAIN, softcap=5.0),
        "",
        "QK001",
        {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 5.0},
    ),
    # attend.py 609-617: a column before those of the keys
    language("sink", replace(PLAIN, sink="logit"), "", "QK001", {"attn_head_learned_sink": True}),
    # x_transformers.py 2567-2573: keys further back than 4 are hidden
    language("window", replace(PLAIN, window=5), "", "QK001", {"attn_max_attend_past": 4}),
    # 631-699, added to the logits
    language("alibi", PLAIN, "", "QK001", {"alibi_pos_bias": True}),
    language("cosine", COSINE, "QK005 QK007", "QK022", QK_NORM),
    # attend.py 388-390: q times 10 sqrt(D), the rest by the kernel
    language("cosine-flash", COSINE, "QK005 QK007", "QK022", QK_NORM | FLASH),
    language(
        "cosine-one_kv_head",
        replace(COSINE, kv_heads=1),
        "QK005 QK007",
        "QK022",
        QK_NORM | {"attn_one_kv_head": True},
    ),
    language(
        "cosine-rope",
        replace(COSINE, rope="interleaved", rotary_width=8, order="not identifiable"),
        "QK005 QK007",
        "QK022",
        QK_NORM | ROTARY,
    ),
    language("cosine_gains", COSINE_GAINS, "QK007", "QK022", DIM_SCALE, **GAINS),
    language("cosine_gains-flash", COSINE_GAINS, "QK007", "QK022", DIM_SCALE | FLASH, **GAINS),
    language("rms", RMS, "QK007", "QK022", RMSNORM, **GAMMAS),
    language(
        "rms-rope-kv_heads",
        replace(RMS, rope="interleaved", rotary_width=8, order="before", kv_heads=Hk),
        "QK007",
        "QK022",
        RMSNORM | ROTARY | {"attn_kv_heads": Hk},
        **GAMMAS,
    ),
    language(
        "rms-of_k",
        replace(RMS, q_norm=None, gain=None),
        "QK007 QK016",
        "",
        {"attn_k_rmsnorm": True},
        k_gain="k_rmsnorm.gamma",
        offset=1.0,
    ),
    language(
        "rms-of_v",
        replace(RMS, v_norm=True),
        "QK003 QK007",
        "QK022",
        RMSNORM | {"attn_value_rmsnorm": True},
        **GAMMAS,
    ),
)


# attention_processor.py 2696-2787, AttnProcessor2_0.
IMAGE = replace(PLAIN, causal=False)
# normalization.py 510-567, RMSNorm over the head, eps of Attention 1e-5
IMAGE_RMS = replace(
    IMAGE,
    q_norm="rms",
    k_norm="rms",
    statistic="head",
    gain="shared",
    k_gain="shared",
    eps=1e-5,
    eps_place="inside",
)
IMAGE_LAYER = replace(IMAGE_RMS, q_norm="layer", k_norm="layer")
GAINLESS = {"gain": None, "k_gain": None}
AXIAL: dict[str, Any] = {"rope": "interleaved", "rotary_width": D, "order": "before"}
WEIGHTS = {"q_gain": "norm_q.weight", "k_gain": "norm_k.weight"}


def alone(**options: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def make() -> tuple[nn.Module, Inputs]:
        return Attention(DIM, heads=Hq, dim_head=D, **options), {
            "hidden_states": torch.randn(2, TOKENS, DIM)
        }

    return make


def flux() -> tuple[nn.Module, Inputs]:
    """Four tokens of text at the origin, then an image of 4 x 4."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=D,
        num_attention_heads=Hq,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    row, column = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    places = torch.stack((torch.zeros(4, 4), row, column), -1).reshape(16, 3)
    return model, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 4, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.3]),
        "img_ids": places,
        "txt_ids": torch.zeros(4, 3),
    }


def lumina() -> tuple[nn.Module, Inputs]:
    """Five tokens of text on a line, then an image of 4 x 4."""
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=DIM,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=Hq,
        num_kv_heads=Hk,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(64, 32, 32),
        cap_feat_dim=16,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([0.3, 0.3]),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
    }


def wan() -> tuple[nn.Module, Inputs]:
    """A film of 2 x 3 x 3, which looks at seven tokens of text."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=Hq,
        attention_head_dim=D,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 6, 6),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "timestep": torch.tensor([3, 3]),
    }


IMAGES = (
    Peer("plain", alone(), {"": IMAGE}, "", "QK001"),
    Peer("rms", alone(qk_norm="rms_norm"), {"": IMAGE_RMS}, "", "QK006 QK022", **WEIGHTS),
    Peer("layer", alone(qk_norm="layer_norm"), {"": IMAGE_LAYER}, "", "QK006 QK022", **WEIGHTS),
    # normalization.py 84-93; attention_processor.py 200-202, without weight and bias
    Peer(
        "layer-gainless",
        alone(qk_norm="fp32_layer_norm"),
        {"": replace(IMAGE_LAYER, **GAINLESS)},
        "QK005",
        "QK022",
    ),
    # normalization.py 621-631: F.normalize, clamped at the eps of Attention; the scale stays D^-0.5
    Peer(
        "l2",
        alone(qk_norm="l2"),
        {"": replace(IMAGE_RMS, **GAINLESS, q_norm="l2", k_norm="l2", eps_place="clamp")},
        "QK005 QK007",
        "QK022",
    ),
    # attention_processor.py 1103-1172, AttnProcessor: neither norm is called
    Peer(
        "rms-old_processor",
        alone(qk_norm="rms_norm", processor=AttnProcessor()),
        {"": IMAGE},
        "QK009",
        "QK001",
    ),
    # 305-308: without a scale it is taken by itself
    Peer(
        "rms-unscaled",
        alone(qk_norm="rms_norm", scale_qk=False),
        {"": replace(IMAGE, scale=1.0)},
        "QK009",
        "QK001",
    ),
    # transformer_flux.py 76-142; where there are two streams, each has projections of its own
    Peer(
        "flux",
        flux,
        {"single_transformer_blocks.0.attn": replace(IMAGE_RMS, **AXIAL, eps=1e-6)},
        "",
        "QK006 QK022",
        {"transformer_blocks.0.attn": "one row per token"},
        **WEIGHTS,
    ),
    # transformer_lumina2.py 68-149; the refiner of text turns by the first axis only, of 4 entries, and
    # the refiner of the image starts where the text ends
    Peer(
        "lumina2",
        lumina,
        {
            "context_refiner.0.attn": replace(IMAGE_RMS, **AXIAL | {"rotary_width": 4}, kv_heads=Hk),
            "layers.0.attn": replace(IMAGE_RMS, **AXIAL, kv_heads=Hk),
        },
        "",
        "QK006 QK022",
        {"noise_refiner.0.attn": "rotated or mixed at the first token"},
        **WEIGHTS,
    ),
    # transformer_wan.py 68-162 and 208-209: normed before the heads are split; attn2 looks at the text
    Peer(
        "wan",
        wan,
        {
            "blocks.0.attn1": replace(
                IMAGE_RMS, **AXIAL, statistic="full", gain="full", k_gain="full", eps=1e-6
            ),
            "blocks.0.attn2": replace(IMAGE_RMS, statistic="full", gain="full", k_gain="full", eps=1e-6),
        },
        "QK004",
        "",
        **WEIGHTS,
    ),
)

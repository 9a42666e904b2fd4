"""Faulty models with the codes that an auditor must find in each, and healthy ones with none to find.

`expected` are the codes that name the faults themselves. `also` are codes that follow from them and may
be reported as well: a sink that one path leaves out makes that path disagree with the others. Codes that
are only information are in neither.

A mutant whose faults act beyond the plain forward offers what shows them: `model.paths()` (QK013,
QK015, QK019) and `model.qk_clip_` (QK012), described in `bases.py`; `inputs()` for documents and padding
(QK014, QK019); `make_optimizer()` (QK010); `is_trained` (QK020); `expect` (QK024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from base_parts import EVERY_PATH, VOCABULARY, Base, Faults
from bases import LanguageModel, build

B, T, PADDED = 2, 24, 5
DECAY = 0.1
OptimizerFactory = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Mutant:
    """A model, what is wrong with it, and what it has to be audited with."""

    name: str
    base: Base
    faults: Faults
    expected: frozenset[str]
    also: frozenset[str] = frozenset()
    has_sink: bool = False
    is_packed: bool = False
    is_padded: bool = False
    is_trained: bool = False
    optimizer: OptimizerFactory | None = None
    expect: Mapping[str, object] | None = None
    dtype: torch.dtype = torch.float32

    def build(self) -> LanguageModel:
        """The same model at every call."""
        return build(self.base, self.faults, has_sink=self.has_sink).to(self.dtype)

    def build_clean(self) -> LanguageModel:
        """The same weights without the faults."""
        return replace(self, faults=Faults()).build()

    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with."""
        return batch(is_packed=self.is_packed, is_padded=self.is_padded)

    def make_optimizer(self, model: nn.Module) -> Optimizer | None:
        return None if self.optimizer is None else self.optimizer(model)


def batch(*, is_packed: bool, is_padded: bool) -> dict[str, Tensor]:
    """Tokens; documents unequal over the batch; padding on the left, in view of the rest."""
    generator = torch.Generator().manual_seed(7)
    made = {"tokens": torch.randint(VOCABULARY, (B, T), generator=generator)}
    if is_packed:
        lengths = ([9, 15], [4, 13, 7])
        made["documents"] = torch.stack(
            [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
        )
    if is_padded:
        made["key_padding"] = torch.ones(B, T, dtype=torch.bool)
        made["key_padding"][0, :PADDED] = False
    return made


def split_by(model: nn.Module, first: Callable[[str, Tensor], bool]) -> tuple[list[Any], list[Any]]:
    """Parameters for which `first` holds, and the others."""
    named = list(model.named_parameters())
    return [p for n, p in named if first(n, p)], [p for n, p in named if not first(n, p)]


def is_gain(name: str) -> bool:
    return name.endswith(("q_norm.gain", "k_norm.gain", "q_gain", "k_gain"))


def adamw(decayed: list[Any], others: list[Any]) -> AdamW:
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-3)


def healthy(model: nn.Module) -> Optimizer:
    """Matrices decay; gains, sinks, biases and norms do not."""
    return adamw(*split_by(model, lambda name, p: p.ndim > 1 and not is_gain(name)))


def one_group(model: nn.Module) -> Optimizer:
    """Everything decays."""
    return AdamW(model.parameters(), lr=1e-3, weight_decay=DECAY)


def matrices_decay(model: nn.Module) -> Optimizer:
    """By rank, as for gains `[D]`; here a gain is a matrix `[H, D]`."""
    return adamw(*split_by(model, lambda name, p: p.ndim > 1))


def norms_by_name(model: nn.Module) -> Optimizer:
    """By name; a gain that is no module's weight is called otherwise."""
    return adamw(*split_by(model, lambda name, p: "norm" not in name and not name.endswith("bias")))


def k_gain_decays(model: nn.Module) -> Optimizer:
    """One name forgotten in the list of exceptions."""
    return adamw(*split_by(model, lambda name, p: p.ndim > 1 and not (is_gain(name) and ".q_" in name)))


class MuonAndAdam(Optimizer):
    """Groups with `use_muon` take orthogonalized steps, the others those of AdamW (without momentum)."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["use_muon"]:
                    left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
                    update = left @ right
                else:
                    square = self.state[p].setdefault("square", torch.zeros_like(p))
                    square.lerp_(p.grad.square(), 0.05)
                    update = p.grad / (square.sqrt() + 1e-8)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def muon_and_adam(is_matrix: Callable[[str, Tensor], bool]) -> OptimizerFactory:
    def make(model: nn.Module) -> Optimizer:
        matrices, others = split_by(model, is_matrix)
        return MuonAndAdam([{"params": matrices, "use_muon": True}, {"params": others}])

    return make


def _is_hidden_matrix(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and "embedding" not in name and "head" not in name


# A gain `[H, D]` passes for a matrix by its rank.
gains_in_muon = muon_and_adam(_is_hidden_matrix)
gains_in_adam = muon_and_adam(lambda name, p: _is_hidden_matrix(name, p) and not is_gain(name))


def muon_of_matrices(model: nn.Module) -> Optimizer:
    """torch's own; sinks, biases and embeddings are another optimizer's."""
    return Muon(split_by(model, _is_hidden_matrix)[0], lr=1e-3, weight_decay=0.0)


def split(name: str, codes: str, faults: Faults = Faults(), *, also: str = "", **options: Any) -> Mutant:
    expected, more = frozenset(codes.split()), frozenset(also.split())
    return Mutant(f"split-{name}", "split", faults, expected, more, **options)


def fused(name: str, codes: str, faults: Faults = Faults(), *, also: str = "", **options: Any) -> Mutant:
    expected, more = frozenset(codes.split()), frozenset(also.split())
    return Mutant(f"fused-{name}", "fused", faults, expected, more, **options)


PACKED, PADDING, SINK = {"is_packed": True}, {"is_padded": True}, {"has_sink": True}
TRAINED, BF16, FP16 = {"is_trained": True}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}

SINGLE = [
    # Order against RoPE.
    split("norm_after_rope", "QK002", Faults(rope_first="qk")),
    fused("norm_after_rope", "QK002", Faults(rope_first="qk")),
    split("k_gain_after_rope", "QK002", Faults(gain_after_rope="k")),
    fused("gains_after_rope", "QK002", Faults(gain_after_rope="qk")),
    # V.
    split("v_normed", "QK003", Faults(v_norm="plain")),
    fused("v_normed", "QK003", Faults(v_norm="plain")),
    fused("v_normed_by_k_norm", "QK003", Faults(v_norm="k")),
    # Statistic and gain.
    split("statistic_over_all_heads", "QK004", Faults(statistic="all_heads")),
    fused("statistic_over_all_heads", "QK004", Faults(statistic="all_heads")),
    fused("statistic_over_the_head_axis", "QK004", Faults(statistic="over_heads")),
    split("no_gain", "QK005", Faults(gains_missing=True)),
    fused("no_gain", "QK005", Faults(gains_missing=True)),
    # eps.
    split("eps_tiny", "QK007", Faults(eps=1e-12)),
    split("eps_clamps", "QK007", Faults(eps=1e-12, eps_place="clamp")),
    split("eps_default", "QK007", Faults(eps=None)),
    fused("eps_outside", "QK007", Faults(eps_place="outside")),
    fused("eps_in_sum", "QK007", Faults(eps_place="sum")),
    fused("eps_missing", "QK007", Faults(eps=0.0)),
    # Precision.
    split("statistic_in_bf16", "QK008", Faults(statistic_dtype="bfloat16")),
    fused("statistic_in_fp16", "QK008", Faults(statistic_dtype="float16")),
    split("bf16_not_upcast", "QK008", Faults(statistic_dtype="input"), **BF16),
    fused("fp16_not_upcast", "QK008", Faults(statistic_dtype="input"), **FP16),
    # Norms that exist and do nothing, or half of them.
    split("norms_unused", "QK009", Faults(norms_unused="qk")),
    fused("norms_unused", "QK009", Faults(norms_unused="qk")),
    split("norms_discarded", "QK009", Faults(norms_discarded="qk")),
    fused("k_gain_unused", "QK009", Faults(gains_unused="k"), also="QK005"),
    split("k_norm_missing", "QK016", Faults(norms_missing="k")),
    fused("q_norm_missing", "QK016", Faults(norms_missing="q")),
    # Optimizer.
    split("one_group", "QK010", optimizer=one_group),
    split("gains_in_torch_muon", "QK010", optimizer=muon_of_matrices),
    split("k_gain_decays", "QK010", optimizer=k_gain_decays),
    fused("matrices_decay", "QK010", optimizer=matrices_decay),
    fused("gains_in_muon", "QK010", optimizer=gains_in_muon),
    fused("norms_by_name", "QK010", optimizer=norms_by_name),
    # Limits. A clamp of rotated entries spoils the rotation.
    split("q_clamped", "QK011", Faults(clamp_q=1.5), also="QK023"),
    split("qkv_clipped", "QK011", Faults(clip_qkv=2.5)),
    fused("k_clamped", "QK011", Faults(clamp_k=2.0), also="QK023"),
    fused("logits_clamped", "QK011", Faults(clamp_logits=1.0)),
    split("logits_clamped", "QK011", Faults(clamp_logits=3.0)),
    split("qk_clip", "QK012", Faults(qk_clip=True)),
    fused("qk_clip", "QK012", Faults(qk_clip=True)),
    # Sink.
    split("sink_unused", "QK013", Faults(sink_ignored_by=EVERY_PATH), **SINK),
    fused("sink_unused", "QK013", Faults(sink_ignored_by=EVERY_PATH), **SINK),
    fused("sink_not_in_sdpa", "QK013", Faults(sink_ignored_by=("sdpa",)), also="QK015", **SINK),
    split("sink_not_in_sdpa", "QK013", Faults(sink_ignored_by=("sdpa",)), also="QK015", **SINK),
    split("sink_not_in_decode", "QK013", Faults(sink_ignored_by=("decode",)), also="QK015", **SINK),
    # Leaks. A decoded token has no next one to see, nor later tokens in its statistic.
    split("sees_next_token", "QK014", Faults(sees_next_token=True), also="QK015"),
    fused("sees_next_token", "QK014", Faults(sees_next_token=True), also="QK015"),
    split("mask_as_float", "QK014", Faults(mask_as_float=True), also="QK015"),
    fused("statistic_over_tokens", "QK014", Faults(statistic="over_tokens"), also="QK004 QK015"),
    split("documents_ignored", "QK014", Faults(documents_ignored_by=EVERY_PATH), **PACKED),
    fused("documents_ignored", "QK014", Faults(documents_ignored_by=EVERY_PATH), **PACKED),
    split("padding_ignored", "QK014", Faults(padding_ignored_by=EVERY_PATH), **PADDING),
    fused("padding_ignored", "QK014", Faults(padding_ignored_by=EVERY_PATH), **PADDING),
    # Paths.
    split("decode_one_position_ahead", "QK015", Faults(decode_positions="one_ahead")),
    fused("decode_one_position_ahead", "QK015", Faults(decode_positions="one_ahead")),
    fused("decode_at_position_0", "QK015", Faults(decode_positions="zero")),
    split("decode_without_k_norm", "QK015", Faults(decode_k_norm="missing")),
    fused("decode_norms_k_twice", "QK015", Faults(decode_k_norm="twice")),
    split("decode_mask_top_left", "QK015", Faults(decode_mask_top_left=True)),
    split("eager_groups_interleaved", "QK015", Faults(eager_groups_interleaved=True)),
    fused("sdpa_unscaled", "QK015", Faults(unscaled_in=("sdpa",))),
    split("eager_without_mask", "QK019", Faults(mask_ignored_by=("eager",)), also="QK015"),
    fused("sdpa_without_mask", "QK019", Faults(mask_ignored_by=("sdpa",)), also="QK015"),
    fused(
        "sdpa_without_documents",
        "QK019",
        Faults(documents_ignored_by=("sdpa",)),
        also="QK015",
        **PACKED,
    ),
    # Scale.
    split("scale_twice", "QK017", Faults(scale="twice")),
    fused("scale_twice", "QK017", Faults(scale="twice")),
    # In the fused base hidden / heads is the head's width.
    split("scale_of_hidden", "QK018", Faults(scale="hidden_over_heads")),
    # Gains that training left alone.
    split("gains_untrained", "QK020", Faults(untrained_gains="qk"), **TRAINED),
    fused(
        "k_gain_of_a_layer_untrained",
        "QK020",
        Faults(untrained_gains="k", untrained_layers=(1,)),
        **TRAINED,
    ),
    # RoPE that is not relative.
    split("k_not_rotated", "QK023", Faults(rope="k_not_rotated")),
    fused("k_rotated_backwards", "QK023", Faults(rope="k_backwards")),
    split("layouts_differ", "QK023", Faults(rope="layouts_differ")),
    fused("minus_missing", "QK023", Faults(rope="minus_missing")),
    split("k_ignores_positions", "QK023", Faults(rope="k_ignores_positions")),
    fused("k_ignores_positions", "QK023", Faults(rope="k_ignores_positions")),
    fused("angles_in_bf16", "QK023", Faults(rope="bfloat16_angles")),
]

COMBINED = [
    split("norms_on_k_and_v", "QK003 QK016", Faults(norms_missing="q", v_norm="k")),
    split("k_norm_unused", "QK009 QK016", Faults(norms_unused="k")),
    split("gains_unused", "QK005 QK009", Faults(gains_unused="qk")),
    split("over_all_heads_no_gain", "QK004 QK005", Faults(statistic="all_heads", gains_missing=True)),
    split(
        "no_gain_scale_of_hidden", "QK005 QK018", Faults(gains_missing=True, scale="hidden_over_heads")
    ),
    split("v_normed_scale_of_hidden", "QK003 QK018", Faults(v_norm="plain", scale="hidden_over_heads")),
    fused(
        "over_all_heads_after_rope", "QK002 QK004", Faults(statistic="all_heads", gain_after_rope="qk")
    ),
    split("eps_tiny_one_group", "QK007 QK010", Faults(eps=1e-12), optimizer=one_group),
    split(
        "untrained_one_group",
        "QK010 QK020",
        Faults(untrained_gains="qk"),
        optimizer=one_group,
        **TRAINED,
    ),
    fused(
        "sees_next_sink_unused",
        "QK013 QK014",
        Faults(sees_next_token=True, sink_ignored_by=EVERY_PATH),
        also="QK015",
        **SINK,
    ),
    fused(
        "sdpa_without_mask_and_sink",
        "QK013 QK019",
        Faults(mask_ignored_by=("sdpa",), sink_ignored_by=("sdpa",)),
        also="QK015",
        **SINK,
    ),
    fused(
        "bf16_eps_outside",
        "QK007 QK008",
        Faults(statistic_dtype="bfloat16", eps_place="outside"),
    ),
    split("qk_clip_q_clamped", "QK011 QK012", Faults(qk_clip=True, clamp_q=1.5), also="QK023"),
    fused("qk_clip_v_normed", "QK003 QK012", Faults(qk_clip=True, v_norm="plain")),
    split("k_ignores_positions_eps", "QK007 QK023", Faults(rope="k_ignores_positions", eps=None)),
    fused("v_normed_minus_missing", "QK003 QK023", Faults(v_norm="plain", rope="minus_missing")),
    fused(
        "k_norm_missing_q_clamped",
        "QK011 QK016",
        Faults(norms_missing="k", clamp_q=1.5),
        also="QK023",
    ),
    split("k_norm_unused_scale_twice", "QK009 QK016 QK017", Faults(norms_unused="k", scale="twice")),
    fused(
        "documents_ignored_decode_scale",
        "QK014 QK015 QK017",
        Faults(documents_ignored_by=EVERY_PATH, decode_positions="zero", scale="twice"),
        **PACKED,
    ),
    split(
        "after_rope_decode_scale_of_hidden",
        "QK002 QK015 QK018",
        Faults(gain_after_rope="qk", decode_k_norm="missing", scale="hidden_over_heads"),
    ),
]

MUTANTS = SINGLE + COMBINED

# What is wrong only with what was meant.
UNEXPECTED = [
    split(
        "not_causal",
        "QK024",
        Faults(mask_ignored_by=EVERY_PATH),
        also="QK014 QK015",
        expect={"causal": True},
    ),
    fused("another_norm", "QK024", expect={"norm": "full"}),
    split("another_order", "QK002 QK024", Faults(gain_after_rope="k"), expect={"order": "before_rope"}),
    fused("another_eps", "QK024", expect={"eps": 1e-5}),
    split("another_scale", "QK024", expect={"scale": 1 / 16}),
    fused("no_sink", "QK024", expect={"blocks.1.*:sink": "logit"}),
    split("another_sink", "QK024", **SINK, expect={"sink": "off_by_one"}),
]

# What a hasty auditor would accuse: each is right, or wrong in a way that is only information.
HEALTHY = [
    split("plain", "", optimizer=healthy, **TRAINED),
    fused("plain", "", optimizer=healthy, **TRAINED),
    split("sink_packed", "", **SINK, **PACKED),
    fused("sink_packed", "", **SINK, **PACKED),
    split("padded", "", **PADDING),
    fused("padded_packed", "", optimizer=gains_in_adam, **PADDING, **PACKED),
    split("bf16", "", **BF16),
    fused("fp16", "", **FP16),
    split("at_start", "", Faults(untrained_gains="qk")),
    # Clipping by weights is what a model without norms needs.
    split("no_norm_qk_clip", "", Faults(norms_missing="qk", qk_clip=True)),
    fused("no_norm", "", Faults(norms_missing="qk")),
]

"""What the base models of `bases.py` are made of, and the mistakes that can be switched on in each part.

Shapes: B batch, T tokens (Tq queries, Tk keys), H heads (Hq / Hk), D head width, R rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

VOCABULARY, LAYERS, THETA, EPS = 61, 2, 10_000.0, 1e-6
EVERY_PATH = ("eager", "sdpa", "decode")

Sides = Literal["", "q", "k", "qk"]
Base = Literal["split", "fused"]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a careless hand did. Sides are the letters of "qk"; paths are names of `model.paths()`."""

    # Norm.
    norms_missing: Sides = ""
    norms_unused: Sides = ""  # built, never called
    norms_discarded: Sides = ""  # called, the result goes nowhere
    v_norm: Literal["", "plain", "k"] = ""  # "k": by the norm of k, gain included
    statistic: Literal["head", "all_heads", "over_heads", "over_tokens"] = "head"
    statistic_dtype: Literal["float32", "input", "bfloat16", "float16"] = "float32"
    eps: float | None = EPS  # None: what the framework takes, the machine epsilon
    eps_place: Literal["inside", "outside", "sum", "clamp"] = "inside"
    # Gain.
    gains_missing: bool = False
    gains_unused: Sides = ""  # parameters that are multiplied with nothing
    gain_after_rope: Sides = ""
    untrained_gains: Sides = ""  # still 1
    untrained_layers: tuple[int, ...] = (0, 1)
    # RoPE.
    rope_first: Sides = ""  # the whole norm follows it
    rope: Literal[
        "relative",
        "k_not_rotated",
        "k_backwards",
        "k_ignores_positions",
        "layouts_differ",
        "minus_missing",
        "bfloat16_angles",
    ] = "relative"
    # Limits.
    clip_qkv: float | None = None  # of the projections
    clamp_q: float | None = None  # of what enters the product
    clamp_k: float | None = None
    clamp_logits: float | None = None
    qk_clip: bool = False
    # Scale.
    scale: Literal["head", "twice", "hidden_over_heads"] = "head"
    unscaled_in: tuple[str, ...] = ()
    # Mask and sink.
    sees_next_token: bool = False
    mask_as_float: bool = False  # 1 and 0 are added, where 0 and -inf were meant
    mask_ignored_by: tuple[str, ...] = ()
    documents_ignored_by: tuple[str, ...] = ()
    padding_ignored_by: tuple[str, ...] = ()
    sink_ignored_by: tuple[str, ...] = ()
    # Paths.
    eager_groups_interleaved: bool = False  # query head i to key head i % Hk
    decode_positions: Literal["right", "one_ahead", "zero"] = "right"
    decode_k_norm: Literal["once", "missing", "twice"] = "once"
    decode_mask_top_left: bool = False  # a decoded token takes the mask row of token 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One architecture."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_width: int
    layout: Literal["half", "interleaved"]
    implementation: Literal["eager", "sdpa"]  # of a plain forward, and of decoding


SIZES: dict[str, Sizes] = {
    "split": Sizes(
        hidden=48,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        rotary_width=16,
        layout="half",
        implementation="sdpa",
    ),
    "fused": Sizes(
        hidden=64,
        q_heads=4,
        kv_heads=4,
        head_dim=16,
        rotary_width=8,
        layout="interleaved",
        implementation="eager",
    ),
}


class Cache:
    """Keys, normed and rotated, and values of all layers so far, each `[B, Hk, Tk, D]`."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * LAYERS

    @property
    def length(self) -> int:
        return 0 if self.layers[-1] is None else self.layers[-1][0].shape[2]

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the layer, the new ones last."""
        held = self.layers[layer]
        if held is not None:
            k_BHTD, v_BHTD = torch.cat([held[0], k_BHTD], 2), torch.cat([held[1], v_BHTD], 2)
        self.layers[layer] = (k_BHTD, v_BHTD)
        return k_BHTD, v_BHTD


@dataclass(frozen=True)
class Call:
    """What one forward tells every layer."""

    q_positions: Tensor  # [B, Tq]
    k_positions: Tensor  # [B, Tq], of the new keys
    visible: Tensor  # [B or 1, 1, Tq, Tk] bool
    is_plain: bool  # causal and nothing else: torch's own flag says it
    implementation: str
    path: str
    cache: Cache | None

    @property
    def is_decoding(self) -> bool:
        return self.path == "decode"


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x_BTHD: Tensor, gain_HD: Tensor | None, faults: Faults) -> Tensor:
    """`x * rsqrt(mean(x^2 over D) + eps) * gain`, at least in fp32."""
    if faults.statistic_dtype != "input":
        x_BTHD = x_BTHD.to(wide(x_BTHD.dtype))
    squared = x_BTHD
    if faults.statistic_dtype in ("bfloat16", "float16"):
        squared = x_BTHD.to(getattr(torch, faults.statistic_dtype))
    axes = {"head": (-1,), "all_heads": (-2, -1), "over_heads": (-2,), "over_tokens": (1,)}
    mean_square = squared.square().mean(axes[faults.statistic], keepdim=True).to(x_BTHD.dtype)
    eps = torch.finfo(x_BTHD.dtype).eps if faults.eps is None else faults.eps
    D = x_BTHD.shape[-1]
    if faults.eps_place == "outside":
        rms = mean_square.sqrt() + eps
    elif faults.eps_place == "clamp":  # F.normalize
        rms = (D * mean_square).sqrt().clamp(min=eps) / D**0.5
    else:
        rms = (mean_square + (eps / D if faults.eps_place == "sum" else eps)).sqrt()
    x_hat = x_BTHD / rms
    return x_hat if gain_HD is None else x_hat * gain_HD.to(x_hat.dtype)


def rotate(x_BTHD: Tensor, positions_BT: Tensor, R: int, layout: str, faults: Faults) -> Tensor:
    """RoPE of the first R entries; pairs are `(i, i + R/2)` or `(2i, 2i + 1)`."""
    dtype = torch.bfloat16 if faults.rope == "bfloat16_angles" else wide(x_BTHD.dtype)
    frequency = THETA ** -(torch.arange(0, R, 2, dtype=wide(x_BTHD.dtype), device=x_BTHD.device) / R)
    angle = (positions_BT[:, :, None, None].to(dtype) * frequency.to(dtype)).to(frequency.dtype)
    cos, sin = angle.cos(), angle.sin()
    turned, rest = x_BTHD[..., :R], x_BTHD[..., R:]
    if layout == "half":
        a, b = turned.chunk(2, -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
    other = b if faults.rope == "minus_missing" else -b
    pair = a * cos + other * sin, b * cos + a * sin
    turned = torch.cat(pair, -1) if layout == "half" else torch.stack(pair, -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def visibility(
    Tq: int, Tk: int, documents_BT: Tensor | None, padding_BT: Tensor | None, path: str, faults: Faults
) -> Tensor:
    """Bool `[B or 1, 1, Tq, Tk]`: causal, queries being the last Tq tokens; own document; no padding."""
    full = torch.ones(1, 1, Tq, Tk, dtype=torch.bool)
    if path in faults.mask_ignored_by:
        return full
    last = 0 if faults.decode_mask_top_left else Tk - Tq
    visible = full.tril(last + faults.sees_next_token)
    if documents_BT is not None and path not in faults.documents_ignored_by:
        own_BT = documents_BT[:, Tk - Tq :]
        visible = visible & (own_BT[:, None, :, None] == documents_BT[:, None, None])
    if padding_BT is not None and path not in faults.padding_ignored_by:
        # A padded token sees itself, else its row would be empty and its softmax 0 / 0.
        visible = visible & padding_BT[:, None, None] | full.tril(Tk - Tq).triu(Tk - Tq)
    return visible


def as_bias(visible: Tensor, dtype: torch.dtype, faults: Faults) -> Tensor:
    """The mask as it is added to logits."""
    if faults.mask_as_float:
        return visible.to(dtype)
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)


def eager_attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    call: Call,
    scale: float,
    sink_H: Tensor | None,
    faults: Faults,
) -> Tensor:
    """Matmul, scale, mask, softmax with the sink as one more column, matmul."""
    G = q_BHTD.shape[1] // k_BHTD.shape[1]
    if faults.eager_groups_interleaved:
        k_BHTD, v_BHTD = k_BHTD.repeat(1, G, 1, 1), v_BHTD.repeat(1, G, 1, 1)
    else:
        k_BHTD, v_BHTD = k_BHTD.repeat_interleave(G, 1), v_BHTD.repeat_interleave(G, 1)
    scores = q_BHTD @ k_BHTD.mT * scale
    if faults.clamp_logits is not None:
        scores = scores.clamp(-faults.clamp_logits, faults.clamp_logits)
    scores = scores.to(wide(scores.dtype))
    scores = scores + as_bias(call.visible, scores.dtype, faults)
    if sink_H is not None:
        column = sink_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    p = scores.softmax(-1)[..., : k_BHTD.shape[2]]
    return p.to(v_BHTD.dtype) @ v_BHTD


def sdpa_attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    call: Call,
    scale: float,
    sink_H: Tensor | None,
    faults: Faults,
) -> Tensor:
    """torch's own. It knows no sink: a key and a value of zeros stand in, biased by the sink."""
    attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    if sink_H is None and call.is_plain:
        return attend(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    if sink_H is None:
        mask = as_bias(call.visible, q_BHTD.dtype, faults) if faults.mask_as_float else call.visible
        return attend(q_BHTD, k_BHTD, v_BHTD, attn_mask=mask)
    bias = as_bias(call.visible, q_BHTD.dtype, faults)
    bias = bias.expand(q_BHTD.shape[0], q_BHTD.shape[1], *bias.shape[2:])
    column = sink_H.to(bias.dtype)[None, :, None, None].expand(*bias.shape[:3], 1)
    k_BHTD, v_BHTD = F.pad(k_BHTD, (0, 0, 0, 1)), F.pad(v_BHTD, (0, 0, 0, 1))
    return attend(q_BHTD, k_BHTD, v_BHTD, attn_mask=torch.cat([bias, column], -1))

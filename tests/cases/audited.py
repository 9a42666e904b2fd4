"""What the auditor's cases are made of: a layer whose parts a case replaces, a model of several paths.

Shapes: B batch, T tokens, H heads (Hk of k and v), D head width, C hidden, R rotary width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 31


def rms(x_BTHD, gain=None, *, axes=(-1,), eps=1e-6, dtype=torch.float32):
    """The norm as it should be, unless a case says otherwise."""
    x = x_BTHD.to(dtype)
    x = x * (x.square().mean(axes, keepdim=True) + eps).rsqrt()
    return x if gain is None else x * gain


def turn(x_BTHD, frequencies, *, R=None, layout="half", positions=None):
    """RoPE of the first R entries by `position * frequency` for each pair."""
    R = x_BTHD.shape[-1] if R is None else R
    positions = torch.arange(x_BTHD.shape[1]) if positions is None else positions
    angle = positions[..., None].float() * torch.as_tensor(frequencies)[: R // 2]
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    x, rest = x_BTHD[..., :R], x_BTHD[..., R:]
    a, b = x.chunk(2, -1) if layout == "half" else (x[..., ::2], x[..., 1::2])
    pair = a * cos - b * sin, b * cos + a * sin
    x = torch.cat(pair, -1) if layout == "half" else torch.stack(pair, -1).flatten(-2)
    return torch.cat((x, rest), -1)


def frequencies(R, base=100.0):
    return base ** -(torch.arange(0, R, 2) / R)


def grouped(q_BHTD, k_BHTD, v_BHTD):
    """k and v once for each query head."""
    G = q_BHTD.shape[1] // k_BHTD.shape[1]
    return k_BHTD.repeat_interleave(G, 1), v_BHTD.repeat_interleave(G, 1)


def causal(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


def eager(q, k, v, *, scale=None, visible=None, sink=None):
    """Attention written out, causal unless `visible` says otherwise; the sink is one more column."""
    k, v = grouped(q, k, v)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = causal(q.shape[2]) if visible is None else visible
    s = s.float().masked_fill(~visible, -torch.inf)
    if sink is not None:
        s = torch.cat((s, sink[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    return s.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def sdpa(q, k, v, *, scale=None, visible=None):
    visible = causal(q.shape[2]) if visible is None else visible
    k, v = grouped(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


class Layer(nn.Module):
    """Four projections. `hat(x, gain, side)` makes what enters the product from q or k `[B, T, H, D]`,
    `value(v)` from v; `attend(q, k, v)` is the rest, `[B, H, T, D]`."""

    def __init__(
        self, heads, head_dim, hat, *, gains=(None, None), kv_heads=None, dim=8, attend=eager, value=None
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.D, self.attend, self.value = head_dim, attend, value
        if hat is not None:
            self.hat = hat
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_gain, self.k_gain = (None if g is None else nn.Parameter(g.clone()) for g in gains)

    def forward(self, x, attend=None, **told):
        q, k, v = (f(x).unflatten(-1, (-1, self.D)) for f in (self.q, self.k, self.v))
        q, k = self.hat(q, self.q_gain, "q", **told), self.hat(k, self.k_gain, "k", **told)
        v = v if self.value is None else self.value(v)
        q, k, v = (y.to(x.dtype).transpose(1, 2) for y in (q, k, v))
        return self.out((attend or self.attend)(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Tokens to logits `[B, T, V]`. `attends` are the ways through it, by name; the first is its own."""

    def __init__(self, make_layer, attends=None, *, layers=2, dim=8):
        super().__init__()
        self.attends = attends or {"eager": None}
        self.embedding, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(make_layer() for _ in range(layers))

    def forward(self, tokens, path=None, **told):
        attend = self.attends[path or next(iter(self.attends))]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, x.shape[-1:]), attend, **told)
        return self.head(x)

    def paths(self):
        return {name: partial(self, path=name) for name in self.attends}


def uneven(*shape):
    """Gains of which no two are alike."""
    return 0.5 + torch.rand(shape)


def tokens(B=2, T=12):
    return torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(3))


def only(report, code):
    """The findings of a code, of which there must be some."""
    found = [one for one in report.findings if one.code == code]
    assert found, (code, report.findings, report.not_probed)
    return found


def normed(x, gain, side):
    return rms(x, gain)


def model_of(hat, *, heads=2, D=8, gains="uneven", attends=None, layers=1, **options):
    """A model of layers with a gain `[H, D]` on each side."""
    kv_heads = options.get("kv_heads", heads)

    def made():
        pair = (uneven(heads, D), uneven(kv_heads, D)) if gains == "uneven" else gains
        return Layer(heads, D, hat, gains=pair, **options)

    return Model(made, attends, layers=layers)


def formula_of(report, layer=0):
    return report.formulas[f"layers.{layer}"]


def codes_of(report):
    return {one.code for one in report.findings}


H, D = 2, 8


def gains():
    return uneven(H, D), uneven(H, D)


def of(make, layers=2, **options):
    return Model(lambda: make(H, D, normed, gains=gains(), **options), layers=layers)


def assert_sound(report, layers=("layers.0", "layers.1")):
    assert not report.codes, report.findings
    assert list(report.formulas) == list(layers), report.not_probed
    assert not report.not_probed
    assert f"{len(layers)} of {len(layers)} attentions" in report.exercised[0]


def hugging_face(**options):
    transformers = pytest.importorskip("transformers", reason="needs qknorm[transformers]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    small = {"initializer_range": 0.3, "max_position_embeddings": 256}
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes | heads | small | options))

"""What the monitor's telemetry cases share: ways into it, and the definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

from qknorm.monitor import Monitor
from qknorm.nn import Attention, AttentionConfig

ROUNDING = (1 + 2**-8) ** 3


class Sdpa(nn.Module):
    """What a user writes around the function of torch."""

    def forward(self, q, k, v=None, **options):
        return F.scaled_dot_product_attention(q, k, k if v is None else v, **options)


class Flex(nn.Module):
    def forward(self, q, k, **options):
        return flex_attention(q, k, k, **options)


def record_of(model, *inputs, sample=None, whole=False, **options):
    """What the monitor says of the one layer of a model after one call."""
    with Monitor.attach(model, every=1, sample=sample) as monitor:
        model(*inputs, **options)
        (record,) = monitor.step()
    if whole:
        return record
    (layer,) = record.layers.values()
    return layer


def visible_by(mask, tokens):
    """bool `[B or 1, 1, T, T]`, pair by pair as the mask defines it."""
    pairs = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    if mask.causal:
        pairs = pairs.tril()
    if mask.documents is not None:
        ids = mask.documents
        pairs = pairs & (ids[:, None, :, None] == ids[:, None, None]) & (ids >= 0)[:, None, None]
    if mask.key_padding is not None:
        pairs = pairs & mask.key_padding[:, None, None]
    return pairs


def truth(logits, visible):
    """Per head, by the definitions in float64: rows that see a key and whose own token is real."""
    s = logits.double().masked_fill(~visible, -math.inf)
    visible = visible.expand(s.shape)
    counted = visible.any(-1)
    if s.shape[-1] == s.shape[-2]:
        counted = counted & visible.diagonal(dim1=-2, dim2=-1)
    p = s.softmax(-1).nan_to_num()
    entropy = -torch.special.xlogy(p, p).sum(-1)
    keys = visible.sum(-1)
    choice = counted & (keys > 1)
    ratio = entropy / keys.clamp(min=2).log()
    return {
        "max_logit": s.amax(-1).masked_fill(~counted, -math.inf).amax((0, 2)),
        "entropy_nats": (entropy * counted).sum((0, 2)) / counted.sum((0, 2)),
        "entropy_ratio": (ratio * choice).sum((0, 2)) / choice.sum((0, 2)),
    }


def agree(layer, wanted, tolerance=1e-5):
    for name, value in wanted.items():
        found = torch.tensor(getattr(layer, name), dtype=torch.float64)
        assert_close(found, value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def written_out(logits):
    """q and k `[B, H, T, T]` whose product at scale 1 is `logits`: the keys are unit vectors."""
    return logits, torch.eye(logits.shape[-1]).expand(logits.shape)


def projections(logits):
    """One-hot tokens `[B, T, B T]` and weights of q and k that make the logits of them."""
    b, h, t, _ = logits.shape
    q = logits.permute(1, 3, 0, 2).reshape(h * t, b * t)
    k = torch.eye(t).repeat(h, b)
    return torch.eye(b * t).view(b, t, b * t), q, k


def by_bool_mask(logits, mask, **options):
    q, k = written_out(logits)
    visible = visible_by(mask, q.shape[-1])
    return record_of(Sdpa(), q, k, attn_mask=visible, scale=1.0, **options)


def by_added_infinity(logits, mask, hidden=-math.inf, **options):
    q, k = written_out(logits)
    added = torch.zeros(1).masked_fill(~visible_by(mask, q.shape[-1]), hidden)
    return record_of(Sdpa(), q, k, attn_mask=added, scale=1.0, **options)


def by_added_minimum(logits, mask, **options):
    """As Hugging Face hides keys."""
    return by_added_infinity(logits, mask, torch.finfo(torch.float32).min, **options)


def by_block_mask(logits, mask, **options):
    q, k = written_out(logits)
    pairs = visible_by(mask, q.shape[-1]).expand(len(q), 1, -1, -1)
    block_mask = create_block_mask(
        lambda b, h, i, j: pairs[b, 0, i, j], len(q), None, *pairs.shape[-2:], device="cpu"
    )
    return record_of(Flex(), q, k, block_mask=block_mask, scale=1.0, **options)


def by_multihead(logits, mask, **options):
    x, q, k = projections(logits)
    width, heads = len(q), logits.shape[1]
    x = F.pad(x, (0, width - x.shape[-1]))
    layer = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.zero_()
        layer.in_proj_weight[:width, : q.shape[1]] = q * logits.shape[-1] ** 0.5
        layer.in_proj_weight[width : 2 * width, : k.shape[1]] = k
    hidden = ~visible_by(mask, x.shape[1]).expand(len(x), heads, -1, -1).flatten(0, 1)
    return record_of(layer, x, x, x, attn_mask=hidden, need_weights=False, **options)


def own_layer(logits, **config):
    """Our layer without a norm, and an input, that make these logits."""
    x, q, k = projections(logits)
    heads, width = logits.shape[1], logits.shape[-1]
    layer = Attention(
        AttentionConfig(
            dim=x.shape[-1], num_heads=heads, head_dim=width, norm=None, **{"scale": 1.0, **config}
        )
    )
    with torch.no_grad():
        layer.qkv.weight[: 2 * heads * width] = torch.cat((q, k))
    return layer, x


def by_own(logits, mask, **options):
    layer, x = own_layer(logits)
    return record_of(layer, x, mask=mask, **options)


MASKED = [by_bool_mask, by_added_infinity, by_added_minimum, by_block_mask, by_multihead]
WAYS = [*MASKED, by_own]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)


def llama(**options):
    transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, **options))

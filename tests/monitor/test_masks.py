"""What a mask hides and what it adds, in every form in which a kernel takes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from qknorm.monitor import Alerts, LayerRecord, Monitor
from qknorm.monitor.taps.functional import _flex
from qknorm.ops import online_softmax
from test_taps import CAUSAL, B, C, D, H, Plain, T, agree, dense

REAL = torch.ones(B, T, dtype=torch.bool)
REAL[0, 25:] = False
PADDED = REAL[:, None, None].expand(B, 1, T, T)
DISTANCE = torch.arange(T)[:, None] - torch.arange(T)
SLOPES = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
LOW = {"-1e4": -1e4, "-1e9": -1e9, "min": torch.finfo(torch.float32).min, "-inf": -math.inf}


def seen(module: nn.Module, *args: Any, **kwargs: Any) -> LayerRecord:
    """What the monitor says of one call; the output must be what it is without the monitor."""
    before = module(*args, **kwargs)
    with Monitor.attach(module, every=1) as monitor:
        after = module(*args, **kwargs)
        (record,) = monitor.step()
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (before, after)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert record.silent == {}
    return record.layers[""]


def low(real: Tensor, value: float) -> Tensor:
    return torch.zeros(real.shape).masked_fill(~real, value)


def heads(module: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k = (
        F.linear(x, w, b).unflatten(-1, (H, D)).transpose(1, 2).detach()
        for w, b in zip(weights[:2], biases[:2], strict=True)
    )
    return q, k


# Additive masks -----------------------------------------------------------------------------------


def test_f25_a_float_key_padding_mask_of_multihead_attention_is_added() -> None:
    """Beside no mask, a bool mask, a float mask and one per head."""
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(C, H, batch_first=True), 2 * torch.randn(B, T, C)
    with torch.no_grad():
        module.in_proj_bias.normal_()
    q, k = heads(module, x)
    per_head = torch.randn(B * H, T, T)
    masks: list[tuple[Tensor | None, Tensor, Tensor | float]] = [
        (None, torch.ones_like(CAUSAL), 0.0),
        (~CAUSAL[0, 0], CAUSAL, 0.0),
        (low(CAUSAL[0, 0], -math.inf), CAUSAL, 0.0),
        (per_head, torch.ones_like(CAUSAL), per_head.view(B, H, T, T).double()),
    ]
    for mask, visible, bias in masks:
        for value in LOW.values():
            found = seen(module, x, x, x, attn_mask=mask, key_padding_mask=low(REAL, value))
            agree(found, dense(q, k, visible & PADDED, bias=bias))
        found = seen(module, x, x, x, attn_mask=mask, key_padding_mask=low(REAL, -3.0))
        agree(found, dense(q, k, visible, bias=bias + low(REAL, -3.0)[:, None, None].double()))
        found = seen(module, x, x, x, attn_mask=mask, key_padding_mask=~REAL)
        agree(found, dense(q, k, visible & PADDED, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_f25_masks_of_half_precision(dtype: torch.dtype) -> None:
    """-1e4 is -9984 in bf16; a small bias on top of it uncovers nothing."""
    torch.manual_seed(1)
    module, x = Plain().to(dtype), torch.randn(B, T, C).to(dtype)
    bias = torch.randn(1, H, T, T).mul(8).to(dtype)
    for value in (-1e4, torch.finfo(dtype).min, -math.inf):
        mask = low(PADDED & CAUSAL, value).to(dtype)
        found = seen(module, x, attn_mask=mask)
        agree(found, dense(*module.seen[-1], PADDED & CAUSAL))
        found = seen(module, x, attn_mask=mask + bias)
        agree(found, dense(*module.seen[-1], PADDED & CAUSAL, bias=bias.double()))


def test_f25_a_bias_that_is_learned_takes_part_and_gets_its_gradient() -> None:
    torch.manual_seed(2)
    module, x = Plain(), torch.randn(B, T, C)
    bias = nn.Parameter(torch.randn(1, H, T, T))
    gradients = []
    for watched in (False, True):
        bias.grad = None
        monitor = Monitor.attach(module, every=1) if watched else None
        module(x, attn_mask=bias + low(CAUSAL, -math.inf)).square().sum().backward()
        gradients.append(bias.grad)
        if monitor is not None:
            found = monitor.step()[0].layers[""]
            monitor.detach()
    agree(found, dense(*module.seen[-1], CAUSAL, bias=bias.detach().double()))
    assert torch.equal(*gradients)


def test_f25_alibi_and_rows_that_see_nothing() -> None:
    torch.manual_seed(3)
    module, x = Plain(), torch.randn(B, T, C)
    alibi = -SLOPES * DISTANCE
    visible = (CAUSAL & PADDED).clone()
    visible[1, :, 7] = False
    for value in LOW.values():
        found = seen(module, x, attn_mask=(alibi + low(visible, value)))
        wanted = dense(*module.seen[-1], visible, bias=alibi.double())
        del wanted["q_rms"], wanted["q_rms_cv"]  # later tokens see token 7: it is no padding
        agree(found, wanted)
        assert found.rows == B * T - 12 - 1


def test_f25_a_nan_in_a_mask_is_not_hidden() -> None:
    module, x = Plain(), torch.randn(B, T, C)
    mask = torch.zeros(T, T)
    mask[3, 3] = math.nan
    assert math.isnan(seen(module, x, attn_mask=mask).top)


# FlexAttention ------------------------------------------------------------------------------------


class Flex(Plain):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q, self.k))
        self.seen.append((q.detach(), k.detach()))
        return flex_attention(q, k, k, **options)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return REAL[b, k]


def hides(visible: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: torch.where(visible(b, h, q, k), s, -torch.inf)


@pytest.mark.parametrize("rows", [None, 9])
def test_f26_what_a_score_mod_hides_is_hidden_as_by_a_mask(rows: int | None) -> None:
    """Rows, keys, padding, the first token: all that a record says is equal, in any split of the two."""
    torch.manual_seed(4)
    module, x = Flex(), 3 * torch.randn(B, T, C)
    by_mask = {"block_mask": create_block_mask(and_masks(causal, padded), B, None, T, T)}
    ways: list[dict[str, Any]] = [
        by_mask,
        {"score_mod": hides(and_masks(causal, padded))},
        {"score_mod": hides(causal), "block_mask": create_block_mask(padded, B, None, T, T)},
        {"score_mod": hides(padded), "block_mask": create_block_mask(causal, None, None, T, T)},
    ]
    found = []
    with torch.no_grad(), Monitor.attach(module, every=1, sample=rows) as monitor:
        for way in ways:
            module(x, **way)
            (record,) = monitor.step()
            assert [a.code for a in Alerts()(record)] == []
            found.append(record.layers[""])
    if rows is None:
        agree(found[0], dense(*module.seen[-1], CAUSAL & PADDED))
    assert math.isfinite(found[0].mean("entropy_ratio"))
    for other in found[1:]:
        assert other == found[0]


def test_f26_a_score_mod_that_hides_by_the_score() -> None:
    torch.manual_seed(5)
    module, x = Flex(), 3 * torch.randn(B, T, C)
    with torch.no_grad():
        found = seen(module, x, score_mod=lambda s, b, h, q, k: torch.where(s < -1, -torch.inf, s))
    q, k = (t.double() for t in module.seen[-1])
    s = q @ k.mT * D**-0.5
    visible = s >= -1
    p = s.masked_fill(~visible, -torch.inf).softmax(-1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    keys = visible.sum(-1)
    ratio = torch.where(keys > 1, entropy / keys.clamp(min=2).log(), 0.0).sum((0, 2))
    wanted = ratio / (keys > 1).sum((0, 2))
    torch.testing.assert_close(torch.tensor(found.entropy_ratio).double(), wanted, rtol=2e-5, atol=2e-5)


def test_f26_blocks_hide_as_well_as_the_function_of_a_block_mask() -> None:
    """`from_kv_blocks` without a function: what a kernel shows are the listed blocks."""
    torch.manual_seed(6)
    module, x = Flex(), torch.randn(B, 64, C)
    listed = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    counts, order = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(counts, order.int(), BLOCK_SIZE=32)
    with torch.no_grad(), Monitor.attach(module, every=1) as monitor:
        module(x, block_mask=mask)
        found = monitor.step()[0].layers[""]
    visible = listed.repeat_interleave(32, 0).repeat_interleave(32, 1)[None, None].expand(B, 1, -1, -1)
    agree(found, dense(*module.seen[-1], visible))


def test_f28_a_block_mask_is_evaluated_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the size of the whole mask is made, also where a score_mod stands beside it."""
    length = 1024
    q = torch.randn(1, 1, length, D)
    block_mask = create_block_mask(causal, None, None, length, length)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return out

    monkeypatch.setitem(online_softmax.SCORE_BUDGET, "cpu", 1 << 17)
    monkeypatch.setattr("qknorm.monitor.view.SURVEYED", 1 << 17)
    layer = Flex()
    with Monitor.attach(layer, every=1) as monitor, Largest():
        watched = monitor.layers[""]
        _flex(watched, q, q, q, block_mask=block_mask, score_mod=hides(causal))
    assert watched.trouble is None
    assert watched.buffers["train"][0, 0].isfinite()
    assert largest <= 1 << 18

"""What the monitor promises, computed densely in float64 from q and k as the model multiplies them.

Shapes: B batch, Hq / Hk heads, T tokens, D head width, N rows of all batches together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Family, Layout
from qknorm.monitor import LayerRecord

MEANS = ("entropy_nats", "entropy_ratio", "sink_mass", "first_mass")
RMS = ("q_rms", "q_rms_cv", "k_rms", "k_rms_cv")


@dataclass(frozen=True)
class Call:
    """One call of an attention function, before the monitor is there."""

    q: Tensor  # [B, Hq, T, D]
    k: Tensor  # [B, Hk, T, D]
    mask: Tensor | None
    scaling: float
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    module: nn.Module


@contextmanager
def captured(model: nn.Module) -> Iterator[dict[str, list[Call]]]:
    """Every call of an attention function by module path, whichever function it is."""
    from transformers.modeling_utils import AttentionInterface

    paths = {module: path for path, module in model.named_modules()}
    calls: dict[str, list[Call]] = {}
    original = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        function = original(self, name, default)

        def recording(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            **more: Any,
        ) -> Any:
            scaling = more.get("scaling")
            # Autocast rounds q and k on their way into the product, in eager as in fused attention.
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
            call = Call(
                query.detach().clone().to(dtype),
                key.detach().clone().to(dtype),
                mask,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                more.get("softcap"),
                more.get("position_bias"),
                more.get("s_aux"),
                module,
            )
            calls.setdefault(paths[module], []).append(call)
            return function(module, query, key, value, mask, **more)

        return recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionInterface, "get_interface", get_interface)
        yield calls


def capture(model: nn.Module, arguments: dict[str, Any]) -> dict[str, list[Call]]:
    with captured(model) as calls, torch.no_grad():
        model(**arguments)
    return calls


@dataclass(frozen=True)
class Truth:
    """The fields of `LayerRecord` of the same names, `[Hq]` or `[Hk]`, and how exact fp32 can be."""

    max_logit: Tensor
    entropy_nats: Tensor
    entropy_ratio: Tensor
    sink_mass: Tensor | None
    first_mass: Tensor
    q_rms: Tensor
    q_rms_cv: Tensor
    k_rms: Tensor
    k_rms_cv: Tensor
    rows: int
    logit_error: float  # of a logit computed in fp32


def truth(
    calls: list[Call], family: Family, layer: int, batches: list[Layout], rows: Tensor | None = None
) -> Truth:
    """Over the rows of all calls; `rows`: the only positions of queries that count."""
    tops, parts, q_rms, k_rms, errors = [], [], [], [], []
    for call, batch in zip(calls, batches, strict=True):
        visible = batch.visible(is_causal=family.is_causal, window=family.windows[layer])
        if call.mask is not None:  # what the model itself says must agree, on real queries
            seen = (
                call.mask
                if call.mask.dtype is torch.bool
                else call.mask > torch.finfo(call.mask.dtype).min / 2
            )
            seen = seen.expand(len(visible), -1, visible.shape[1], -1)[:, 0]
            assert torch.equal(seen[batch.real], visible[batch.real])
        if rows is not None:
            chosen = torch.zeros(visible.shape[1], dtype=torch.bool)
            chosen[rows] = True
            visible = visible & chosen[:, None]
        q, k = call.q.double(), call.k.double()
        k_BHTD = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ k_BHTD.transpose(2, 3)) * call.scaling
        error = (q.abs() @ k_BHTD.abs().transpose(2, 3)).amax() * call.scaling * q.shape[-1] ** 0.5
        errors.append(2 * torch.finfo(torch.float32).eps * float(error))
        if call.softcap is not None:
            scores = call.softcap * (scores / call.softcap).tanh()
        if call.bias is not None:
            scores = scores + call.bias.double()
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        counted = visible.any(-1)  # [B, T]
        keys = visible.sum(-1)[counted]  # [N]
        scores = scores.transpose(1, 2)[counted].detach()  # [N, Hq, T]
        tops.append(scores.amax((0, 2)))
        log_p = scores.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)  # [N, Hq]
        ratio = torch.full_like(entropy, math.nan)
        ratio[keys > 1] = (entropy / keys[:, None].double().log())[keys > 1]
        first = p.gather(-1, batch.first()[counted][:, None, None].expand(-1, p.shape[1], 1))[..., 0]
        sink = torch.zeros_like(first)
        if call.sinks is not None:
            total = scores.logsumexp(-1)
            sink = (call.sinks.detach().double() - total).sigmoid()
            first = first * (1 - sink)
        parts.append(torch.stack([entropy, ratio, sink, first]))
        for x, into in ((q, q_rms), (k, k_rms)):
            into.append(x.square().mean(-1).sqrt().transpose(1, 2)[batch.real])  # [N, H]
    values = torch.cat(parts, 1)  # [4, N, Hq]
    means = dict(zip(MEANS, values.nanmean(1), strict=True))
    if calls[0].sinks is None:
        del means["sink_mass"]
    spread: dict[str, Tensor] = {}
    for x, name in ((torch.cat(q_rms), "q_rms"), (torch.cat(k_rms), "k_rms")):
        spread[name] = x.mean(0)
        spread[name + "_cv"] = x.std(0, correction=0) / x.mean(0)
    return Truth(
        max_logit=torch.stack(tops).amax(0),
        sink_mass=means.pop("sink_mass", None),
        **means,
        **spread,
        rows=values.shape[1],
        logit_error=max(errors),
    )


def check(found: LayerRecord, wanted: Truth, *, coverage: str = "exact", fields_of: Any = None) -> None:
    """All fields, to what fp32 allows.

    A logit in fp32 errs by `logit_error`; a probability relatively by twice that, an entropy of the
    softmax by that times the spread of the logits. The r.m.s. are sums of D squares.
    """
    rtol = 2e-5
    for item in fields(Truth):
        name = item.name
        if name in ("rows", "logit_error") or (fields_of and name not in fields_of):
            continue
        actual, expected = getattr(found, name), getattr(wanted, name)
        if expected is None:
            assert actual is None, name
            continue
        assert actual is not None, name
        atol = 1e-6 if name in RMS else wanted.logit_error
        torch.testing.assert_close(
            torch.tensor(actual, dtype=torch.float64),
            expected,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert found.rows == wanted.rows
    assert found.coverage == coverage
    assert found.rms_of == "product"

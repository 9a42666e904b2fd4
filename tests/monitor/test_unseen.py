"""Attention that is not called by its module directly, or not by a function that can be seen: it is
watched, or named with the reason. And whatever else a model holds, attaching succeeds."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.monitor import Monitor
from test_taps import CAUSAL, B, C, D, H, Plain, T, agree, dense

FULL = torch.ones_like(CAUSAL)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def attend(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k)


def attend_in_two(q: Tensor, k: Tensor) -> Tensor:
    return attend(q, k)


def by_hand(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1) @ k


def flash_attn_func(q: Tensor, k: Tensor) -> Tensor:
    """Has the name of one that cannot be seen."""
    return q


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(C, H * D), nn.Linear(C, H * D)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return split(self.q(x)), split(self.k(x))


class InAFunction(Base):
    def forward(self, x: Tensor) -> Tensor:
        return attend_in_two(*self.heads(x))


class InAnAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(attend)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.heads(x))


class Processor:
    def __call__(self, module: Base, x: Tensor) -> Tensor:
        return attend(*module.heads(x))


class InAProcessor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


class InAMethod(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(*self.heads(x))

    def inner(self, q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k)


@pytest.mark.parametrize("kind", [InAFunction, InAnAttribute, InAProcessor, InAMethod])
def test_f31_a_call_behind_a_function_is_seen(kind: type[Base]) -> None:
    module, x = kind(), 3 * torch.randn(B, T, C)
    before = module(x)
    with Monitor.attach(module, every=1) as monitor:
        assert torch.equal(module(x), before)
        (record,) = monitor.step()
    q, k = (y.detach() for y in module.heads(x))
    agree(record.layers[""], dense(q, k, FULL))


class Pool(nn.Module):
    """The attention pooling of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x_BTC: Tensor, **options: Any) -> Tensor:
        x = x_BTC.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=C,
            num_heads=H,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            **options,
        )
        return out[0]


def test_f31_the_multi_head_function_called_directly() -> None:
    module, x = Pool(), 3 * torch.randn(B, T, C)
    padding = torch.zeros(B, T)
    padding[0, 20:] = -torch.inf
    with torch.no_grad(), Monitor.attach(module, every=1) as monitor:
        both = []
        for need_weights in (True, False):  # with them torch multiplies by itself, without it calls SDPA
            module(x, key_padding_mask=padding, need_weights=need_weights)
            both.append(monitor.step()[0].layers[""])
        q, k = split(module.q_proj(x))[:, :, :1].double(), split(module.k_proj(x)).double()
    s = q @ k.mT * D**-0.5 + padding[:, None, None]
    p = s.softmax(-1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
    for found in both:
        assert found.rows == B
        for value, wanted in ((found.max_logit, s.amax((0, 2, 3))), (found.entropy_nats, entropy)):
            torch.testing.assert_close(torch.tensor(value).double(), wanted, rtol=2e-5, atol=2e-5)


def test_f31_multi_head_attention_with_a_forward_of_its_own() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x, need_weights=False)[0]

    mine, plain = Mine(C, H, batch_first=True), nn.MultiheadAttention(C, H, batch_first=True)
    plain.load_state_dict(mine.state_dict())
    x = torch.randn(B, T, C)
    with Monitor.attach(nn.ModuleList([mine, plain]), every=1) as monitor:
        mine(x)
        plain(x, x, x)
        (record,) = monitor.step()
    assert record.layers["0"] == record.layers["1"]


class ByHand(Base):
    def forward(self, x: Tensor) -> Tensor:
        return by_hand(*self.heads(x))


class Kernel(Base):
    def forward(self, x: Tensor) -> Tensor:
        return flash_attn_func(*self.heads(x))


class Router(nn.Module):
    """Softmax, a product, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).softmax(-1)


def scripted() -> nn.Module:
    return torch.jit.script(Script())


class Script(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


EXPORTED: dict[str, Callable[[], nn.Module]] = {
    "TorchScript, scripted": scripted,
    "TorchScript, traced": lambda: torch.jit.trace(Script(), torch.randn(B, T, C)),
    "traced graph, exported": lambda: torch.export.export(Script(), (torch.randn(B, T, C),)).module(),
    "traced graph, unflattened": lambda: torch.export.unflatten(
        torch.export.export(Script(), (torch.randn(B, T, C),))
    ),
    "traced graph, symbolic": lambda: torch.fx.symbolic_trace(Script()),
}


def silent(model: nn.Module, x: Tensor) -> dict[str, str]:
    with Monitor.attach(model, every=1) as monitor:
        model(x)
        (record,) = monitor.step()
    assert record.layers == {}
    return record.silent


def test_f31_what_cannot_be_seen_is_named_with_the_reason() -> None:
    x = torch.randn(B, T, C)
    assert "by itself" in silent(nn.Sequential(ByHand()), x)["0"]
    assert "flash_attn_func" in silent(nn.Sequential(Kernel()), x)["0"]
    for name, make in EXPORTED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            assert name.split(",")[0] in silent(nn.Sequential(make()), x)["0"]
    with pytest.raises(ValueError, match="no attention"):
        Monitor.attach(nn.Sequential(Router(), nn.Softmax(-1)))
    around = nn.Sequential(Plain())
    around.register_module("router", Router())
    with Monitor.attach(around, every=1) as monitor:
        assert list(monitor.layers) == ["0"]


class Loud(nn.Module):
    """Raises another error than AttributeError for what it does not have, and for a property."""

    @property
    def attention(self) -> Any:
        raise RuntimeError("not yet")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise LookupError(name) from None

    def forward(self, x: Tensor) -> Tensor:
        return x


class ForwardIsAProperty(nn.Module):
    @property
    def forward(self) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        return torch.relu


class ForwardIsAnObject(nn.Module):
    forward = torch.nn.ReLU()  # type: ignore[assignment]


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.LazyLinear(H * D), nn.LazyLinear(H * D)


def test_f27_any_module_may_stand_beside_attention() -> None:
    pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        others = [make() for make in EXPORTED.values()]
        others += [
            torch.jit.script(nn.Linear(C, C)),
            torch.jit.trace(nn.Linear(C, C), torch.randn(2, C)),
        ]
        others += [torch.jit.freeze(torch.jit.script(nn.Linear(C, C).eval()))]
    others += [Loud(), ForwardIsAProperty(), ForwardIsAnObject(), nn.LazyLinear(C)]
    others += [nn.Linear(C, C, device="meta"), torch.export.export(nn.ReLU(), (torch.ones(2),)).module()]
    model = nn.ModuleList([Plain(), *others])
    x = torch.randn(B, T, C)
    expected = model[0](x)
    with Monitor.attach(model, every=1) as monitor:
        assert torch.equal(model[0](x), expected)
        (record,) = monitor.step()
    assert list(record.layers) == ["0"]
    assert list(record.silent) == [str(1 + i) for i in range(len(EXPORTED))]


def test_f27_parameters_that_come_later() -> None:
    x = torch.randn(B, T, C)
    lazy, meta = Lazy(), Plain().to("meta")
    with Monitor.attach(nn.ModuleList([lazy, meta]), every=1) as monitor:
        meta.to_empty(device="cpu")
        for parameter in meta.parameters():
            nn.init.normal_(parameter)
        for module in (lazy, meta):
            module(x, is_causal=True)
        (record,) = monitor.step()
    for name, module in (("0", lazy), ("1", meta)):
        agree(record.layers[name], dense(*module.seen[-1], CAUSAL))


# Diffusers ----------------------------------------------------------------------------------------


def flux() -> tuple[nn.Module, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 2.0]),
        "img_ids": torch.rand(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, inputs


def unet() -> tuple[nn.Module, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers")
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 2]),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "encoder_attention_mask": mask,
    }
    return model, inputs


@pytest.mark.parametrize(("make", "count"), [(flux, 2), (unet, 8)])
def test_f31_the_processors_of_diffusers_are_seen(
    make: Callable[[], Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make()
    called: list[tuple[Tensor, Tensor, Tensor | float]] = []
    original = F.scaled_dot_product_attention

    def record_call(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        mask = more.get("attn_mask")
        called.append((query.double(), key.double(), 0.0 if mask is None else mask.double()))
        return original(query, key, value, **more)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", record_call)
        before = model(**inputs).sample
    with torch.no_grad(), Monitor.attach(model, every=1) as monitor:
        assert torch.equal(model(**inputs).sample, before)
        (record,) = monitor.step()
    assert record.silent == {}
    assert len(record.layers) == len(called) == count
    found = sorted(layer.max_logit for layer in record.layers.values())
    tops = [(q @ k.mT * q.shape[-1] ** -0.5 + mask).amax((0, 2, 3)).tolist() for q, k, mask in called]
    for values, wanted in zip(found, sorted(tops), strict=True):
        assert values == pytest.approx(wanted, rel=1e-5)


def test_f31_a_processor_that_multiplies_by_itself_leaves_its_layer_named() -> None:
    attention = pytest.importorskip("diffusers.models.attention_processor", reason="needs diffusers")
    module = attention.Attention(query_dim=C, heads=H, dim_head=D, processor=attention.AttnProcessor())
    assert list(silent(nn.Sequential(module), torch.randn(B, T, C))) == ["0"]

"""Every field of a record, for real architectures: against a dense computation in float64.

Shapes: B batch, T tokens, Hq / Hk heads, D head width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import capture, check, truth
from models import FAMILIES, PAIRS, WIDTH, B, D, Layout, T, arguments, layout
from qknorm.monitor import Monitor, Record

CASES = [(name, how, kind) for name, how in PAIRS for kind in FAMILIES[name].layouts]
# Attention that is written out by hand, here in a tokenizer of images: not measured, but named.
BESIDE = {"chameleon": {"vqmodel.encoder.mid.attn_1"}}
NORMED = [(name, how) for name, how in PAIRS if FAMILIES[name].norms]


def observe(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Record:
    with Monitor.attach(model, every=1, **options) as monitor, torch.no_grad():
        model(**inputs)
        (record,) = monitor.step()
    return record


@pytest.mark.parametrize(("name", "how", "kind"), CASES)
def test_every_field_equals_the_dense_definition(name: str, how: str, kind: str) -> None:
    family, batch = FAMILIES[name], layout(kind)
    model, inputs = family.make(how).eval(), arguments(name, batch)
    calls = capture(model, inputs)
    assert list(calls) == family.layers
    record = observe(model, inputs)
    assert list(record.layers) == family.layers
    assert record.silent.keys() == BESIDE.get(name, set())
    assert record.phase == "eval"
    for i, path in enumerate(family.layers):
        wanted = truth(calls[path], family, i, [batch])
        assert 1 < float(wanted.max_logit.amax()) < 60  # else the case tests little
        check(record.layers[path], wanted)
        if calls[path][0].softcap is not None:
            (call,) = calls[path]
            assert float((call.q[0, 0] @ call.k[0, 0].T).amax()) * call.scaling > call.softcap
    assert record.max_logit == max(max(layer.max_logit) for layer in record.layers.values())


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_sampled_rows_are_the_evenly_spaced_ones(name: str, how: str) -> None:
    family, batch = FAMILIES[name], layout("plain")
    model, inputs = family.make(how).eval(), arguments(name, batch)
    calls = capture(model, inputs)
    rows = torch.linspace(0, T - 1, 7, dtype=torch.float64).round().long()
    sampled, exact = observe(model, inputs, sample=7), observe(model, inputs, sample=T)
    for i, path in enumerate(family.layers):
        wanted = truth(calls[path], family, i, [batch], rows)
        assert wanted.rows == 7 * B
        fields = ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass", "first_mass")
        check(sampled.layers[path], wanted, coverage="sampled", fields_of=fields)
        check(exact.layers[path], truth(calls[path], family, i, [batch]))
        pairs = zip(sampled.layers[path].max_logit, exact.layers[path].max_logit, strict=True)
        assert all(a <= b for a, b in pairs)


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize(("name", "how"), [("llama", "eager"), ("llama", "sdpa"), ("bert", "sdpa")])
def test_sampled_rows_that_are_padding_do_not_count(name: str, how: str, kind: str) -> None:
    family, batch = FAMILIES[name], layout(kind)
    model, inputs = family.make(how).eval(), arguments(name, batch)
    calls = capture(model, inputs)
    rows = torch.linspace(0, T - 1, 7, dtype=torch.float64).round().long()
    record = observe(model, inputs, sample=7)
    fields = ("max_logit", "entropy_nats", "entropy_ratio", "first_mass")
    for i, path in enumerate(family.layers):
        wanted = truth(calls[path], family, i, [batch], rows)
        check(record.layers[path], wanted, coverage="sampled", fields_of=fields)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_lengths_of_a_batch_count_by_their_tokens(name: str) -> None:
    """Two sequences of unequal lengths make one record, weighted by rows and not by sequence."""
    family, batch = FAMILIES[name], layout("right")
    model, inputs = family.make("sdpa").eval(), arguments(name, batch)
    together = observe(model, inputs)
    alone = []
    for b in range(B):
        length = int(batch.real[b].sum())
        alone.append(observe(model, {"input_ids": inputs["input_ids"][b : b + 1, :length]}))
    for path in family.layers:
        parts = [record.layers[path] for record in alone]
        assert together.layers[path].rows == sum(part.rows for part in parts)
        for field in ("entropy_nats", "first_mass", "q_rms", "k_rms"):
            heads = zip(
                getattr(together.layers[path], field), *(getattr(x, field) for x in parts), strict=True
            )
            for found, *each in heads:
                mean = sum(x * part.rows for x, part in zip(each, parts, strict=True))
                assert found == pytest.approx(mean / together.layers[path].rows, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "how"), NORMED)
def test_gains_and_bound(name: str, how: str) -> None:
    family, batch = FAMILIES[name], layout("plain")
    model, inputs = family.make(how).eval(), arguments(name, batch)
    calls = capture(model, inputs)
    record = observe(model, inputs)
    assert family.norms is not None
    for path in family.layers:
        layer = record.layers[path]
        q_gain, k_gain, q_width, k_width = family.norms(model.get_submodule(path))
        gain_max = q_gain.abs().amax().item(), k_gain.abs().amax().item()
        if name == "chameleon":  # its norms add a bias, of which the gains say nothing
            assert layer.gain_max is None or layer.gain_max == pytest.approx(gain_max, rel=1e-6)
            assert layer.bound is None or max(layer.max_logit) <= layer.bound
            continue
        assert layer.gain_max == pytest.approx(gain_max, rel=1e-6)
        assert layer.bound is not None
        assert max(layer.max_logit) <= layer.bound
        # No honest bound is above Cauchy and Schwarz with the largest gains.
        loosest = calls[path][0].scaling * (q_width * k_width) ** 0.5 * gain_max[0] * gain_max[1]
        assert layer.bound <= loosest * (1 + 1e-6)


@pytest.mark.parametrize(("name", "how"), NORMED)
def test_no_input_of_the_norms_exceeds_the_bound(name: str, how: str) -> None:
    """All of q and k in entry 1, which has the largest gains; without a norm per head, in one head."""
    family, batch = FAMILIES[name], layout("plain")
    model, inputs = family.make(how).eval(), arguments(name, batch)
    assert family.norms is not None
    for path in family.layers:
        module = model.get_submodule(path)
        stride = D if family.norms(module)[2] == D else WIDTH
        for projection, sign in ((module.q_proj, -1), (module.k_proj, 1)):

            def concentrate(
                _: nn.Module, args: Any, out: Tensor, stride: int = stride, sign: int = sign
            ) -> Tensor:
                out = torch.zeros_like(out)
                out[..., 1::stride] = sign * 1e6
                return out

            projection.register_forward_hook(concentrate)
    record = observe(model, inputs)
    for path in family.layers:
        layer = record.layers[path]
        if layer.bound is not None:
            # At one position the rotation falls out. A norm that takes the mean away loses 1 / D.
            assert max(layer.max_logit) > 0.5 * layer.bound
            assert max(layer.max_logit) <= layer.bound * (1 + 1e-6)


def test_models_without_norm_have_no_bound() -> None:
    for name in ("llama", "gpt_oss", "bert"):
        record = observe(FAMILIES[name].make("eager"), arguments(name, layout("plain")))
        for layer in record.layers.values():
            assert layer.bound is None
            assert layer.gain_max is None


def test_a_layer_that_cannot_be_seen_is_named() -> None:
    """This variant of GPT-2 multiplies by itself, without an attention function."""
    family = FAMILIES["gpt2"]
    model = family.make("eager", reorder_and_upcast_attn=True)
    record = observe(model, arguments("gpt2", layout("plain")))
    assert record.layers == {}
    assert sorted(record.silent) == family.layers
    seen = observe(family.make("sdpa", reorder_and_upcast_attn=True), arguments("gpt2", layout("plain")))
    assert sorted(seen.layers) == family.layers
    assert seen.silent == {}


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_a_mask_of_the_caller(how: str) -> None:
    """Any pattern, here with rows that see nothing, which take part in nothing."""
    family, batch = FAMILIES["llama"], layout("plain")
    generator = torch.Generator().manual_seed(2)
    seen = torch.rand(B, T, T, generator=generator) < 0.4
    seen = (seen | torch.eye(T, dtype=torch.bool)).tril()
    seen[0, 5] = False
    mask = seen[:, None]
    if how == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    batch = Layout(batch.real, batch.document, {"attention_mask": mask}, seen)
    model, inputs = family.make(how).eval(), arguments("llama", batch)
    calls = capture(model, inputs)
    record = observe(model, inputs)
    for i, path in enumerate(family.layers):
        wanted = truth(calls[path], family, i, [batch])
        assert wanted.rows == B * T - 1
        # Of such a mask nobody can say which tokens are a sequence's first, or padding.
        check(record.layers[path], wanted, fields_of=("max_logit", "entropy_nats", "entropy_ratio"))

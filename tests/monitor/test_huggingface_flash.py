"""What the flash functions of transformers tell their kernel is what is measured.

The path is that of transformers, down to the calls of the kernel. Only the kernel, which needs a GPU, is
replaced: by one that writes down what it is told and computes what flash-attn's documentation says.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import FAMILIES, VOCABULARY, arguments, layout
from qknorm.monitor import LayerRecord, Monitor

transformers = pytest.importorskip("transformers", reason="needs the extra qknorm[transformers]")
from transformers import DynamicCache, modeling_flash_attention_utils  # noqa: E402
from transformers.integrations.flash_attention import flash_attention_forward  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

T = 12


class Kernel:
    """flash-attn on one sequence after another: logits of every row, `[H, n]` for n visible keys."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    # transformers asks the signatures what a kernel supports.
    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        told = (softmax_scale, causal, window_size, softcap)
        return torch.stack([self.sequence(*x, *told) for x in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        told = (softmax_scale, causal, window_size, softcap)
        out = torch.zeros_like(q)
        ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
        before = next(ends)
        for here in ends:
            (a, c), (b, d) = before, here
            out[a:b] = self.sequence(q[a:b], k[c:d], v[c:d], *told)
            before = here
        return out

    def sequence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:
        """q `[Tq, H, D]`, k and v `[Tk, Hk, D]`; causal and windows are aligned at the last token."""
        q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        s = q @ k.mT * softmax_scale
        s = softcap * (s / softcap).tanh() if softcap else s
        row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        column = torch.arange(k.shape[1])
        left, right = window_size
        right = 0 if causal else right
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if left >= 0:
            visible &= column >= row - left
        if right >= 0:
            visible &= column <= row + right
        self.rows += [s[:, i, visible[i]].detach() for i in range(len(visible)) if visible[i].any()]
        p = s.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num()
        return (p @ v).transpose(0, 1).float()

    def check(self, found: LayerRecord) -> None:
        """Against what was written down."""
        log_p = [row.log_softmax(-1) for row in self.rows]
        entropy = torch.stack([-(x.exp() * x).sum(-1) for x in log_p])
        keys = torch.tensor([row.shape[-1] for row in self.rows])
        ratio = (entropy / keys.clamp(min=2).log()[:, None])[keys > 1].mean(0)
        top = torch.stack([row.amax(-1) for row in self.rows]).amax(0)
        assert found.rows == len(self.rows)
        for name, value in (
            ("max_logit", top),
            ("entropy_nats", entropy.mean(0)),
            ("entropy_ratio", ratio),
        ):
            actual = torch.tensor(getattr(found, name)).double()
            torch.testing.assert_close(actual, value, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    theirs = modeling_flash_attention_utils
    functions = (made.flash_attn_func, made.flash_attn_varlen_func, None, theirs._pad_input)
    monkeypatch.setattr(theirs, "_lazy_imports", lambda *_, **__: (*functions, theirs._unpad_input))
    monkeypatch.setattr(theirs, "_loaded_implementation", None)
    return made


def model(name: str, implementation: str) -> nn.Module:
    made = FAMILIES[name].make("eager", num_hidden_layers=1, attention_dropout=0.0).eval()
    made.config._attn_implementation = implementation
    return made


def tokens(rows: int, length: int = T) -> Tensor:
    return torch.randint(6, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def observed(made: nn.Module, **inputs: Any) -> LayerRecord:
    with torch.no_grad(), Monitor.attach(made, every=1) as monitor:
        made(**inputs)
        (record,) = monitor.step()
    assert record.silent == {}
    (layer,) = record.layers.values()
    return layer


def mask(*rows: str) -> Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


def ids(*rows: str) -> Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


CASES: dict[str, dict[str, Any]] = {
    "rows": {"batch": 2},
    "two rows that start anew": {"position_ids": ids("012340123456", "010123456789")},
    "one row that starts anew": {"position_ids": ids("012301234012")},
    "one row with a jump": {"position_ids": ids("012345666789")},
    "one row that starts late": {"position_ids": ids("345012340123")},
    "padding on the right": {"attention_mask": mask("111111110000", "111111111111")},
    "padding on the left": {"attention_mask": mask("000001111111", "111111111111")},
    "padding with holes": {"attention_mask": mask("111001101110", "011110001111")},
    "lengths": {
        "position_ids": ids("012345678999"),
        "cu_seq_lens_q": torch.tensor([0, 4, 5, 12], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 4, 5, 12], dtype=torch.int32),
        "max_length_q": 7,
        "max_length_k": 7,
    },
    "lengths over the ends of rows": {
        "batch": 2,
        "cu_seq_lens_q": torch.tensor([0, 4, 15, 24], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 4, 15, 24], dtype=torch.int32),
        "max_length_q": 11,
        "max_length_k": 11,
    },
    "lengths that are not complete": {
        "batch": 1,
        "cu_seq_lens_q": torch.tensor([0, 4, 5, 12], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 4, 5, 12], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_f24_what_the_kernel_is_told_is_measured(case: str, kernel: Kernel) -> None:
    """With and without a window of 5."""
    inputs = dict(CASES[case])
    batch = inputs.pop("batch", None)
    if batch is None:
        batch = next(len(x) for x in inputs.values() if isinstance(x, Tensor) and x.dim() == 2)
    for name in ("llama", "mistral"):
        kernel.rows.clear()
        found = observed(model(name, "flash_attention_2"), input_ids=tokens(batch), **inputs)
        kernel.check(found)


def test_f24_every_name_of_a_flash_function(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the hub run behind the same function, under any name."""
    masks, functions = ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS
    for registry, value in (
        (masks._global_mapping, masks["flash_attention_2"]),
        (functions._global_mapping, flash_attention_forward),
    ):
        monkeypatch.setitem(registry, "someone/fast-kernel", value)
    monkeypatch.setitem(masks._global_mapping, "paged|flash_attention_2", masks["flash_attention_2"])
    names = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
    for name in (*names, "paged|flash_attention_2", "someone/fast-kernel"):
        kernel.rows.clear()
        found = observed(
            model("llama", name),
            input_ids=tokens(2),
            position_ids=CASES["two rows that start anew"]["position_ids"],
        )
        kernel.check(found)


@pytest.mark.parametrize("new", [1, 3])
def test_f24_queries_that_follow_a_cache(new: int, kernel: Kernel) -> None:
    for name in ("llama", "mistral"):
        made, cache = model(name, "flash_attention_2"), DynamicCache()
        seen = mask("000111111111", "111111111111")
        x = tokens(2)
        with torch.no_grad():
            made(x[:, :-new], attention_mask=seen[:, :-new], past_key_values=cache, use_cache=True)
        kernel.rows.clear()
        found = observed(
            made, input_ids=x[:, -new:], attention_mask=seen, past_key_values=cache, use_cache=True
        )
        kernel.check(found)


def test_f24_a_paged_cache_is_named() -> None:
    made = model("llama", "eager").train()
    (path,) = (name for name, _ in made.named_modules() if name.endswith("self_attn"))
    q = torch.randn(1, 6, 4, 8)
    with Monitor.attach(made, every=1) as monitor:
        ALL_ATTENTION_FUNCTIONS.get_interface("eager", lambda *_, **__: None)(
            made.get_submodule(path), q, q, q, None, block_table=torch.zeros(1, 1)
        )
        assert "paged cache" in monitor.step()[0].silent[path]


def test_f24_masks_are_read_as_the_function_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention adds a bool mask; FlexAttention without a mask sees all; SDPA aligns at the first
    token; a function of the user reads the mask of its name."""
    from transformers.integrations.flex_attention import flex_attention_forward

    made = model("llama", "eager")
    (path,) = (name for name, _ in made.named_modules() if name.endswith("self_attn"))
    module = made.get_submodule(path)
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, n, t, 8, generator=generator) for n, t in ((6, 5), (2, 9)))
    lower = torch.ones(5, 9, dtype=torch.bool).tril()
    given = torch.rand(2, 1, 5, 9, generator=generator) < 0.6
    own = lambda *_, **__: None  # noqa: E731
    assert module.is_causal
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", own)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", own_flex)
    own_flex.__module__ = flex_attention_forward.__module__
    s = q.double() @ k.double().repeat_interleave(3, 1).mT * 8**-0.5
    bias = 3 * torch.randn(2, 2, 5, 9, generator=generator)
    cases = (
        ("eager", given, s + given),
        ("eager", None, s),
        ("flex_attention", None, s),
        ("flex_attention", bias, s + bias[:, :1]),
        ("sdpa", None, s.masked_fill(~lower, -math.inf)),
        ("sdpa", given, s.masked_fill(~given, -math.inf)),
        ("mine", bias, s + bias.repeat_interleave(3, 1)),
    )
    for name, attention_mask, scores in cases:
        passed = attention_mask
        if name == "mine":
            passed = attention_mask.repeat_interleave(3, 1)
        with Monitor.attach(made, every=1) as monitor:
            function = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)
            function(module, q, k, k, passed, scaling=8**-0.5, dropout=0.0)
            (record,) = monitor.step()
        top = torch.tensor(record.layers[path].max_logit).double()
        torch.testing.assert_close(top, scores.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)


def own_flex(*_: Any, **__: Any) -> None:
    """Stands in the place of transformers' own, which torch would compile."""


def test_f28_flex_attention_shows_what_sdpa_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block masks; nothing is compiled, which takes long and changes no mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, training: bool = False, **options: Any) -> Tensor:
        return flex_attention(q, k, v, **options)

    def create(*args: Any, _compile: bool = False, **options: Any) -> Any:
        return create_block_mask(*args, **options)

    place = "transformers.integrations.flex_attention.compile_friendly_flex_attention"
    monkeypatch.setattr(place, attend)
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", create)
    for kind in ("right", "packed"):
        inputs = arguments("mistral", layout(kind))
        found, wanted = (
            asdict(observed(model("mistral", name), **inputs)) for name in ("flex_attention", "sdpa")
        )
        for name, value in wanted.items():
            if isinstance(value, list):
                assert found[name] == pytest.approx(value, rel=1e-5), name
            else:
                assert found[name] == value

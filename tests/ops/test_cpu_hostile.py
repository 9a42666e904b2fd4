"""The C++ backend on inputs that nobody should bring: empty, immense, overlapping, NaN, denormal."""

from __future__ import annotations

import functools
import mmap
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import qknorm
from qknorm import Mask, Rope
from qknorm.ops.backends import cpu_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
_LIBRARY = cpu_library.LIBRARY
pytestmark = pytest.mark.skipif(isinstance(_LIBRARY, str), reason=f"no cpu backend: {_LIBRARY}")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
Results = dict[str, Tensor]


def results(backend: str, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, **options: Any) -> Results:
    """out, every statistic and every gradient."""
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {name: options[name] for name in ("q_gain", "k_gain", "sink") if name in options}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    inputs = {**options, **leaves, "stats": "rows", "backend": backend}
    out, stats = qknorm.attention(inputs.pop("q"), inputs.pop("k"), inputs.pop("v"), **inputs)
    grads = torch.autograd.grad(out, list(leaves.values()), d_out)
    found = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    for name in ("max_logit", "log_sum", "entropy_nats"):
        found[f"rows.{name}"] = getattr(stats.rows, name)
    for name in ("max_logit", "entropy_sum", "ratio_sum", "sink_sum", "row_count"):
        found[name] = getattr(stats, name)
    return {"out": out.detach(), **found}


def assert_same_bits(actual: Results, wanted: Results) -> None:
    assert actual.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(actual[name], x), name


def assert_close_to_reference(
    *tensors: Tensor, rtol: float = 1e-4, atol: float = 1e-5, **options: Any
) -> None:
    wanted, actual = (results(backend, *tensors, **options) for backend in ("reference", "cpu"))
    for name, x in wanted.items():
        torch.testing.assert_close(
            actual[name].double(),
            x.double(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def randn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


# ---- sizes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        *[
            (0, 4, 2, 5, 9, 16, 16),
            (0, 4, 2, 0, 0, 16, 16),
            (2, 0, 2, 5, 9, 16, 16),
            (2, 4, 2, 0, 9, 16, 16),
        ],
        *[
            (2, 4, 2, 5, 0, 16, 16),
            (2, 4, 2, 0, 0, 16, 16),
            (2, 4, 2, 5, 9, 0, 16),
            (2, 4, 2, 5, 70, 0, 16),
        ],
        *[
            (2, 4, 2, 5, 9, 16, 0),
            (2, 4, 2, 5, 70, 16, 0),
            (2, 4, 2, 5, 9, 0, 0),
            (1, 16, 16, 0, 0, 0, 0),
        ],
    ],
    ids=str,
)
def test_any_axis_may_be_empty(shape: tuple[int, ...], masked: bool, isa: str) -> None:
    B, Hq, Hk, Tq, Tk, D, Dv = shape
    tensors = randn(torch.float32, (B, Hq, Tq, D), (B, Hk, Tk, D), (B, Hk, Tk, Dv), (B, Hq, Tq, Dv))
    options: dict[str, Any] = {"scale": 0.5, "mask": Mask(causal=True)}
    if masked:
        documents = torch.arange(Tk)[None].expand(B, Tk) // 4 if Tq <= Tk else None
        options["mask"] = Mask(documents=documents, key_padding=torch.rand(B, Tk) < 0.7)
        options |= {"q_gain": torch.rand(Hq, D), "k_gain": torch.rand(Hk, D), "sink": torch.randn(Hq)}
    if Hq:
        assert_close_to_reference(*tensors, **options)
    else:
        out, stats = qknorm.attention(*tensors[:3], **options, stats=True, backend="cpu")
        assert out.shape == tensors[3].shape
        assert stats.max_logit.shape == (0,)


# ---- strides


def _immense(shape: torch.Size, axis: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose last element along `axis` lies 2**31 elements or more behind the first; the pages
    between are never touched."""
    step = -(-(2**31) // (shape[axis] - 1)) + 2
    stride = [0, 0, 0, 1]
    inner = shape[3]
    for i in (2, 1, 0):
        if i != axis:
            stride[i], inner = inner, inner * shape[i]
    assert inner <= step
    stride[axis] = step
    elements = inner + (shape[axis] - 1) * step
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


@each_dtype
@pytest.mark.parametrize("tokens", [(33, 33), (4, 70)], ids=["long", "decode"])
@pytest.mark.parametrize("axis", [0, 1, 2], ids="BHT")
def test_offsets_beyond_32_bits(
    axis: int, tokens: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    Tq, Tk = tokens
    tensors = randn(dtype, (2, 4, Tq, 32), (2, 2, Tk, 32), (2, 2, Tk, 32), (2, 4, Tq, 32))
    views = [_immense(x.shape, axis, dtype) for x in tensors]
    for view, x in zip(views, tensors, strict=True):
        view.copy_(x)
    assert_same_bits(results("cpu", *views), results("cpu", *tensors))


@each_dtype
@pytest.mark.parametrize("tokens", [(70, 70), (4, 200)], ids=["long", "decode"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3)], ids=str)
def test_expanded_inputs(
    axes: tuple[int, ...], tokens: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    Tq, Tk = tokens
    shapes = (2, 4, Tq, 32), (2, 2, Tk, 32), (2, 2, Tk, 16), (2, 4, Tq, 16)
    small = randn(dtype, *([1 if i in axes else n for i, n in enumerate(shape)] for shape in shapes))
    views = [x.expand(shape) for x, shape in zip(small, shapes, strict=True)]
    assert all(x.stride(i) == 0 for x in views for i in axes)
    assert_same_bits(results("cpu", *views), results("cpu", *(x.contiguous() for x in views)))


@each_dtype
@pytest.mark.parametrize("tokens", [(70, 70), (4, 200)], ids=["long", "decode"])
@pytest.mark.parametrize("how", ["every_other", "width_first", "batch_last"])
def test_last_axis_not_contiguous(
    how: str, tokens: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    Tq, Tk = tokens
    tensors = randn(dtype, (2, 4, Tq, 32), (2, 2, Tk, 32), (2, 2, Tk, 16), (2, 4, Tq, 16))
    if how == "every_other":
        views = [
            torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2] for x in tensors
        ]
    else:
        order = (0, 1, 3, 2) if how == "width_first" else (3, 1, 2, 0)
        views = [x.permute(order).contiguous().permute(order) for x in tensors]
    assert all(x.stride(-1) != 1 for x in views)
    assert_same_bits(results("cpu", *views), results("cpu", *tensors))


# ---- masks


@pytest.mark.parametrize("tokens", [(60, 60), (5, 60)], ids=["long", "decode"])
def test_any_document_ids(tokens: tuple[int, int], isa: str) -> None:
    Tq, Tk = tokens
    tensors = randn(torch.float32, (2, 4, Tq, 16), (2, 2, Tk, 16), (2, 2, Tk, 16), (2, 4, Tq, 16))
    # Equal in their low 32 bits; extremes; negative ones, which are all padding and see nothing.
    ids = torch.tensor([1, 2**32 + 1, 2**40 + 1, 2**63 - 1, 2**31, -1, -(2**32) + 1, -(2**63)])
    documents = ids[torch.randint(len(ids), (2, Tk))]
    for causal in (True, False):
        assert_close_to_reference(*tensors, mask=Mask(causal=causal, documents=documents))


@pytest.mark.parametrize(
    "dtype",
    [
        *[torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8],
    ],
    ids=str,
)
def test_every_type_of_document_ids(dtype: torch.dtype) -> None:
    tensors = randn(torch.float32, *[(1, 2, 40, 16)] * 4)
    documents = (torch.arange(40)[None] // 10).to(dtype)
    assert_close_to_reference(*tensors, mask=Mask(causal=True, documents=documents))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [(60, 60), (5, 60), (60, 5)], ids=["long", "decode", "few_keys"])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32 + 1, 2**62])
def test_wide_window(window: int, tokens: tuple[int, int], causal: bool, isa: str) -> None:
    Tq, Tk = tokens
    tensors = randn(torch.float32, (1, 2, Tq, 16), (1, 2, Tk, 16), (1, 2, Tk, 16), (1, 2, Tq, 16))
    wide, none = (results("cpu", *tensors, mask=Mask(causal=causal, window=w)) for w in (window, None))
    assert_same_bits(wide, none)


@pytest.mark.parametrize("window", [sys.maxsize, sys.maxsize - 20])
def test_window_as_wide_as_an_integer(window: int) -> None:
    tensors = randn(torch.float32, *[(1, 2, 60, 16)] * 4)
    wide, none = (results("cpu", *tensors, mask=Mask(causal=True, window=w)) for w in (window, None))
    assert_same_bits(wide, none)


# ---- NaN and infinity

B, Hq, Hk, D, R = 2, 4, 2, 16, 8
SHAPES = {"long": (40, 70), "decode": (5, 70), "blocks": (140, 140)}
# Shape, normed, with documents.
CONFIGS = [
    *[("long", True, False), ("long", False, True), ("decode", False, False), ("decode", True, True)],
    ("blocks", True, True),
]
PLACES = {
    "q": (1, 2, 3, 5),
    "k": (1, 1, 34, 5),
    "v": (1, 1, 34, 5),
    "d_out": (1, 2, 3, 5),
    "q_gain": (2, 5),
    "k_gain": (1, 5),
    "cos": (34, 1),
    "sin": (34, 1),
    "sink": (2,),
}


def _poisoned(
    backend: str,
    shape: str,
    normed: bool,
    masked: bool,
    place: str | None,
    value: float,
    dtype: torch.dtype,
) -> Results:
    """The results with `value` at `place`, or clean."""
    Tq, Tk = SHAPES[shape]
    g = torch.Generator().manual_seed(1)

    def rand(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    x = {
        "q": rand(B, Hq, Tq, D),
        "k": rand(B, Hk, Tk, D),
        "v": rand(B, Hk, Tk, D),
        "d_out": rand(B, Hq, Tq, D),
    }
    x = {name: t.to(dtype) for name, t in x.items()}
    angle = rand(Tk, R // 2)
    x |= {"q_gain": rand(Hq, D), "k_gain": rand(Hk, D), "cos": angle.cos(), "sin": angle.sin()}
    x["sink"] = rand(Hq)
    if place is not None:
        x[place][PLACES[place]] = value
    if not normed:
        del x["q_gain"], x["k_gain"]
    documents = (torch.arange(Tk)[None] + 3 * torch.arange(B)[:, None]) // 20 if masked else None
    rope = Rope(x.pop("cos"), x.pop("sin"), "interleaved")
    return results(backend, **x, rope=rope, mask=Mask(causal=True, documents=documents))


OF_A_ROW = ("out", "d_q", "rows.max_logit", "rows.log_sum", "max_logit")
_reference = functools.lru_cache(maxsize=1024)(functools.partial(_poisoned, "reference"))


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return ~((a == b) | (a.isnan() & b.isnan()))


@each_dtype
@pytest.mark.parametrize("place", PLACES)
def test_nan_and_infinity_stay_where_they_belong(place: str, dtype: torch.dtype, isa: str) -> None:
    """Nothing is touched that the definition leaves alone: there the bits are those of the clean call.
    What the poisoned number really acts on is not finite wherever the definition is not."""
    for config in CONFIGS:
        if place in ("q_gain", "k_gain") and not config[1]:
            continue
        clean = _poisoned("cpu", *config, None, 0.0, dtype)
        base = _reference(*config, None, 0.0, dtype)
        # A finite change shows what depends on the number: 0 * NaN in a dense product does not.
        moved = _reference(*config, place, 1.75, dtype)
        for value in (torch.nan, torch.inf, -torch.inf):
            wanted = _reference(*config, place, value, dtype)
            found = _poisoned("cpu", *config, place, value, dtype)
            # A row whose every visible logit is -inf is 0 / 0; the definition happens to say 0.
            top = (wanted["rows.max_logit"], base["rows.max_logit"])
            nothing_but_minus_inf = bool(((top[0] == -torch.inf) & (top[1] != -torch.inf)).any())
            for name, x in found.items():
                at = f"{name}, {value} in {place}, {config}"
                moves = _differs(moved[name], base[name])
                touched = _differs(wanted[name], base[name]) | moves
                if x.dim() == 4:  # by row: in half precision a single entry may round back
                    touched = touched.any((-1, -2) if place == "sink" else -1, keepdim=True)
                stray = _differs(x, clean[name]) & ~touched
                assert not stray.any(), f"{at}: {int(stray.sum())} entries touched that should not be"
                lost = ~wanted[name].isfinite() & moves & x.isfinite() & base[name].isfinite()
                # The textbook entropy is NaN where a logit is -inf, yet p ln(p) goes to 0 there. And
                # a dense product spreads NaN from a row to the keys hidden from it, which others see.
                if value is torch.nan or name in OF_A_ROW:
                    assert not lost.any(), f"{at}: {int(lost.sum())} entries finite"
                if not nothing_but_minus_inf:
                    spoiled = wanted[name].isfinite() & ~x.isfinite()
                    assert not spoiled.any(), f"{at}: {int(spoiled.sum())} entries not finite"


@each_dtype
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, -1e30])
def test_other_heads_and_entries_keep_their_bits(
    value: float, decode: bool, dtype: torch.dtype, isa: str
) -> None:
    """One batch entry and key head full of it: the others' rows, gradients and statistics are clean."""
    Tq, Tk = (5, 200) if decode else (150, 150)
    shapes = (2, 4, Tq, 32), (2, 2, Tk, 32), (2, 2, Tk, 32), (2, 4, Tq, 32)
    tensors = randn(dtype, *shapes)
    clean = results("cpu", *tensors)
    for x in tensors:
        x[1, x.shape[1] // 2 :] = torch.tensor(value).to(dtype)  # in fp16 1e30 is infinite
    found = results("cpu", *tensors)
    for name, x in found.items():
        if x.dim() >= 3:
            half = x.shape[1] // 2
            assert torch.equal(x[0], clean[name][0]), name
            assert torch.equal(x[1, :half], clean[name][1, :half]), name
        elif x.dim() == 1:
            assert torch.equal(x[: len(x) // 2], clean[name][: len(x) // 2]), name


# ---- range


@pytest.mark.parametrize("decode", [False, True])
def test_hidden_keys_of_immense_size_change_no_bit(decode: bool, isa: str) -> None:
    Tq, Tk = (5, 200) if decode else (150, 150)
    tensors = randn(torch.float32, (1, 2, Tq, 32), (1, 2, Tk, 32), (1, 2, Tk, 32), (1, 2, Tq, 32))
    real = torch.ones(1, Tk, dtype=torch.bool)
    real[0, [0, 70, Tk - 1]] = False
    clean = results("cpu", *tensors, mask=Mask(key_padding=real))
    tensors[1][:, :, ~real[0]] = 1e30
    found = results("cpu", *tensors, mask=Mask(key_padding=real))
    assert_same_bits(found, clean)


def _large_logits(logit: float, Tq: int) -> list[Tensor]:
    """Rows whose largest logit is about `logit`, and stands alone."""
    tensors = randn(torch.float32, (1, 2, Tq, 16), (1, 2, 60, 16), (1, 2, 60, 16), (1, 2, Tq, 16))
    factor = logit**0.5
    return [tensors[0] * factor, tensors[1] * factor, *tensors[2:]]


@pytest.mark.parametrize("Tq", [60, 5], ids=["long", "decode"])
@pytest.mark.parametrize(
    "logit",
    [
        *[1e3, 1e5, 1e7, 1e11, 1e30, 1e36],
    ],
)
def test_large_finite_logits(logit: float, Tq: int, isa: str) -> None:
    q, k, v, _ = _large_logits(logit, Tq)
    wanted, actual = (qknorm.attention(q, k, v, backend=name) for name in ("reference", "cpu"))
    torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("Tq", [60, 5], ids=["long", "decode"])
@pytest.mark.parametrize(
    "logit",
    [
        *[1e2, 1e3, 1e6, 1e8, 1e30],
    ],
)
def test_gradient_of_values_at_large_logits(logit: float, Tq: int, isa: str) -> None:
    tensors = _large_logits(logit, Tq)
    wanted, actual = (results(backend, *tensors)["d_v"] for backend in ("reference", "cpu"))
    torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [(60, 60), (5, 60)], ids=["long", "decode"])
@pytest.mark.parametrize("value", [1e-30, 1e-39, 1e-42])
def test_denormal_queries_and_keys(value: float, tokens: tuple[int, int], isa: str) -> None:
    """They count: under a scale of 1e36 or beyond keys of 1e36 their logits are ordinary numbers."""
    Tq, Tk = tokens
    q, k, v, d_out = randn(torch.float32, (1, 2, Tq, 16), (1, 2, Tk, 16), (1, 2, Tk, 16), (1, 2, Tq, 16))
    large = min(1 / value, 1e36)
    wanted, actual = (results(name, q * value, k * large, v, d_out) for name in ("reference", "cpu"))
    for name in ("out", "d_v", "d_k", "rows.max_logit", "rows.entropy_nats"):
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-3, atol=1e-4, msg=name)
    other, found = (results(name, q * large, k * value, v, d_out) for name in ("reference", "cpu"))
    for name in ("out", "d_v", "d_q", "rows.max_logit", "rows.entropy_nats"):
        torch.testing.assert_close(found[name], other[name], rtol=1e-3, atol=1e-4, msg=name)
    assert wanted["rows.max_logit"].any()


@pytest.mark.parametrize("tokens", [(60, 60), (5, 60)], ids=["long", "decode"])
def test_denormal_values(tokens: tuple[int, int], isa: str) -> None:
    Tq, Tk = tokens
    q, k, v, d_out = randn(torch.float32, (1, 2, Tq, 16), (1, 2, Tk, 16), (1, 2, Tk, 16), (1, 2, Tq, 16))
    v, d_out = v * 1e-40, d_out * 1e-40
    wanted, actual = (results(name, q, k, v, d_out) for name in ("reference", "cpu"))
    for name in ("out", "d_v"):
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-4, atol=Tk * 1e-45, msg=name)
        assert wanted[name].any()


@pytest.mark.parametrize("scale", [1e-30, 1e-38, -1e-38, 1e-44])
def test_tiny_scale(scale: float) -> None:
    tensors = randn(torch.float32, *[(1, 2, 40, 16)] * 4)
    assert_close_to_reference(*tensors, scale=scale)


@pytest.mark.parametrize("scale", [0.0, 1e-46, -1e-300])
def test_a_scale_that_is_zero_in_fp32_is_refused_and_served_by_others(scale: float) -> None:
    q, k, v = randn(torch.float32, *[(1, 2, 40, 16)] * 3)
    with pytest.raises(qknorm.UnsupportedError, match="scale of 0"):
        qknorm.attention(q, k, v, scale=scale, backend="cpu")
    wanted = qknorm.attention(q, k, v, scale=scale, backend="reference")
    torch.testing.assert_close(qknorm.attention(q, k, v, scale=scale), wanted)


def test_no_width_has_no_default_scale() -> None:
    q, k, v = randn(torch.float32, (1, 2, 4, 0), (1, 2, 4, 0), (1, 2, 4, 3))
    with pytest.raises(ValueError, match="give scale"):
        qknorm.attention(q, k, v)

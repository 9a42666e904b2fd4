"""The vocabulary: masks, tables and sinks as values, and what they take.

Shapes: B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import qknorm
from qknorm import Mask, Rope, RowSink, SinkToken
from qknorm.ops.backends import BACKENDS
from qknorm.ops.backends.call import Case

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
CASE = Case(device="cpu", dtype=torch.float32, head_dim=8, value_dim=8)
AVAILABLE = [name for name, backend in BACKENDS.items() if not backend.refuses(CASE)]


def ids(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([values], dtype=dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *UNSIGNED], ids=str)
@pytest.mark.parametrize("backend", AVAILABLE)
def test_f9_documents_may_have_any_integer_type(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    values = (3, 3, 3, 100, 100, 7) if dtype in UNSIGNED else (3, 3, 3, 100, -1, 7)

    def results(dtype: torch.dtype, backend: str) -> list[Tensor]:
        mask = Mask(causal=True, documents=ids(*values, dtype=dtype))
        out, stats = qknorm.attention(q, k, v, mask=mask, stats=True, backend=backend)
        alone = qknorm.logit_stats(q, k, mask=mask)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        return [out, *grads, stats.entropy_sum, stats.row_count, alone.entropy_sum, alone.row_count]

    for a, w in zip(results(dtype, backend), results(torch.int64, "reference"), strict=True):
        torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_f9_large_unsigned_ids_stay_apart(backend: str) -> None:
    """65 535 and 4 294 967 295 are ids like others; in uint64 the upper half is padding, since that is
    what -1 becomes there."""
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    plain = Mask(documents=ids(0, 0, 1, 1))
    wanted = qknorm.attention(q, k, v, mask=plain, backend=backend)
    for dtype, top in ((torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1), (torch.uint64, 2**63 - 1)):
        mask = Mask(documents=ids(top, top, 5, 5, dtype=dtype))
        torch.testing.assert_close(qknorm.attention(q, k, v, mask=mask, backend=backend), wanted)
    padded = Mask(documents=ids(2**64 - 1, 2**64 - 1, 5, 5, dtype=torch.uint64))
    out, stats = qknorm.attention(q, k, v, mask=padded, backend=backend, stats=True)
    assert stats.row_count == 2
    assert not out[:, :, :2].any()


def test_f16_masks_tables_and_sinks_compare_by_their_values() -> None:
    table = torch.rand(4, 2)
    makers = [
        lambda x: Mask(documents=x(ids(1, 2))),
        lambda x: Mask(causal=True, window=3, key_padding=x(ids(1, 0).bool())),
        lambda x: Rope(x(table), x(table), "half"),
        lambda x: SinkToken(x(table), x(table)),
        lambda x: RowSink(x(table)),
    ]
    for make in makers:
        other = make(lambda x: ~x if x.dtype == torch.bool else x + 1)
        one, same = make(lambda x: x), make(torch.clone)
        assert one == same
        assert one != other
        assert hash(one) == hash(same)
        assert len({one, same, other}) == 2
    different = [make(torch.clone) for make in makers]
    assert all(a != b for a, b in itertools.combinations(different, 2))
    assert Mask(causal=True) == Mask(causal=True)
    assert Mask(documents=ids(1, 2)) != Mask()
    assert Mask(documents=ids(1, 2)) != Mask(documents=ids(1, 2, 3))
    assert Mask() != "a mask"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_documents_from_cumulative_lengths(dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=dtype)
    mask = Mask.from_cu_seqlens(cu_seqlens, 9)
    assert mask == Mask(causal=True, documents=ids(0, 0, 0, 2, 2, 2, 2, -1, -1))
    mask = Mask.from_cu_seqlens(cu_seqlens, 7, causal=False, window=2)
    assert mask == Mask(window=2, documents=ids(0, 0, 0, 2, 2, 2, 2))


@pytest.mark.parametrize("bad", [torch.zeros(2, 2).long(), torch.tensor([0.0, 3.0]), torch.tensor([0])])
def test_what_are_no_cumulative_lengths_is_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be integer"):
        Mask.from_cu_seqlens(bad, 4)

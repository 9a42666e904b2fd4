"""Decoding with a cache equals the whole run, by every route."""

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, NormDialect
from qknorm.nn import Attention, AttentionConfig, KVCache, RotaryEmbedding

T, C = 12, 24
KINDS = ["none", "off_by_one", "logit", "token"]
ROTARY = RotaryEmbedding(4, layout="half")


def built(**options):
    torch.manual_seed(0)
    options = {"dim": C, "num_heads": 4, "num_kv_heads": 2, **options}
    layer = Attention(AttentionConfig(**options)).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "gain" in name or "sink" in name:
                p.copy_(torch.randn_like(p) * 0.7 + 1.0)
    return layer, torch.randn(2, T, C, dtype=torch.float64)


def whole(layer, x, positions=None, **mask):
    positions = torch.arange(x.shape[1]) if positions is None else positions
    with torch.no_grad():
        return layer(x, rope=ROTARY(positions), mask=Mask(causal=True, **mask))


def by_pieces(layer, x, sizes, cache=None, start=0, positions=None, **mask):
    """Feed `x` in pieces of the given sizes; masks are over all keys so far."""
    cache = cache or layer.new_cache(len(x), T)
    outs = []
    with torch.no_grad():
        for size in sizes:
            end = start + size
            rope = ROTARY if positions is None else ROTARY(positions[:, :end])
            own = {name: value[:, :end] for name, value in mask.items()}
            out = layer(x[:, start:end], rope=rope, mask=Mask(causal=True, **own), cache=cache)
            outs.append(out)
            start = end
            assert cache.length == end
    return torch.cat(outs, 1)


PIECES = {"whole": [12], "chunks": [5, 4, 3], "chunk_then_tokens": [5] + [1] * 7, "tokens": [1] * 12}


@pytest.mark.parametrize("backend", ["auto", "stock", "reference"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
def test_pieces_equal_the_whole(sizes, kind, window, backend):
    layer, x = built(sink=kind, window=window, backend=backend)
    assert_close(by_pieces(layer, x, sizes), whole(layer, x), atol=1e-10, rtol=1e-10)


DIALECTS = {
    "none": None,
    "full": NormDialect(statistic="full", gain="full"),
    "after_rope": NormDialect(order="after_rope"),
    "value": NormDialect(value=True, eps=1e-3),
    "shared": NormDialect(gain="shared", offset=1.0, eps_place="outside"),
}


@pytest.mark.parametrize("norm", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("kind", ["none", "token"])
def test_pieces_equal_the_whole_in_every_dialect(norm, kind):
    layer, x = built(sink=kind, norm=norm, gate=True)
    pieces = by_pieces(layer, x, PIECES["chunk_then_tokens"])
    assert_close(pieces, whole(layer, x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_left_padded_batch_equals_its_rows_alone(kind, window):
    """Row 0 has 3 tokens of padding in front; its positions start at 0 after them."""
    layer, x = built(sink=kind, window=window)
    padding = torch.ones(2, T, dtype=torch.bool)
    padding[0, :3] = False
    positions = torch.stack((torch.arange(T) - 3, torch.arange(T))).clamp(min=0)
    out = by_pieces(layer, x, [6, 2, 1, 1, 1, 1], positions=positions, key_padding=padding)
    assert_close(out[0, 3:], whole(layer, x[:1, 3:])[0], atol=1e-10, rtol=1e-10)
    assert_close(out[1], whole(layer, x[1:])[0], atol=1e-10, rtol=1e-10)
    assert_close(out, whole(layer, x, positions, key_padding=padding), atol=1e-10, rtol=1e-10)


def test_packed_documents_go_through_the_cache():
    layer, x = built(sink="logit")
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 8 + [3] * 4])
    out = by_pieces(layer, x, [6, 1, 1, 4], documents=documents)
    assert_close(out, whole(layer, x, documents=documents), atol=1e-10, rtol=1e-10)


def test_statistics_of_the_pieces_merge_to_those_of_the_whole():
    layer, x = built(sink="logit", window=5)
    cache, parts = layer.new_cache(2, T), []
    with torch.no_grad():
        _, total = layer(x, rope=ROTARY(T), stats=True)
        for start, size in ((0, 7), (7, 1), (8, 4)):
            piece = x[:, start : start + size]
            parts.append(layer(piece, rope=ROTARY, cache=cache, stats=True)[1])
    merged = parts[0].merge(*parts[1:])
    assert merged.row_count == total.row_count == 2 * T
    for name in ("max_logit", "entropy_nats", "entropy_ratio", "sink_mass"):
        assert_close(getattr(merged, name), getattr(total, name), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["none", "token"])
def test_crop_then_continue_equals_never_having_seen_the_rest(kind):
    layer, x = built(sink=kind, window=6)
    cache = layer.new_cache(2, T)
    by_pieces(layer, x.flip(0), [4], cache)
    cache.crop(0)
    by_pieces(layer, x, [7, 2], cache)
    cache.crop(5)
    assert cache.length == 5
    other = torch.cat((x[:, :5], x[:, :7].flip(1)), 1)
    continued = by_pieces(layer, other, [3, 1, 3], cache, start=5)
    assert_close(continued, whole(layer, other)[:, 5:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0, 0]])
def test_reorder_continues_with_the_chosen_rows(rows):
    layer, x = built(sink="logit")
    cache = layer.new_cache(2, T)
    by_pieces(layer, x, [7], cache)
    cache.reorder(torch.tensor(rows))
    assert cache.length == 7
    mixed = torch.cat((x[rows, :7], x[:, 7:]), 1)
    continued = by_pieces(layer, mixed, [1, 4], cache, start=7)
    assert_close(continued, whole(layer, mixed)[:, 7:], atol=1e-10, rtol=1e-10)


def test_a_cache_also_works_while_gradients_are_recorded():
    layer, x = built(sink="token")
    cache = layer.new_cache(2, T)
    parts = [layer(x[:, a:b], rope=ROTARY, cache=cache) for a, b in ((0, 5), (5, 6), (6, 12))]
    assert_close(torch.cat(parts, 1).detach(), whole(layer, x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_cache_takes_the_dtype_and_shape_of_its_layer(dtype):
    layer = Attention(AttentionConfig(dim=C, num_heads=4, num_kv_heads=2, head_dim=10)).to(dtype)
    cache = layer.new_cache(3, 20)
    assert (cache.keys.dtype, cache.values.dtype) == (dtype, dtype)
    assert tuple(cache.keys.shape) == tuple(cache.values.shape) == (3, 2, 20, 10)
    assert (cache.length, cache.max_length) == (0, 20)
    assert layer.new_cache(1, 2, dtype=torch.float64).keys.dtype == torch.float64
    with torch.no_grad():
        out = layer(torch.randn(3, 4, C, dtype=dtype), cache=cache)
    assert out.dtype == dtype


def test_keys_are_stored_after_norm_and_rope_so_nothing_is_normalised_twice():
    layer, x = built(norm=NormDialect(eps=1e-12))
    bare, turned, scaled = (layer.new_cache(2, T) for _ in range(3))
    with torch.no_grad():
        layer(x, cache=bare)
        layer(x, rope=ROTARY(T), cache=turned)
        layer.qkv.weight[24:36] *= 5
        layer(x, rope=ROTARY(T), cache=scaled)
        before_gain = bare.keys / layer.norm.k_gain[:, None]
    assert_close(before_gain.square().mean(-1), torch.ones(2, 2, T).double(), atol=1e-9, rtol=0)
    assert_close(scaled.keys, turned.keys, atol=1e-9, rtol=0)
    assert_close(turned.keys[..., 4:], bare.keys[..., 4:], atol=1e-12, rtol=0)
    assert (turned.keys[:, :, 1:, :4] - bare.keys[:, :, 1:, :4]).abs().max() > 0.1
    # An RMSNorm of q and k leaves V alone, in the cache too.
    assert torch.equal(scaled.values, bare.values)


def test_append_returns_views_of_everything_so_far():
    cache = KVCache(2, 2, 5, 4)
    cache.append(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4))
    before = cache.keys[:, :, :3].clone()
    k, v = cache.append(torch.ones(2, 2, 1, 4), torch.full((2, 2, 1, 4), 2.0))
    assert (k.shape[2], v.shape[2], cache.length) == (4, 4, 4)
    assert k.data_ptr() == cache.keys.data_ptr()
    assert v.data_ptr() == cache.values.data_ptr()
    assert torch.equal(k[:, :, :3], before)
    assert torch.equal(v[:, :, 3], torch.full((2, 2, 4), 2.0))


def test_values_may_be_wider_than_keys():
    cache = KVCache(1, 2, 5, 4, 7)
    k, v = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 7))
    assert (tuple(k.shape), tuple(v.shape)) == ((1, 2, 3, 4), (1, 2, 3, 7))


def test_a_table_of_all_keys_is_what_a_rotary_embedding_makes_of_the_length():
    """Build 6: no `start=` to forget; a table has a row for every key, as for `qknorm.attention`."""
    for norm, sink in ((NormDialect(), "logit"), (NormDialect(statistic="full"), "token")):
        layer, x = built(norm=norm, sink=sink)
        tables, counted = layer.new_cache(2, T), layer.new_cache(2, T)
        with torch.no_grad():
            for a, b in ((0, 5), (5, 6), (6, 12)):
                by_table = layer(x[:, a:b], rope=ROTARY(b), cache=tables)
                assert torch.equal(by_table, layer(x[:, a:b], rope=ROTARY, cache=counted))
        assert torch.equal(tables.keys, counted.keys)


def test_one_full_graph_decodes_with_a_cache():
    torch._dynamo.reset()
    layer, x = built(sink="token", window=6)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = by_pieces(compiled, x, [5, 1, 1, 1, 4], layer.new_cache(2, T))
    assert_close(found, whole(layer, x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["none", "token"])
def test_gradients_reach_back_through_the_cache(kind):
    """The last chunk's gradient, its keys written into the buffer of the earlier ones."""
    layer, x = built(sink=kind)
    parameters = list(layer.parameters())
    cache = layer.new_cache(2, T)
    with torch.no_grad():
        layer(x[:, :7], rope=ROTARY, cache=cache)
    part = layer(x[:, 7:], rope=ROTARY, cache=cache)
    weight = torch.linspace(-1, 1, part.numel()).double().view(part.shape)
    found = torch.autograd.grad((part * weight).sum(), parameters)

    # By the definition: earlier keys and values are constants.
    fixed = layer.new_cache(2, T)
    with torch.no_grad():
        layer(x[:, :7], rope=ROTARY, cache=fixed)
    direction = [torch.randn_like(p) for p in parameters]
    losses = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += step * d
            fixed.crop(7)
            losses.append((layer(x[:, 7:], rope=ROTARY, cache=fixed) * weight).sum())
            for p, d in zip(parameters, direction, strict=True):
                p -= step * d
    slope = (losses[0] - losses[1]) / 2e-6
    along = sum((g * d).sum() for g, d in zip(found, direction, strict=True))
    assert_close(along, slope, rtol=1e-6, atol=1e-8)

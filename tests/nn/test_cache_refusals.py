"""F8: what is refused, or fails, leaves the cache as it was, so that the call can be made again."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from qknorm import Mask, NormDialect
from qknorm.lab import LanguageModel, ModelConfig
from qknorm.lab.capped import Cap, CappedAttention
from qknorm.nn import Attention, AttentionConfig, KVCache, RotaryEmbedding
from qknorm.ops.backends import BACKENDS, reference
from qknorm.spec import UnsupportedError
from test_kv_cache import ROTARY, C, T, built, by_pieces, whole


def snapshot(cache):
    return cache.length, cache.keys.clone(), cache.values.clone()


def assert_unchanged(cache, before):
    assert cache.length == before[0]
    assert torch.equal(cache.keys, before[1])
    assert torch.equal(cache.values, before[2])


def filled():
    cache = KVCache(2, 2, 5, 4)
    cache.append(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4))
    return cache


BAD_APPENDS = {
    "too_many": ((2, 2, 3, 4), (2, 2, 3, 4), torch.float32, torch.float32, "3 .* do not fit"),
    "batch": ((1, 2, 1, 4), (1, 2, 1, 4), torch.float32, torch.float32, r"\[1, 2, 1, 4\]"),
    "heads": ((2, 1, 1, 4), (2, 1, 1, 4), torch.float32, torch.float32, r"\[2, 1, 1, 4\]"),
    "width": ((2, 2, 1, 5), (2, 2, 1, 4), torch.float32, torch.float32, r"\[2, 2, 1, 5\]"),
    "v_width": ((2, 2, 1, 4), (2, 2, 1, 5), torch.float32, torch.float32, r"\[2, 2, 1, 5\]"),
    "v_tokens": ((2, 2, 1, 4), (2, 2, 2, 4), torch.float32, torch.float32, r"\[2, 2, 2, 4\]"),
    "k_dtype": ((2, 2, 1, 4), (2, 2, 1, 4), torch.bfloat16, torch.float32, "bfloat16"),
    "v_dtype": ((2, 2, 1, 4), (2, 2, 1, 4), torch.float32, torch.float64, "float64"),
    "axes": ((2, 2, 4), (2, 2, 4), torch.float32, torch.float32, r"\[2, 2, 4\]"),
}


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "k_dtype", "v_dtype", "phrase"), BAD_APPENDS.values(), ids=BAD_APPENDS
)
def test_a_refused_append_leaves_the_cache_unchanged(k_shape, v_shape, k_dtype, v_dtype, phrase):
    cache = filled()
    before = snapshot(cache)
    with pytest.raises(ValueError, match=phrase):
        cache.append(torch.ones(k_shape, dtype=k_dtype), torch.ones(v_shape, dtype=v_dtype))
    assert_unchanged(cache, before)


@pytest.mark.parametrize("length", [-1, 4, 100])
def test_a_refused_crop_leaves_the_cache_unchanged(length):
    cache = filled()
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"0 \.\.\. 3.*got {length}"):
        cache.crop(length)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("rows", [[0], [0, 1, 1]])
def test_a_refused_reorder_leaves_the_cache_unchanged(rows):
    cache = filled()
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"\[{len(rows)}\]"):
        cache.reorder(torch.tensor(rows))
    assert_unchanged(cache, before)


def bad_calls():
    """What is wrong with a call that adds one token to a cache of 5."""
    return {
        "key_padding": {"mask": Mask(causal=True, key_padding=torch.ones(2, 1, dtype=torch.bool))},
        "documents": {"mask": Mask(causal=True, documents=torch.zeros(2, 4, dtype=torch.long))},
        "device": {
            "mask": Mask(causal=True, documents=torch.zeros(2, 6, dtype=torch.long, device="meta"))
        },
        "table_of_new_tokens_only": {"rope": ROTARY(1, start=5)},
        "table_too_long": {"rope": ROTARY(7)},
        "table_wide": {"rope": RotaryEmbedding(8, layout="half")},
        "no_table": {"rope": (torch.ones(6, 2), torch.ones(6, 2))},
        "stats": {"stats": "row"},
    }


def layers():
    """Those that hand over to the operator in different ways."""
    yield built()[0]
    yield built(sink="token")[0]
    yield built(norm=NormDialect(statistic="full"))[0]
    torch.manual_seed(0)
    yield CappedAttention(
        AttentionConfig(dim=C, num_heads=4, num_kv_heads=2), Cap(kind="soft", limit=9.0)
    ).double()


@pytest.mark.parametrize("what", list(bad_calls()))
def test_f08_a_refused_forward_leaves_the_cache_unchanged(what):
    x = built()[1]
    for layer in layers():
        cache = layer.new_cache(2, T)
        by_pieces(layer, x, [5], cache)
        before = snapshot(cache)
        options = {"rope": ROTARY, **bad_calls()[what]}
        with torch.no_grad(), pytest.raises(ValueError):  # noqa: PT011 - the messages are tested elsewhere
            layer(x[:, 5:6], cache=cache, **options)
        assert_unchanged(cache, before)


def test_f08_a_backend_that_cannot_serve_the_call_has_not_written_the_cache():
    torch.manual_seed(0)
    config = AttentionConfig(dim=C, num_heads=4, num_kv_heads=2, sink="token", backend="cpu")
    layer, x = Attention(config), torch.randn(2, T, C)
    cache = layer.new_cache(2, T)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="cpu"):
            layer(x, rope=ROTARY, cache=cache)
        assert_unchanged(cache, (0, torch.zeros(2, 2, T, 6), torch.zeros(2, 2, T, 6)))


BAD_CACHES = {
    "full": ({"max_length": 5}, r"holds 5 tokens; 5 \+ 1 do not fit"),
    "dtype": ({"dtype": torch.bfloat16}, "holds torch.bfloat16; got keys in torch.float64"),
    "device": ({"device": "meta"}, "on meta; got keys on cpu"),
    "batch": ({"batch": 3}, r"\[3, 2, 12, 6\]"),
    "heads": ({"num_kv_heads": 4}, r"\[2, 4, 12, 6\]"),
    "width": ({"head_dim": 5}, r"\[2, 2, 12, 5\]"),
}


@pytest.mark.parametrize(("changed", "phrase"), BAD_CACHES.values(), ids=BAD_CACHES)
def test_f08_a_cache_that_does_not_fit_is_refused_unwritten(changed, phrase):
    sizes = {"batch": 2, "num_kv_heads": 2, "max_length": T, "head_dim": 6, "dtype": torch.float64}
    for layer in layers():
        cache = KVCache(**sizes | changed)
        cache.length = 5
        before = snapshot(cache)
        with torch.no_grad(), pytest.raises(ValueError, match=phrase):
            layer(torch.randn(2, 1, C).double(), rope=ROTARY, cache=cache)
        assert cache.length == 5
        if changed != {"device": "meta"}:
            assert_unchanged(cache, before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_f08_an_error_inside_the_kernel_leaves_the_tokens_before_it(error, monkeypatch):
    x = built()[1]

    def run(*args, **kwargs):
        raise error("in the kernel")

    for layer in layers():
        cache = layer.new_cache(2, T)
        by_pieces(layer, x, [5], cache)
        with monkeypatch.context() as patch:
            for name, backend in BACKENDS.items():
                patch.setitem(BACKENDS, name, replace(backend, run=run))
            patch.setattr(reference, "attend", run)
            with torch.no_grad(), pytest.raises(error):
                layer(x[:, 5:8], rope=ROTARY, cache=cache)
        assert cache.length == 5
        pieces = by_pieces(layer, x, [3, 4], cache, start=5)
        assert_close(pieces, whole(layer, x)[:, 5:], atol=1e-6, rtol=0)


def test_f08_a_layer_that_refuses_leaves_what_another_wrote_to_the_same_cache():
    layer, x = built()
    refusing, _ = built(sink="token", backend="cpu")
    cache = layer.new_cache(2, T)
    by_pieces(layer, x, [5], cache)
    before = snapshot(cache)
    with torch.no_grad(), pytest.raises(UnsupportedError):
        refusing(x[:, 5:6], rope=ROTARY, cache=cache)
    assert_unchanged(cache, before)


def test_f08_a_model_takes_one_cache_a_layer_and_all_of_one_length():
    model = LanguageModel(ModelConfig(vocab_size=8, layers=3, dim=16, heads=2)).eval()
    caches = model.new_caches(1, 6)
    tokens = torch.arange(3)[None]
    with torch.no_grad():
        model(tokens, caches=caches)
        for bad, lengths in ((caches[:2], r"\[3, 3\]"), ([*caches, caches[0]], r"\[3, 3, 3, 3\]")):
            with pytest.raises(ValueError, match=f"each of the 3 layers needs a cache.*{lengths}"):
                model(tokens, caches=bad)
        caches[1].crop(2)
        with pytest.raises(ValueError, match=r"\[3, 2, 3\]"):
            model(tokens, caches=caches)
    assert [cache.length for cache in caches] == [3, 2, 3]


def test_a_failed_reorder_leaves_the_cache_unchanged():
    cache = filled()
    before = snapshot(cache)
    with pytest.raises(IndexError):
        cache.reorder(torch.tensor([0, 2]))
    assert_unchanged(cache, before)

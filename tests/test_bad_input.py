"""What does not fit is refused with one clear sentence that names the offending value."""

import math

import pytest
import torch

from qknorm import (
    Mask,
    NormDialect,
    Rope,
    RowSink,
    SinkToken,
    Stats,
    UnsupportedError,
    attention,
    logit_bound,
    logit_stats,
    qk_norm_rope,
)
from qknorm.nn import Attention, AttentionConfig, QKNorm, RopeScaling, RotaryEmbedding, param_groups

B, HQ, HK, T, D = 2, 4, 2, 5, 8


def qkv(dtype=torch.float32, **shapes):
    base = {"q": (B, HQ, T, D), "k": (B, HK, T, D), "v": (B, HK, T, D), **shapes}
    return {name: torch.ones(shape, dtype=dtype) for name, shape in base.items()}


def gains(q=(HQ, D), k=(HK, D), **options):
    return {"q_gain": torch.ones(q, **options), "k_gain": torch.ones(k, **options)}


def table(tokens=T, width=D, batch=()):
    return Rope(torch.ones(*batch, tokens, width // 2), torch.zeros(*batch, tokens, width // 2), "half")


def padding(*shape):
    return torch.ones(shape, dtype=torch.bool)


def ids(*shape):
    return torch.zeros(shape, dtype=torch.long)


def call(**options):
    """The operator on fitting tensors with some of them, or some options, replaced."""
    return lambda: attention(**{**qkv(), **options})


def rows(**options):
    """The statistics pass likewise."""
    tensors = qkv()
    del tensors["v"]
    return lambda: logit_stats(**{**tensors, **options})


def refuse(action, phrase):
    with pytest.raises(ValueError, match=phrase) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return caught


MASKS = {
    "window_0": (lambda: Mask(window=0), "window must be at least 1.*got 0"),
    "window_negative": (lambda: Mask(causal=True, window=-3), "got -3"),
    "documents_float": (lambda: Mask(documents=torch.zeros(B, T)), "documents.*integer.*float32"),
    "documents_bool": (lambda: Mask(documents=padding(B, T)), "documents.*integer.*bool"),
    "documents_1d": (lambda: Mask(documents=ids(T)), r"documents.*\[5\]"),
    "documents_3d": (lambda: Mask(documents=ids(B, 1, T)), r"documents.*\[2, 1, 5\]"),
    "padding_float": (lambda: Mask(key_padding=torch.ones(B, T)), "key_padding.*bool.*float32"),
    "padding_int": (lambda: Mask(key_padding=ids(B, T)), "key_padding.*bool.*int64"),
    "padding_4d": (lambda: Mask(key_padding=padding(B, 1, T, T)), r"key_padding.*\[2, 1, 5, 5\]"),
    "documents_length": (call(mask=Mask(documents=ids(B, 4))), r"documents must be.*\[2, 5\].*\[2, 4\]"),
    "documents_batch": (call(mask=Mask(documents=ids(3, T))), r"documents must be.*\[3, 5\]"),
    "padding_length": (call(mask=Mask(key_padding=padding(B, 6))), r"key_padding must be.*\[2, 6\]"),
    "padding_batch": (call(mask=Mask(key_padding=padding(1, T))), r"key_padding must be.*\[1, 5\]"),
    "stats_padding": (rows(mask=Mask(key_padding=padding(B, 6))), r"key_padding must be.*\[2, 6\]"),
    "documents_device": (call(mask=Mask(documents=ids(B, T).to("meta"))), "documents is on meta"),
    "padding_device": (call(mask=Mask(key_padding=padding(B, T).to("meta"))), "key_padding is on meta"),
    "more_queries_than_keys_with_documents": (
        call(q=torch.ones(B, HQ, 7, D), mask=Mask(documents=ids(B, T))),
        "Tq=7 > Tk=5",
    ),
}

TENSORS = {
    "q_3d": (call(q=torch.ones(HQ, T, D)), r"q must be \[B, H, T, D\]; got \[4, 5, 8\]"),
    "k_5d": (call(k=torch.ones(1, B, HK, T, D)), r"k must be.*\[1, 2, 2, 5, 8\]"),
    "batch": (call(k=torch.ones(1, HK, T, D)), r"batch.*\[1, 2, 5, 8\]"),
    "width": (call(k=torch.ones(B, HK, T, 6)), r"width.*\[2, 2, 5, 6\]"),
    "heads_do_not_divide": (call(q=torch.ones(B, 3, T, D)), "3 query heads do not divide among 2"),
    "fewer_query_heads": (call(q=torch.ones(B, 1, T, D)), "1 query heads do not divide among 2"),
    "v_tokens": (call(v=torch.ones(B, HK, 6, D)), r"v must be.*\[2, 2, 6, 8\]"),
    "v_heads": (call(v=torch.ones(B, HQ, T, D)), r"v must be.*\[2, 4, 5, 8\]"),
    "v_3d": (call(v=torch.ones(B, T, D)), r"v must be.*\[2, 5, 8\]"),
    "q_int": (call(**qkv(torch.int64)), "q must be fp16.*int64"),
    "q_fp8": (call(**{n: x.to(torch.float8_e4m3fn) for n, x in qkv().items()}), "q must be.*float8"),
    "k_dtype": (call(k=torch.ones(B, HK, T, D).bfloat16()), "q and k must share dtype.*bfloat16"),
    "v_dtype": (call(v=torch.ones(B, HK, T, D).double()), "v must share.*float64"),
    "k_device": (call(k=torch.ones(B, HK, T, D, device="meta")), "q and k must share.*meta"),
    "v_device": (call(v=torch.ones(B, HK, T, D, device="meta")), "v must share.*meta"),
    "stats_heads": (rows(q=torch.ones(B, 3, T, D)), "3 query heads do not divide among 2"),
    "norm_heads": (
        lambda: qk_norm_rope(torch.ones(B, 3, T, D), torch.ones(B, 2, T, D)),
        "3 query heads do not divide among 2",
    ),
}

GAINS = {
    "q_flat": (call(**gains(q=(HQ * D,))), r"q_gain must be.*\[4, 8\]; got \[32\]"),
    "q_shared": (call(**gains(q=(D,))), r"q_gain must be.*got \[8\]"),
    "k_of_q_heads": (call(**gains(k=(HQ, D))), r"k_gain must be.*\[2, 8\]; got \[4, 8\]"),
    "k_width": (call(**gains(k=(HK, 4))), r"k_gain must be.*got \[2, 4\]"),
    "stats": (rows(**gains(q=(D,))), r"q_gain must be.*got \[8\]"),
    "integer": (call(**gains(dtype=torch.int64)), "q_gain must be floating point; got torch.int64"),
    "device": (call(**gains(device="meta")), "q_gain.*meta"),
    "of_gain": (
        lambda: NormDialect.of_gain((7,), heads=HQ, head_dim=D),
        r"\[7\].*\[8\].*\[4, 8\].*\[32\]",
    ),
    "of_gain_flat": (lambda: NormDialect.of_gain((32,), heads=HQ, head_dim=D), "32 entries.*declare"),
    "bound_heads": (lambda: logit_bound(torch.ones(3, D), torch.ones(2, D)), r"\[3, 8\].*\[2, 8\]"),
    "bound_width": (lambda: logit_bound(torch.ones(2, D), torch.ones(2, 4)), r"\[2, 8\].*\[2, 4\]"),
    "bound_1d": (lambda: logit_bound(torch.ones(D), torch.ones(D)), r"\[8\]"),
    "bound_rotary_odd": (
        lambda: logit_bound(torch.ones(2, D), torch.ones(2, D), rotary_dim=3, layout="half"),
        "rotary_dim must be even.*got 3",
    ),
    "bound_rotary_wide": (
        lambda: logit_bound(torch.ones(2, D), torch.ones(2, D), rotary_dim=10, layout="half"),
        "D=8.*got 10",
    ),
    "bound_no_layout": (
        lambda: logit_bound(torch.ones(2, D), torch.ones(2, D), rotary_dim=4),
        "layout.*got 4, None",
    ),
    "bound_table_wide": (
        lambda: logit_bound(torch.ones(2, D), torch.ones(2, D), rope=table(width=10)),
        "D=8.*got 10",
    ),
}

HALF = qkv(torch.bfloat16)
EPS = {
    "bf16": (call(**HALF, **gains(), eps=1e-7), "eps=1e-07 is too small for torch.bfloat16"),
    "fp16": (
        call(**qkv(torch.float16), **gains(), eps=9e-7),
        "eps=9e-07 is too small for torch.float16",
    ),
    "stats": (rows(q=HALF["q"], k=HALF["k"], **gains(), eps=1e-8), "eps=1e-08 is too small"),
    "one_gain": (call(**HALF, k_gain=torch.ones(HK, D), eps=1e-8), "eps=1e-08 is too small"),
    "zero": (call(**gains(), eps=0.0), "eps must be positive; got 0"),
    "negative": (call(**gains(), eps=-1e-6), "eps must be positive; got -1e-06"),
    "nan": (call(**gains(), eps=math.nan), "got nan"),
    "infinite": (call(**gains(), eps=math.inf), "got inf"),
    "dialect_zero": (lambda: NormDialect(eps=0.0), "eps must be positive; got 0"),
    "dialect_nan": (lambda: NormDialect(eps=math.nan), "got nan"),
    "module": (
        lambda: QKNorm(HQ, HK, D, NormDialect(eps=1e-7))(HALF["q"], HALF["k"]),
        "eps=1e-07 is too small for torch.bfloat16",
    ),
    "module_without_gains": (
        lambda: QKNorm(HQ, HK, D, NormDialect(eps=1e-7, gain="none"))(HALF["q"], HALF["k"]),
        "eps=1e-07 is too small for torch.bfloat16",
    ),
}

ROPE = {
    "odd_width": (lambda: RotaryEmbedding(7, layout="half"), "even.*got 7"),
    "odd_head": (
        call(**qkv(q=(B, HQ, T, 7), k=(B, HK, T, 7)), rope=table(width=8)),
        "rotates 8 entries but a head has 7",
    ),
    "too_wide": (call(rope=table(width=10)), "rotates 10 entries but a head has 8"),
    "too_short": (call(rope=table(4)), "4 positions for 5 keys"),
    "too_long": (call(rope=table(6)), "6 positions for 5 keys"),
    "stats_short": (rows(rope=table(4)), "4 positions for 5 keys"),
    "batch": (call(rope=table(batch=(3,))), "batch of 3"),
    "more_queries": (call(q=torch.ones(B, HQ, 7, D), rope=table(T)), "7 queries"),
    "layout": (lambda: Rope(torch.ones(T, 4), torch.ones(T, 4), "neox"), "layout.*neox"),
    "shapes": (lambda: Rope(torch.ones(T, 4), torch.ones(T, 3), "half"), r"\[5, 4\].*\[5, 3\]"),
    "1d": (lambda: Rope(torch.ones(4), torch.ones(4), "half"), r"\[4\]"),
    "4d": (lambda: Rope(torch.ones(1, 1, T, 4), torch.ones(1, 1, T, 4), "half"), r"\[1, 1, 5, 4\]"),
    "int": (lambda: Rope(ids(T, 4), ids(T, 4), "half"), "int64"),
    "device": (
        call(rope=Rope(torch.ones(T, 4, device="meta"), torch.ones(T, 4, device="meta"), "half")),
        "meta",
    ),
    "scaling": (lambda: RopeScaling(kind="su", factor=2.0), "su"),
}

SINKS = {
    "shape": (call(sink=torch.zeros(HK)), r"sink.*\[4\].*\[2\]"),
    "2d": (call(sink=torch.zeros(HQ, 1)), r"sink.*\[4\].*\[4, 1\]"),
    "scalar": (call(sink=torch.zeros(())), r"sink.*\[4\].*\[\]"),
    "int": (call(sink=ids(HQ)), "sink.*int64"),
    "name": (call(sink="off-by-one"), "sink.*'off-by-one'"),
    "number": (call(sink=0.0), "sink.*0.0"),
    "flag": (call(sink=True), "sink.*True"),
    "device": (call(sink=torch.zeros(HQ, device="meta")), "sink.*meta"),
    "token_key": (call(sink=SinkToken(torch.ones(HQ, D), torch.ones(HK, D))), r"\[4, 8\]"),
    "token_width": (call(sink=SinkToken(torch.ones(HK, 4), torch.ones(HK, D))), r"\[2, 4\]"),
    "token_value": (call(sink=SinkToken(torch.ones(HK, D), torch.ones(HK, 3))), r"\[2, 3\]"),
    "token_1d": (lambda: SinkToken(torch.ones(D), torch.ones(D)), r"\[8\]"),
    "row": (call(sink=RowSink(torch.zeros(B, HQ, 4))), r"\[2, 4, 4\]"),
    "row_axes": (call(sink=RowSink(torch.zeros(HQ, T))), r"\[4, 5\]"),
    "row_value": (call(sink=RowSink(torch.zeros(B, HQ, T), torch.ones(HQ, D))), r"\[4, 8\]"),
    "stats_shape": (rows(sink=torch.zeros(HK)), r"sink.*\[4\].*\[2\]"),
    "stats_broadcast": (rows(sink=torch.zeros(1)), r"sink.*\[4\].*\[1\]"),
    "stats_name": (rows(sink="off-by-one"), "sink.*'off-by-one'"),
    "stats_number": (rows(sink=3.0), "sink.*3.0"),
    "stats_token": (rows(sink=SinkToken(torch.ones(HK, 4), torch.ones(HK, D))), r"\[2, 4\]"),
    "stats_row": (rows(sink=RowSink(torch.zeros(B, HQ, 1))), r"\[2, 4, 1\]"),
}

OPTIONS = {
    "backend": (call(backend="flash"), "unknown backend 'flash'.*auto, cpu.*triton.*reference"),
    "backend_case": (call(backend="Stock"), "unknown backend 'Stock'"),
    "stats": (call(stats="row"), "stats must be.*'row'"),
    "stats_1": (call(stats=1), "stats must be.*got 1"),
    "stats_none": (call(stats=None), "stats must be.*None"),
    "stats_pass": (rows(stats="all"), "stats must be.*'all'"),
    "merge_keys": (lambda: rows()().merge_keys(rows()()), 'stats="rows"'),
    "merge_keys_half": (lambda: rows(stats="rows")().merge_keys(rows()()), 'stats="rows"'),
    "statistic": (lambda: NormDialect(statistic="token"), "statistic.*head, full.*'token'"),
    "gain": (lambda: NormDialect(gain="scalar"), "gain.*'scalar'"),
    "eps_place": (lambda: NormDialect(eps_place="root"), "eps_place.*'root'"),
    "order": (lambda: NormDialect(order="rope"), "order.*'rope'"),
    "offset": (lambda: NormDialect(offset=0.5), "offset.*0.5"),
}


def config(**options):
    return lambda: AttentionConfig(**{"dim": 24, "num_heads": 4, **options})


def layer_call(x=None, built=None, **options):
    built = built or {}
    return lambda: Attention(config(**built)())(torch.ones(B, T, 24) if x is None else x, **options)


MODULES = {
    "heads_do_not_divide_dim": (config(num_heads=5), "dim 24 does not divide into 5 heads"),
    "kv_heads_do_not_divide": (config(num_kv_heads=3), "4 query heads do not divide among 3"),
    "more_kv_heads": (config(num_kv_heads=8), "4 query heads do not divide among 8"),
    "no_heads": (config(num_heads=0), "positive.*0"),
    "no_kv_heads": (config(num_kv_heads=0), "positive.*0"),
    "no_dim": (config(dim=-24), "positive.*-24"),
    "head_dim": (config(head_dim=0), "head_dim must be positive; got 0"),
    "sink": (config(sink="learned"), "sink.*'learned'"),
    "window": (config(window=0), "window.*got 0"),
    "backend": (layer_call(built={"backend": "sdpa"}), "unknown backend 'sdpa'"),
    "stats": (layer_call(stats="row"), "stats must be.*'row'"),
    "table_short": (layer_call(rope=table(4, 4)), "4 positions for 5 keys"),
    "table_wide": (layer_call(rope=table(T, 8)), "rotates 8 entries but a head has 6"),
    "token_table_wide": (
        layer_call(built={"sink": "token"}, rope=table(T, 8)),
        "rotates 8 entries but a head has 6",
    ),
    "odd_head": (layer_call(built={"head_dim": 7}, rope=table(T, 8)), "8 entries but a head has 7"),
    "padding": (layer_call(mask=Mask(key_padding=padding(B, 4))), r"key_padding must be.*\[2, 4\]"),
    "norm_heads": (
        lambda: QKNorm(HQ, HK, D)(torch.ones(B, 3, T, D), torch.ones(B, HK, T, D)),
        "3 query heads do not divide among 2",
    ),
    "norm_other_heads": (
        lambda: QKNorm(HQ, HK, D)(torch.ones(B, 6, T, D), torch.ones(B, HK, T, D)),
        r"\[6, 8\]; got \[4, 8\]",
    ),
    "norm_width": (
        lambda: QKNorm(HQ, HK, D)(torch.ones(B, HQ, T, 4), torch.ones(B, HK, T, 4)),
        r"\[4, 4\]; got \[4, 8\]",
    ),
    "positions": (lambda: RotaryEmbedding(4, layout="half")(torch.tensor(3)), r"\[\]"),
    "gain_decay": (
        lambda: param_groups(QKNorm(2, 2, 8), weight_decay=0.1, gain_decay=0.1),
        "q_gain.*offset=1.0",
    ),
}


@pytest.mark.parametrize(("action", "phrase"), MASKS.values(), ids=MASKS)
def test_a_mask_that_does_not_fit_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_each_other_are_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), GAINS.values(), ids=GAINS)
def test_a_gain_that_does_not_fit_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), EPS.values(), ids=EPS)
def test_an_eps_that_is_no_eps_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), ROPE.values(), ids=ROPE)
def test_a_rotation_that_does_not_fit_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), SINKS.values(), ids=SINKS)
def test_a_sink_that_does_not_fit_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), OPTIONS.values(), ids=OPTIONS)
def test_an_unknown_option_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize(("action", "phrase"), MODULES.values(), ids=MODULES)
def test_a_layer_that_cannot_be_is_refused(action, phrase):
    refuse(action, phrase)


@pytest.mark.parametrize("backend", ["auto", "stock", "reference"])
def test_every_backend_refuses_in_the_same_words(backend):
    messages = {
        str(refuse(lambda b=b: attention(**qkv(), sink=torch.zeros(3), backend=b), r"\[3\]").value)
        for b in (backend, "reference")
    }
    assert len(messages) == 1


def test_an_unsupported_call_is_a_value_error_too():
    assert issubclass(UnsupportedError, ValueError)


def test_what_fits_is_not_refused():
    """The neighbours of the refused values, so that no check is too wide."""
    half = {**qkv(torch.bfloat16), **gains(), "eps": 1e-6}
    assert attention(**half).dtype == torch.bfloat16
    assert attention(**qkv(), **gains(), eps=1e-12).isfinite().all()
    odd = qkv(q=(B, HQ, T, 7), k=(B, HK, T, 7), v=(B, HK, T, 3))
    out, stats = attention(**odd, rope=table(width=6), mask=Mask(causal=True, window=1), stats="rows")
    assert tuple(out.shape) == (B, HQ, T, 3)
    assert isinstance(stats, Stats)
    more = qkv(q=(B, HQ, 7, D))
    assert tuple(attention(**more, mask=Mask(key_padding=padding(B, T))).shape) == (B, HQ, 7, D)
    assert (
        attention(**qkv(), rope=table(batch=(B,)), mask=Mask(documents=ids(B, T).int())).isfinite().all()
    )

"""Rotary tables against complex multiplication, and scalings against their definitions."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qknorm import qk_norm_rope
from qknorm.nn import RopeScaling, RotaryEmbedding


def angles(rope):
    """Radians `[..., T, R/2]`, unwrapped by nothing: for angles below pi."""
    return torch.atan2(rope.sin.double(), rope.cos.double())


def frequency(*args, **kwargs):
    """What a module turns per token, read from its public table at a position small enough."""
    rope = RotaryEmbedding(*args, layout="half", **kwargs)(torch.tensor([1]))
    return angles(rope)[0]


def plain(R, base=10_000.0):
    return base ** (-torch.arange(0, R, 2).double() / R)


@pytest.mark.parametrize("rotary_dim", [8, 6, 2])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_is_complex_multiplication_on_the_first_r_entries(layout, rotary_dim):
    torch.manual_seed(0)
    R, positions = rotary_dim, torch.tensor([0, 1, 5, 31, 200])
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    _, turned = qk_norm_rope(x, x, rope=RotaryEmbedding(R, layout=layout, base=500.0)(positions))

    def as_complex(y):
        head = y[..., :R]
        real, imag = head.chunk(2, -1) if layout == "half" else (head[..., 0::2], head[..., 1::2])
        return torch.complex(real, imag)

    phase = torch.polar(torch.ones(5, R // 2).double(), positions[:, None].double() * plain(R, 500.0))
    # Angles up to 200 in fp32.
    assert_close(as_complex(turned), as_complex(x) * phase, atol=5e-5, rtol=0)
    assert torch.equal(turned[..., R:], x[..., R:])


def test_frequencies_are_the_geometric_series_of_the_base():
    assert_close(frequency(8), plain(8), atol=1e-7, rtol=1e-6)
    assert_close(frequency(8, base=500_000.0), plain(8, 5e5), atol=1e-7, rtol=1e-6)


def test_a_count_with_a_start_equals_the_positions_spelled_out():
    rotary = RotaryEmbedding(8, layout="half")
    counted, spelled = rotary(5, start=37), rotary(torch.arange(37, 42))
    assert torch.equal(counted.cos, spelled.cos)
    assert torch.equal(counted.sin, spelled.sin)
    assert (counted.width, counted.layout, tuple(counted.cos.shape)) == (8, "half", (5, 4))


def test_positions_by_row_give_a_table_by_row():
    rotary = RotaryEmbedding(8, layout="interleaved")
    positions = torch.tensor([[0, 1, 2], [9, 4, 7]])
    rope = rotary(positions)
    assert tuple(rope.cos.shape) == (2, 3, 4)
    for row in range(2):
        assert torch.equal(rope.sin[row], rotary(positions[row]).sin)


def test_far_positions_keep_the_precision_of_fp32_angles():
    """At 100 000 tokens an angle in bf16, or a position in it, would be off by whole turns."""
    rope = RotaryEmbedding(8, layout="half")(torch.tensor([100_000]))
    exact = (100_000 * plain(8)).cos()
    assert rope.cos.dtype == torch.float32
    assert_close(rope.cos[0].double(), exact, atol=1e-2, rtol=0)


# Scalings.


def test_linear_scaling_divides_positions():
    stretched = RotaryEmbedding(8, layout="half", scaling=RopeScaling(kind="linear", factor=4.0))
    whole = RotaryEmbedding(8, layout="half")
    for a, b in (("cos", stretched(torch.arange(0, 80, 4))), ("sin", stretched(torch.arange(0, 80, 4)))):
        assert_close(getattr(b, a), getattr(whole(20), a), atol=1e-5, rtol=0)


def test_ntk_scaling_keeps_the_highest_frequency_and_divides_the_lowest():
    scaled = frequency(16, scaling=RopeScaling(kind="ntk", factor=8.0))
    assert scaled[0].item() == pytest.approx(1.0, rel=1e-6)
    assert (plain(16)[-1] / scaled[-1]).item() == pytest.approx(8.0, rel=1e-5)
    ratios = scaled[1:] / scaled[:-1]
    assert_close(ratios, ratios[:1].expand(7), rtol=1e-5, atol=0)  # still a geometric series


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_a_factor_of_one_changes_nothing(kind):
    scaling = RopeScaling(kind=kind, factor=1.0, original_length=512)
    stretched, whole = (
        RotaryEmbedding(16, layout="half", scaling=scaling),
        RotaryEmbedding(16, layout="half"),
    )
    assert_close(stretched(50).cos, whole(50).cos, atol=1e-5, rtol=0)
    assert_close(stretched(50).sin, whole(50).sin, atol=1e-5, rtol=0)


def yarn(R, base, factor, length, fast=32.0, slow=1.0):
    """NTK-by-parts, arXiv 2309.00071 sec. 3.2, with the ramp over the pair index as in the authors'
    release: its ends are where a pair makes `fast` and `slow` turns, rounded outwards."""

    def pair_that_makes(turns):
        wavelength = length / turns
        return R / 2 * math.log(wavelength / (2 * math.pi), base)

    start = max(math.floor(pair_that_makes(fast)), 0)
    end = min(math.ceil(pair_that_makes(slow)), R - 1)
    found = []
    for i, theta in enumerate(plain(R, base).tolist()):
        share = min(max((i - start) / (end - start), 0.0), 1.0)
        found.append(theta * (1 - share) + theta / factor * share)
    return torch.tensor(found).double()


def llama3(R, base, factor, length, low=1.0, high=4.0):
    """By wavelength: long ones divided, short ones kept, linear in turns between."""
    found = []
    for theta in plain(R, base).tolist():
        wavelength = 2 * math.pi / theta
        if wavelength < length / high:
            found.append(theta)
        elif wavelength > length / low:
            found.append(theta / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append((1 - smooth) * theta / factor + smooth * theta)
    return torch.tensor(found).double()


@pytest.mark.parametrize(
    ("R", "base", "factor", "length", "borders"),
    [
        (16, 1e6, 4.0, 32_768, (32.0, 1.0)),
        (128, 1e6, 4.0, 32_768, (32.0, 1.0)),
        (128, 1e4, 16.0, 4096, (32.0, 1.0)),
        (64, 1e4, 40.0, 4096, (16.0, 2.0)),
    ],
)
def test_yarn_is_its_formula(R, base, factor, length, borders):
    scaling = RopeScaling(
        kind="yarn", factor=factor, original_length=length, beta_fast=borders[0], beta_slow=borders[1]
    )
    scaled = frequency(R, base=base, scaling=scaling)
    assert_close(scaled, yarn(R, base, factor, length, *borders), rtol=2e-6, atol=1e-10)
    assert ((scaled <= plain(R, base) * 1.000001) & (scaled >= plain(R, base) / factor * 0.999999)).all()
    # Ends of the ramp: the fastest pair is kept, the slowest divided.
    assert scaled[0].item() == pytest.approx(1.0, rel=1e-6)
    assert (plain(R, base)[-1] / scaled[-1]).item() == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize(
    ("R", "base", "factor", "length", "borders"),
    [
        (128, 5e5, 8.0, 8192, (1.0, 4.0)),
        (64, 5e5, 32.0, 8192, (1.0, 4.0)),
        (64, 1e4, 8.0, 2048, (0.5, 6.0)),
    ],
)
def test_llama3_is_its_formula(R, base, factor, length, borders):
    scaling = RopeScaling(
        kind="llama3",
        factor=factor,
        original_length=length,
        low_freq_factor=borders[0],
        high_freq_factor=borders[1],
    )
    scaled = frequency(R, base=base, scaling=scaling)
    assert_close(scaled, llama3(R, base, factor, length, *borders), rtol=2e-6, atol=1e-10)


# Values printed by transformers 4.57.1 (modeling_rope_utils) for R = 16.
REFERENCE = [
    (
        {"kind": "yarn", "factor": 4.0, "original_length": 32_768},
        1e6,
        [
            1.0,
            1.7782794e-1,
            3.1622779e-2,
            4.2175599e-3,
            5.0000002e-4,
            4.4456985e-5,
            7.9056936e-6,
            1.4058534e-6,
        ],
        1.138629436111989,
    ),
    (
        {"kind": "yarn", "factor": 8.0, "original_length": 4096},
        1e4,
        [1.0, 3.1622776e-1, 1e-1, 2.4705295e-2, 5.6249998e-3, 1.0870330e-3, 1.2500001e-4, 3.9528473e-5],
        1.2079441541679836,
    ),
    (
        {"kind": "llama3", "factor": 8.0, "original_length": 8192},
        5e5,
        [
            1.0,
            1.9392276e-1,
            3.7606031e-2,
            7.2926651e-3,
            5.2484602e-4,
            3.4281024e-5,
            6.6478697e-6,
            1.2891732e-6,
        ],
        1.0,
    ),
    (
        {"kind": "llama3", "factor": 32.0, "original_length": 8192},
        5e5,
        [
            1.0,
            1.9392276e-1,
            3.7606031e-2,
            7.2926651e-3,
            4.2955671e-4,
            8.5702559e-6,
            1.6619674e-6,
            3.2229329e-7,
        ],
        1.0,
    ),
]


@pytest.mark.parametrize(("options", "base", "values", "amplitude"), REFERENCE)
def test_scaled_tables_equal_those_of_transformers(options, base, values, amplitude):
    rotary = RotaryEmbedding(16, layout="half", base=base, scaling=RopeScaling(**options))
    rope = rotary(torch.tensor([1]))
    assert_close(angles(rope)[0], torch.tensor(values).double(), rtol=2e-6, atol=1e-10)
    length = (rope.cos.square() + rope.sin.square()).sqrt()
    assert_close(length, torch.full_like(length, amplitude), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_an_attention_factor_multiplies_cos_and_sin(kind):
    options = {"kind": kind, "factor": 4.0, "original_length": 64}
    bare = RotaryEmbedding(8, layout="half", scaling=RopeScaling(**options, attention_factor=1.0))(7)
    given = RotaryEmbedding(8, layout="half", scaling=RopeScaling(**options, attention_factor=1.5))(7)
    default = RotaryEmbedding(8, layout="half", scaling=RopeScaling(**options))(7)
    usual = 0.1 * math.log(4.0) + 1 if kind == "yarn" else 1.0
    for name in ("cos", "sin"):
        assert_close(getattr(given, name), getattr(bare, name) * 1.5)
        assert_close(getattr(default, name), getattr(bare, name) * usual)


# Casts and moves.


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_frequencies_are_unaffected_by_a_cast_of_the_model(cast):
    scaling = RopeScaling(kind="yarn", factor=4.0, original_length=64)
    before = RotaryEmbedding(8, layout="half", scaling=scaling)(300)
    model = nn.Sequential(nn.Linear(2, 2), RotaryEmbedding(8, layout="half", scaling=scaling))
    after = getattr(model, cast)()[1](300)
    assert model[0].weight.dtype == getattr(torch, cast)
    assert torch.equal(before.cos, after.cos)
    assert torch.equal(before.sin, after.sin)


def test_to_with_a_dtype_leaves_the_frequencies_too():
    rotary = RotaryEmbedding(8, layout="half")
    before = rotary(300)
    assert torch.equal(rotary.to(torch.bfloat16)(300).cos, before.cos)
    assert torch.equal(rotary.to("cpu", torch.float16)(300).sin, before.sin)


def test_a_model_built_on_the_meta_device_gets_its_frequencies_when_it_moves():
    with torch.device("meta"):
        rotary = RotaryEmbedding(8, layout="half")
    moved = rotary.to_empty(device="cpu")
    assert torch.equal(moved(9).cos, RotaryEmbedding(8, layout="half")(9).cos)


def test_tables_are_no_part_of_a_checkpoint():
    assert not RotaryEmbedding(8, layout="half").state_dict()


# Refusals.


LLAMA3 = {"kind": "llama3", "factor": 2.0, "original_length": 8192}  # F16
YARN = LLAMA3 | {"kind": "yarn"}


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "dynamic"),
        ({"kind": "linear", "factor": 0.5}, "at least 1; got 0.5"),
        ({"kind": "linear", "factor": math.nan}, "got nan"),
        ({"kind": "yarn", "factor": 2.0}, "yarn needs original_length"),
        ({"kind": "llama3", "factor": 2.0}, "llama3 needs original_length"),
        ({"kind": "yarn", "factor": 2.0, "original_length": -5}, "needs original_length.*got -5"),
        ({"kind": "ntk", "factor": math.inf}, "at least 1; got inf"),
        ({"kind": "linear", "factor": 2.0, "attention_factor": 0.0}, "attention_factor.*positive.*0.0"),
        (LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}, "low_freq_factor.*4.0 and 1.0"),
        (LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.0}, "below high_freq_factor.*2.0 and"),
        (LLAMA3 | {"low_freq_factor": math.nan}, "low_freq_factor.*nan and 4.0"),
        (LLAMA3 | {"low_freq_factor": -1.0}, "positive.*-1.0 and 4.0"),
        (YARN | {"beta_fast": 1.0, "beta_slow": 32.0}, "beta_slow.*below beta_fast.*32.0 and 1.0"),
        (YARN | {"beta_slow": 32.0}, "32.0 and 32.0"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused(options, phrase):
    with pytest.raises(ValueError, match=phrase):
        RopeScaling(**options)


@pytest.mark.parametrize("width", [5, 0, -2, 1])
def test_a_rotary_width_that_is_not_pairs_is_refused(width):
    with pytest.raises(ValueError, match=f"got {width}"):
        RotaryEmbedding(width, layout="half")


@pytest.mark.parametrize("base", [1.0, 0.0, -3.0, math.nan, math.inf])
def test_a_base_that_makes_no_falling_frequencies_is_refused(base):
    with pytest.raises(ValueError, match=f"base must be above 1.*got {base}"):
        RotaryEmbedding(8, layout="half", base=base)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="neox"):
        RotaryEmbedding(8, layout="neox")


def test_positions_of_more_axes_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 1, 4\]"):
        RotaryEmbedding(8, layout="half")(torch.zeros(3, 1, 4))

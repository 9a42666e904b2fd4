"""Every number by which the auditor decides, with its reason and its test.

`tests/auditor/test_thresholds.py` has a test of each name. It passes with the number as it is and fails
when the number is halved or doubled. Numbers that are only the size of a probe stand next to that probe.
"""

from __future__ import annotations


class Threshold(float):
    """A number, the reason for its value, and the name of its test."""

    why: str
    test: str

    def __new__(cls, value: float, why: str, test: str) -> Threshold:
        self = super().__new__(cls, value)
        self.why, self.test = why, test
        return self


T = Threshold

# The trace.
HIDDEN = T(-1e3, "Masks add far lower numbers, and no logit in use is as low.", "a_mask_of_less_hides")
SINK = T(1e-3, "Weights of a row add up to 1 to fp32 rounding without a sink.", "a_small_sink_is_seen")
SINK_LOW = T(3e-2, "The same where weights are bf16.", "rounded_weights_are_no_sink")
SINK_MOVES = T(
    1e-2, "The logit of a sink that is read from weights has this precision.", "a_sink_of_almost_0"
)

# Which projections lead to q and k.
ALIKE = T(0.5, "With 128 draws, chance gives 0.35 among thousands of columns.", "a_plain_layer_is_read")
SAME = T(1e-3, "Gradients that are the same but for fp32 rounding.", "an_addend_that_is_scaled")

# Which norm it is.
KNOWN = T(0.02, "bf16 inside the norm leaves 0.5 %, a wrong norm 10 % and more.", "a_noisy_norm")
EXACT = T(3e-5, "fp32 leaves 1e-6; a square in fp16 5e-4.", "a_norm_with_an_error")
EXACT_SMALL = T(
    1e-3,
    "eps changes the norm of small raw entries, so the fit is less exact.",
    "a_clamp_of_projections",
)
MIXED = T(0.05, "The share that another entry has in one at the first token.", "entries_that_are_mixed")
CLAMPED = T(
    0.005, "The share of entries at the maximum; by chance it is far smaller.", "few_clamped_entries"
)

# Gains.
FELT = T(
    1e-3, "An entry with a smaller relative change does not depend on a gain.", "a_gain_felt_elsewhere"
)
PROPORTIONAL = T(0.02, "A gain changes entries in proportion, a bias does not.", "a_gain_with_noise")
CONSTANT = T(1e-3, "A constant is read with this precision.", "a_length_that_is_almost_1")
AT_INITIAL = T(
    1e-4, "fp32 gains are read to 1e-5; training changes them by more.", "a_gain_that_moved_little"
)

# eps.
LEAST_EPS = T(0.9e-6, "This is 1e-6, minus the error with which an eps is read.", "eps_of_1e_6_is_fine")
EPS_SHARE = T(
    0.005, "At this share the lengths of q or k are 0.25 % too small.", "eps_beside_small_vectors"
)

# RoPE.
TURNED = T(2e-5, "fp32 leaves 1e-6; slow pairs turn by 1e-4 in 24 tokens.", "a_pair_that_turns_slowly")
SURELY_TURNED = T(
    0.05, "The layout is read from pairs that turn this far.", "pairs_that_tell_the_layout"
)
ORDER = T(1e-3, "If the gains in a pair are equal, both orders leave a rotation.", "almost_equal_gains")
RELATIVE = T(2e-3, "fp32 angles leave 1e-4 in 8 tokens.", "angles_a_little_off")
RELATIVE_LOW = T(0.03, "Tables of cos and sin in bf16 err by 0.4 %, products by more.", "bf16_tables")
SHIFTED = T(1e-3, "Outputs move when all positions shift by 7; fp32 leaves 1e-5.", "shifted_outputs")
SHIFTED_LOW = T(0.03, "The same in bf16.", "shifted_outputs_in_bf16")

# Precision, scale and V.
LENGTH = T(0.2, "In units of the dtype's epsilon; rounding alone leaves 0.06.", "lengths_that_err")
SCALE = T(0.02, "A scale that is meant to be 1/D or 1/sqrt(D).", "a_scale_close_to_that_of_mup")
GROWN = T(
    2.0, "The factor of V if projections grow 4 times; with a norm it is 1.", "v_that_grows_by_half"
)

# Logits.
LINE = T(1e-4, "Residual of logits = scale * q.k; fp32 leaves 1e-6.", "logits_that_are_almost_a_line")
SOFTCAP = T(2e-3, "The same for a soft-cap, whose constant is searched for.", "almost_a_softcap")
CLAMPED_LOGITS = T(
    0.001, "The share of logits at the maximum; by chance it is far smaller.", "few_clamped_logits"
)

# The whole model.
AGREE = T(
    2e-4, "The difference of fp32 paths, relative to the largest output.", "paths_that_almost_agree"
)
AGREE_WIDE = T(1e-8, "The same in fp64.", "paths_that_almost_agree_in_fp64")
AGREE_LOW = T(6e-2, "The same in bf16 and fp16.", "paths_that_almost_agree_in_bf16")
MOVED = T(1e-6, "A hidden token changes outputs at most by rounding.", "a_small_leak")
IS_CAUSAL = T(0.5, "The share of earlier tokens that no later token changes.", "most_tokens_are_causal")
CLIPPED = T(0.01, "Outputs change by less than this if a norm undoes a clip.", "a_clip_that_does_little")
LONG = T(32_768.0, "The number of tokens of context from which a sink helps.", "a_long_context")

# What was expected.
AS_EXPECTED = T(0.01, "A scale is read to 1e-3.", "a_scale_almost_as_expected")
EPS_AS_EXPECTED = T(0.05, "An eps is read to 2 %.", "an_eps_almost_as_expected")

# Files of weights.
DECAYED = T(0.2, "Trained gains are about 1; below this they are w of 1 + w.", "gains_that_are_small")
WIDEST = T(512.0, "No head in use is wider.", "a_gain_wider_than_any_head")

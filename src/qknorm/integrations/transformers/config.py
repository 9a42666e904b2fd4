"""The configuration of `QKNormForCausalLM`: a decoder whose QK-norm is written out."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

from qknorm.nn import AttentionConfig, RopeScaling
from qknorm.spec import NormDialect

# Where the norms of the residual stream are: before each part, after it, on both sides, or one before
# attention and MLP together, which both read.
BLOCKS = ("pre", "post", "sandwich", "parallel")
LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class QKNormConfig(PretrainedConfig):
    """The sizes and options of a decoder-only language model with any dialect of QK-norm.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: model width C.
        intermediate_size: hidden width of the MLP.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads Hq.
        num_key_value_heads: key heads Hk; Hq if None.
        head_dim: width D of a head; C / Hq if None.
        qk_norm: the fields of `qknorm.NormDialect` as a dict, the default dialect for `{}`; None for
            attention without QK-norm.
        sink: "none", "off_by_one", or "logit", as in `qknorm.nn.AttentionConfig`.
        gate: whether the heads' output is multiplied by the sigmoid of a projection of the input.
        attention_bias: whether the projections of attention have biases.
        attention_scale: factor of the logits; 1/sqrt(D) if None.
        attention_dropout: probability of dropping an attention weight in training.
        layer_types: of each layer, "full_attention" or "sliding_attention"; all full if None.
        sliding_window: keys that a query sees in a sliding layer, its own included.
        rope_parameters: `rope_theta`, `rope_type` and what the type needs, as in transformers; or one
            such dict for each layer type, or None for a type without rotation.
        rope_layout: "half" or "interleaved", see `qknorm.Rope`.
        rotary_dim: R, the entries of a head that are rotated; D if None.
        block: "pre", "post", "sandwich" or "parallel": where the norms of the residual stream are.
        stream_norm: "rms" or "layer" (without a bias) on the residual stream.
        norm_offset: the norms of the stream multiply by `norm_offset + w`; 0.0 or 1.0.
        norm_eps: eps of the norms of the stream.
        hidden_act: activation of the MLP.
        gated_mlp: whether a second projection multiplies the activation.
        embedding_scale: factor of the embeddings.
        logit_scale: factor of the output logits.
        final_logit_softcapping: soft-cap of the output logits; None for none.
    """

    model_type = "qknorm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 32_000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qk_norm: dict[str, Any] | None = field(default_factory=dict)
    sink: str = "none"
    gate: bool = False
    attention_bias: bool = False
    attention_scale: float | None = None
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    max_position_embeddings: int = 4096
    rope_parameters: dict[str, Any] | None = None
    rope_layout: str = "half"
    rotary_dim: int | None = None
    block: str = "pre"
    stream_norm: str = "rms"
    norm_offset: float | int = 0.0
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    gated_mlp: bool = True
    embedding_scale: float | int = 1.0
    logit_scale: float | int = 1.0
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what depends on other values, and check all."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rotary_dim is None:
            self.rotary_dim = self.head_dim
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        self._check_values()
        super().__post_init__(**kwargs)

    def _check_values(self) -> None:
        choices: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("block", BLOCKS),
            ("stream_norm", ("rms", "layer")),
            ("rope_layout", ("half", "interleaved")),
            ("sink", ("none", "off_by_one", "logit")),
            ("norm_offset", (0.0, 1.0)),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise ValueError(f"{name} must be one of {listed}; got {getattr(self, name)!r}")
        types = self.layer_types or []
        if len(types) != self.num_hidden_layers or not set(types) <= set(LAYER_TYPES):
            raise ValueError(
                f"layer_types must name one of {', '.join(LAYER_TYPES)} for each of the "
                f"{self.num_hidden_layers} layers; got {types}"
            )
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("a layer of the type sliding_attention needs sliding_window")
        self.attention(0)  # checks heads, widths, window and dialect

    @property
    def dialect(self) -> NormDialect | None:
        """The dialect of QK-norm; None for attention without it."""
        return None if self.qk_norm is None else NormDialect(**self.qk_norm)

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer in tokens; None for full attention."""
        assert self.layer_types is not None
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention(self, layer: int) -> AttentionConfig:
        """Return the configuration of a layer's attention in the terms of `qknorm.nn`.

        Raises ValueError if the values do not fit together.
        """
        return AttentionConfig(
            dim=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            norm=self.dialect,
            sink=self.sink,  # type: ignore[arg-type]
            window=self.window_of(layer),
            scale=self.attention_scale,
            gate=self.gate,
            bias=self.attention_bias,
        )

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """Return base and scaling of the rotation in layers of a type; None for no rotation.

        Raises ValueError for a kind of scaling that `qknorm.nn.RotaryEmbedding` does not have.
        """
        parameters = self.rope_parameters or {}
        rope: dict[str, Any] | None = parameters.get(layer_type, parameters)
        if not self.rotary_dim or rope is None:
            return None
        return float(rope.get("rope_theta", self.default_theta)), rope_scaling(rope)


def rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    """Return the scaling that `rope_parameters` of transformers describe; None for none.

    Raises ValueError for a kind that `qknorm.nn.RotaryEmbedding` does not have.
    """
    kind = rope.get("rope_type", "default")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "attention_factor"}
    known.add("original_max_position_embeddings")
    names = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("low_freq_factor", "high_freq_factor")}
    options = {n: rope[n] for n in names.get(kind, ()) if rope.get(n) is not None}
    unknown = sorted(n for n in rope.keys() - known - options.keys() if rope[n] not in (None, True))
    if kind == "default":
        return None
    if kind not in ("linear", "yarn", "llama3") or unknown:
        what = f"rope_type {kind!r}" + (f" with {', '.join(unknown)}" if unknown else "")
        raise ValueError(f"{what} is not supported: use default, linear, yarn or llama3")
    return RopeScaling(
        kind=kind,
        factor=rope["factor"],
        original_length=rope.get("original_max_position_embeddings"),
        attention_factor=rope.get("attention_factor"),
        **options,
    )

"""A decoder-only language model with any dialect of QK-norm, as a model class of transformers.

Attention is called through the interface of transformers, so every `attn_implementation` works that can
do what the configuration asks for.

Shapes: B batch, T tokens, C model width, Hq / Hk query / key heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from qknorm import ops, spec
from qknorm.integrations.transformers.config import QKNormConfig
from qknorm.nn import QKNorm, RotaryEmbedding
from qknorm.nn.marks import SINK, MarkedModule
from qknorm.spec import Rope

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention densely: the implementation "eager" of transformers.

    Args:
        module: the attention layer.
        query: `[B, Hq, Tq, D]`.
        key: `[B, Hk, Tk, D]`.
        value: `[B, Hk, Tk, D]`.
        attention_mask: added to the logits `[B, 1, Tq, Tk]`, or None.
        scaling: factor of the logits.
        dropout: probability of dropping a weight in training.
        s_aux: the sinks' logits `[Hq]`, or None.

    Returns:
        The output `[B, Tq, Hq, D]` and the weights `[B, Hq, Tq, Tk]`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = (query @ key.mT * scaling).to(spec.compute_dtype(query.dtype))
    if attention_mask is not None:
        logits = logits + attention_mask
    if s_aux is not None:
        sink = s_aux.to(logits).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class StreamNorm(nn.Module):
    """RMSNorm or LayerNorm (without a bias) of the residual stream, computed in fp32.

    Attributes:
        weight: w `[C]`; the gain is `offset + w`.
    """

    def __init__(self, config: QKNormConfig) -> None:
        super().__init__()
        self.kind, self.offset, self.eps = config.stream_norm, config.norm_offset, config.norm_eps
        self.weight = Parameter(torch.full((config.hidden_size,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[B, T, C]`, normalised."""
        wide = x.to(spec.compute_dtype(x.dtype))
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (self.weight.to(wide) + self.offset)).to(x.dtype)


class QKNormAttention(MarkedModule):
    """Attention with QK-norm: projections, norm, RoPE, and the implementation that is chosen.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: the projections.
        gate_proj: the projection to the gate `[Hq D]`, or None.
        qk_norm: the norms of q and k, or None.
        sinks: `[Hq]` for sinks with a learnable logit, or None.
    """

    sinks: Parameter | None

    def __init__(self, config: QKNormConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        c = config.attention(layer_idx)
        Hq, Hk, D = c.num_heads, c.kv_heads, c.width
        self.layer_type = config.layer_types[layer_idx] if config.layer_types else "full_attention"
        self.head_dim, self.num_key_value_groups = D, Hq // Hk
        self.scaling = spec.default_scale(D) if c.scale is None else c.scale
        self.attention_dropout, self.sliding_window = config.attention_dropout, c.window
        self.is_causal = True
        self.q_proj = nn.Linear(c.dim, Hq * D, bias=c.bias)
        self.k_proj = nn.Linear(c.dim, Hk * D, bias=c.bias)
        self.v_proj = nn.Linear(c.dim, Hk * D, bias=c.bias)
        self.o_proj = nn.Linear(Hq * D, c.dim, bias=c.bias)
        self.gate_proj = nn.Linear(c.dim, Hq * D, bias=c.bias) if c.gate else None
        self.qk_norm = None if c.norm is None else QKNorm(Hq, Hk, D, c.norm)
        sinks = Parameter(torch.zeros(Hq, dtype=torch.float32)) if c.sink == "logit" else None
        self.add_marked("sinks", sinks, SINK)

    def forward(
        self,
        hidden_states: Tensor,
        rope: Rope | None,
        attention_mask: Any,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output `[B, T, C]`, and the weights where the implementation gives them."""
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k, rope)
            if self.qk_norm.dialect.value:
                v = ops.norm_rope.rms_normalize(v, None, eps=self.qk_norm.dialect.eps).to(v.dtype)
        elif rope is not None:
            q, k = ops.qk_norm_rope(q, k, rope=rope)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        out, weights = self._implementation()(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **self._sink(q),
            **kwargs,
        )
        out = out.flatten(2)
        if self.gate_proj is not None:
            out = out * torch.sigmoid(self.gate_proj(hidden_states))
        return self.o_proj(out), weights

    def _sink(self, q: Tensor) -> dict[str, Tensor]:
        if self.config.sink == "off_by_one":
            return {"s_aux": q.new_zeros(q.shape[1])}
        return {} if self.sinks is None else {"s_aux": self.sinks}

    def _implementation(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        found: Callable[..., tuple[Tensor, Tensor | None]]
        name = self.config._attn_implementation
        if name == "sdpa" and self.config.sink != "none":
            raise ValueError(
                "F.scaled_dot_product_attention has no sinks: load the model with attn_implementation="
                '"eager" or "flex_attention"'
            )
        found = ALL_ATTENTION_FUNCTIONS.get_interface(name, dense_attention)
        return found


class QKNormMLP(nn.Module):
    """The MLP: `down(act(gate(x)) * up(x))` if it is gated, else `down(act(up(x)))`."""

    def __init__(self, config: QKNormConfig) -> None:
        super().__init__()
        C, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(C, hidden, bias=False) if config.gated_mlp else None
        self.up_proj = nn.Linear(C, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, C, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, T, C]` for x `[B, T, C]`."""
        if self.gate_proj is None:
            out: Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        else:
            out = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class QKNormDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP with the norms around them that `config.block` names."""

    def __init__(self, config: QKNormConfig, layer_idx: int) -> None:
        super().__init__()
        self.block = config.block
        self.self_attn, self.mlp = QKNormAttention(config, layer_idx), QKNormMLP(config)
        names = {
            "pre": ("attention_norm", "mlp_norm"),
            "post": ("attention_out_norm", "mlp_out_norm"),
            "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
            "parallel": ("attention_norm",),
        }[config.block]

        def norm(name: str) -> nn.Module:
            return StreamNorm(config) if name in names else nn.Identity()

        self.attention_norm, self.attention_out_norm = norm("attention_norm"), norm("attention_out_norm")
        self.mlp_norm, self.mlp_out_norm = norm("mlp_norm"), norm("mlp_out_norm")

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return `[B, T, C]` for hidden_states `[B, T, C]`; the rest goes to the attention."""
        x = hidden_states
        normed = self.attention_norm(x)
        attended = self.attention_out_norm(self.self_attn(normed, **kwargs)[0])
        if self.block == "parallel":
            out: Tensor = x + attended + self.mlp(normed)
            return out
        x = x + attended
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class QKNormPreTrainedModel(PreTrainedModel):
    """First values, and what transformers may do with the model."""

    config: QKNormConfig
    config_class = QKNormConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["QKNormDecoderLayer"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["q_gain", "k_gain", "gain_offset", "sinks"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": QKNormDecoderLayer, "attentions": QKNormAttention}  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model, see transformers.

        Raises ValueError if the file's gains mean something else than the configuration says.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, module in model.named_modules():
            if isinstance(module, QKNorm) and float(module.gain_offset) != module.dialect.offset:
                raise ValueError(
                    f"the gains of {name} mean {float(module.gain_offset):g} + w in the file and "
                    f"{module.dialect.offset:g} + w in its config.json: one of them is wrong"
                )
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StreamNorm):
            nn.init.constant_(module.weight, 1.0 - module.offset)
        elif isinstance(module, QKNorm | RotaryEmbedding):
            module.reset_parameters()
        elif isinstance(module, QKNormAttention) and module.sinks is not None:
            nn.init.zeros_(module.sinks)


class QKNormModel(QKNormPreTrainedModel):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, config: QKNormConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            QKNormDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = StreamNorm(config)
        self.rotary = nn.ModuleDict()
        for kind in sorted(set(config.layer_types or ())):
            if (rope := config.rope_of(kind)) is not None:
                assert config.rotary_dim is not None
                layout: Any = config.rope_layout
                self.rotary[kind] = RotaryEmbedding(
                    config.rotary_dim, layout=layout, base=rope[0], scaling=rope[1]
                )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states `[B, T, C]` of tokens.

        Args:
            input_ids: int64 `[B, T]`; or `inputs_embeds`.
            attention_mask: `[B, T]`, 0 for padding; or the masks by layer type.
            position_ids: `[B, T]`; counted on from the cache if None.
            cache: keys and values of earlier tokens.
            inputs_embeds: `[B, T, C]`, which are not scaled.
            use_cache: whether to return a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
            if self.config.embedding_scale != 1.0:
                # Rounded to the dtype of the weights, as the projects do that scale embeddings.
                scale = torch.tensor(self.config.embedding_scale, dtype=inputs_embeds.dtype)
                inputs_embeds = inputs_embeds * scale.to(inputs_embeds.device)
        x = inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        types = self.config.layer_types or []
        if not isinstance(masks := attention_mask, dict):
            masks = {
                kind: MASKS[kind](
                    config=self.config,
                    inputs_embeds=x,
                    attention_mask=attention_mask,
                    cache=cache,
                    position_ids=position_ids,
                )
                for kind in sorted(set(types))
            }
        ropes = {kind: rotary(position_ids) for kind, rotary in self.rotary.items()}
        for kind, layer in zip(types, self.layers, strict=True):
            x = layer(x, rope=ropes.get(kind), attention_mask=masks[kind], cache=cache, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), cache=cache if use_cache else None
        )


class QKNormForCausalLM(QKNormPreTrainedModel, GenerationMixin):
    """The decoder with an output head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: QKNormConfig) -> None:
        super().__init__(config)
        self.model = QKNormModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits `[B, T, V]` of the next tokens, and the loss if there are labels.

        Args:
            labels: int64 `[B, T]`, the tokens themselves; -100 where no loss is taken.
            logits_to_keep: how many of the last tokens get logits, or which; 0 for all.
            input_ids: for this and the other arguments see `QKNormModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden) * self.config.logit_scale
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


AutoConfig.register("qknorm", QKNormConfig)
AutoModel.register(QKNormConfig, QKNormModel)
AutoModelForCausalLM.register(QKNormConfig, QKNormForCausalLM)

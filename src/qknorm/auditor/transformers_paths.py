"""Hugging Face models: inputs to call them with, and the ways through them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qknorm.auditor.subject import Subject

BATCH, TOKENS = 8, 24


def example_inputs(model: Any) -> dict[str, Any]:
    """Random tokens, or pixels; no cache."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    device = next(model.parameters()).device
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = (
            vision.image_size if isinstance(vision.image_size, tuple | list) else [vision.image_size] * 2
        )
        shape = (BATCH, getattr(vision, "num_channels", 3), *size)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device, model.dtype)}
    if model.main_input_name != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {model.main_input_name}: pass inputs")
    text = config.get_text_config()
    high = min(text.vocab_size, 2**15)
    made: dict[str, Any] = {
        "input_ids": torch.randint(low_token(high), high, (BATCH, TOKENS), generator=generator).to(
            device
        )
    }
    if hasattr(text, "use_cache"):
        made["use_cache"] = False
    return made


def low_token(vocabulary: int) -> int:
    """The first ids are often padding and the like."""
    return min(10, vocabulary // 2)


def add_paths(subject: Subject) -> None:
    """The implementation that is set, the other one of eager and SDPA, and decoding."""
    model: Any = subject.model
    current = model.config._attn_implementation
    subject.paths[current] = model
    for name in ("eager", "sdpa"):
        if name != current and _supports(model, name):
            subject.paths[name] = _with_implementation(model, name, current)
    is_decoder = model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)
    if subject.tokens is not None and is_decoder:
        subject.paths["decode"] = _decode(model)
        subject.has_decode = True


def _supports(model: Any, name: str) -> bool:
    return name == "eager" or bool(getattr(model, "_supports_sdpa", False))


def _with_implementation(model: Any, name: str, current: str) -> Any:
    def call(**inputs: Any) -> Any:
        model.set_attn_implementation(name)
        try:
            return model(**inputs)
        finally:
            model.set_attn_implementation(current)

    return call


def _decode(model: Any) -> Any:
    # The argument and the output have a new name since transformers 5.2x.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def call(**inputs: Any) -> Tensor:
        """A prefill of the first half, then one token at a time."""
        inputs = {k: v for k, v in inputs.items() if k != "use_cache"}
        tokens, padding = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        inputs.pop("position_ids", None)
        T = tokens.shape[1]
        first = max(1, T // 2)
        cache, pieces = None, []
        for begin, end in [(0, first), *((t, t + 1) for t in range(first, T))]:
            mask = {} if padding is None else {"attention_mask": padding[:, :end]}
            cached = {name: cache, "use_cache": True}
            out = model(input_ids=tokens[:, begin:end], **cached, **mask, **inputs)
            cache = getattr(out, name)
            pieces.append(out.logits)
        return torch.cat(pieces, 1)

    return call

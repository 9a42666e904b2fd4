"""Make inputs for Hugging Face models, and list the paths on which they can be run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qknorm.auditor.draws import drawn

BATCH, TOKENS = 8, 24
MOST_TOKENS = 160  # the largest number of tokens that is used to exceed a window
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")

Call = Callable[..., Any]


def is_one(model: Any) -> bool:
    """Whether a module is a model of transformers."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def windows_of(model: Any) -> list[int]:
    """Return the widths of attention windows and chunks in the configuration of a model, in tokens."""
    values = [getattr(model.config.get_text_config(), name, None) for name in WINDOWS]
    return sorted({value for value in values if isinstance(value, int) and value > 0})


def example_inputs(model: Any) -> dict[str, Any]:
    """Make random inputs.

    Args:
        model: a model of transformers that takes tokens or pixels.

    Returns:
        `{"input_ids": int [BATCH, tokens]}`, with more tokens than a small window has, or
        `{"pixel_values": [BATCH, channels, height, width]}`.

    Raises:
        ValueError: the model takes other inputs.
    """
    config = model.config
    device = next(model.parameters()).device
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = (
            vision.image_size if isinstance(vision.image_size, tuple | list) else [vision.image_size] * 2
        )
        shape = (BATCH, getattr(vision, "num_channels", 3), *size)
        return {"pixel_values": drawn(shape, 0).to(device, model.dtype)}
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name}, for which no example can be made: "
            "pass inputs"
        )
    text = config.get_text_config()
    high = min(text.vocab_size, 2**15)
    length = max([TOKENS, *(w + 8 for w in windows_of(model) if w + 8 <= MOST_TOKENS)])
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(
        low_token(high), high, (BATCH, length), generator=generator, dtype=torch.int64, device="cpu"
    )
    return {"input_ids": tokens.to(device)}


def options_of(model: Any) -> dict[str, Any]:
    """Return further arguments of the model. They turn off the cache, which grows with each call."""
    takes_tokens = model.main_input_name == "input_ids"
    has_cache = takes_tokens and hasattr(model.config.get_text_config(), "use_cache")
    return {"use_cache": False} if has_cache else {}


def low_token(vocabulary: int) -> int:
    """Return the lowest token id to draw. The first ids are often padding and other special tokens."""
    return min(10, vocabulary // 2)


def paths_of(model: Any, call: Call, *, decodes: bool) -> dict[str, Call]:
    """List the paths of a model.

    Args:
        model: a model of transformers.
        call: the model, or the wrapper around it.
        decodes: whether the inputs are tokens, so that the model can decode.

    Returns:
        Functions that run the model by the name of the path: the attention implementation that is set,
        then "eager" and "sdpa" where the model supports them, and "decode".
    """
    current = model.config._attn_implementation
    paths = {current: call}
    for name in ("eager", "sdpa"):
        if name != current and (name == "eager" or getattr(model, "_supports_sdpa", False)):
            paths[name] = _with_implementation(model, call, name, current)
    if decodes and model.can_generate() and not getattr(model.config, "is_encoder_decoder", False):
        paths["decode"] = _decode(model, call)
    return paths


def _with_implementation(model: Any, call: Call, name: str, current: str) -> Call:
    def changed(**inputs: Any) -> Any:
        model.set_attn_implementation(name)
        try:
            return call(**inputs)
        finally:
            model.set_attn_implementation(current)

    return changed


def _decode(model: Any, call: Call) -> Call:
    # transformers 5.2x renamed the argument and the output.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def decode(**inputs: Any) -> Tensor:
        """Prefill the first half of the tokens, and then decode one token at a time."""
        inputs = {k: v for k, v in inputs.items() if k != "use_cache"}
        tokens, padding = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        inputs.pop("position_ids", None)
        T = tokens.shape[1]
        first = max(1, T // 2)
        cache, pieces = None, []
        for begin, end in [(0, first), *((t, t + 1) for t in range(first, T))]:
            mask = {} if padding is None else {"attention_mask": padding[:, :end]}
            cached = {name: cache, "use_cache": True}
            out = call(input_ids=tokens[:, begin:end], **cached, **mask, **inputs)
            cache = getattr(out, name)
            pieces.append(out.logits)
        return torch.cat(pieces, 1)

    return decode

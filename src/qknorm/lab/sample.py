"""Text from a trained model, token by token through the KV cache."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from qknorm.lab import checkpoint
from qknorm.lab.data import Codec
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.model import LanguageModel, saved_model


def load_model(folder: Path) -> tuple[LanguageModel, Codec]:
    """The model of a run's checkpoint, and the codec of its text. Raises ValueError if it is damaged."""
    state = checkpoint.load(folder / CHECKPOINT_FILE)
    config = state["config"]
    model = LanguageModel(saved_model(config["model"]))
    model.load_state_dict(state["model"])
    return model.eval(), Codec(config["data"]["tokenizer"])


@torch.no_grad()
def generate(
    model: LanguageModel,
    codec: Codec,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The prompt and its continuation by `tokens` tokens.

    The prompt is read in one chunk, then each token in a step of its own; keys are cached after norm
    and RoPE. Raises ValueError for an empty prompt, a negative temperature or no tokens.
    """
    ids = codec.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty: give at least one character")
    if tokens < 1 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"tokens must be at least 1 and temperature at least 0; got {tokens}, {temperature}"
        )
    if max(ids) >= model.config.vocab_size:
        raise ValueError(
            f"the prompt holds token {max(ids)}, outside the vocabulary of {model.config.vocab_size}"
        )
    generator = torch.Generator().manual_seed(seed)
    caches = model.new_caches(1, len(ids) + tokens)
    fresh = torch.tensor([ids])
    for _ in range(tokens):
        logits = model(fresh, caches=caches)[0, -1].float()
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: its training diverged")
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            chosen = int(torch.multinomial(probabilities, 1, generator=generator))
        ids.append(chosen)
        fresh = torch.tensor([[chosen]])
    return codec.decode(ids)

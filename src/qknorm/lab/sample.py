"""Generate text with a trained model, token by token with a KV cache."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from qknorm.lab import checkpoint
from qknorm.lab.data import Codec
from qknorm.lab.files import CHECKPOINT_FILE
from qknorm.lab.model import LanguageModel, saved_model


def load_model(folder: Path) -> tuple[LanguageModel, Codec]:
    """Load the model of a run.

    Args:
        folder: the folder of the run.

    Returns:
        The model in evaluation mode, and the codec for its text.

    Raises:
        ValueError: the checkpoint is missing or damaged.
    """
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
    """Continue a prompt.

    The model reads the whole prompt in one call and each new token in a further call. Keys are cached
    after norm and RoPE.

    Args:
        model: the model.
        codec: the codec for its text.
        prompt: the text to continue.
        tokens: the number of tokens to add.
        temperature: divides the logits before a token is drawn; 0 takes the likeliest token.
        seed: seed of the draws.

    Returns:
        The prompt and its continuation.

    Raises:
        ValueError: the prompt is empty or holds a token outside the vocabulary, `tokens` is below 1, the
            temperature is negative or not finite, or the logits of the model are not finite.
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

"""`qknorm sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qknorm.cli import options as o
from qknorm.cli.console import print_json
from qknorm.lab.sample import generate, load_model


def sample(
    folder: Annotated[Path, typer.Argument(help="Folder of a run with a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="How many to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    as_json: o.AsJson = False,
) -> int:
    """Continue a text with a trained model, through the KV cache."""
    model, codec = load_model(folder)
    text = generate(model, codec, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        print(text)
    return 0

"""`qknorm sample`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from qknorm.cli import options as o
from qknorm.cli.console import print_json
from qknorm.lab.printable import printable
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
        # A terminal obeys the escapes that a model may emit; a pipe gets the text as it is.
        lines = text.expandtabs().split("\n")
        print("\n".join(map(printable, lines)) if sys.stdout.isatty() else text)
    return 0

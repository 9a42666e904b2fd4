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
    folder: Annotated[Path, typer.Argument(help="The folder of a run with a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Continue this text.")] = "def ",
    tokens: Annotated[int, typer.Option(help="Add this many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Divide the logits by this temperature. 0 takes the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Set the seed with which tokens are drawn.")] = 0,
    as_json: o.AsJson = False,
) -> int:
    """Continue a text with a trained model and a KV cache."""
    model, codec = load_model(folder)
    text = generate(model, codec, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        # A terminal would obey escapes that the model generates. A pipe gets the unchanged text.
        lines = text.expandtabs().split("\n")
        print("\n".join(map(printable, lines)) if sys.stdout.isatty() else text)
    return 0

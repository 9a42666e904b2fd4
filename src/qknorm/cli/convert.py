"""`qknorm convert`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from qknorm.cli import options as o
from qknorm.cli.console import print_json, say
from qknorm.cli.foreign import foreign
from qknorm.lab import checkpoint
from qknorm.lab.files import CHECKPOINT_FILE

# What a checkpoint of transformers holds beside the model, and what stays as it is.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder of a Hugging Face checkpoint, or of a run of qknorm train.")
    ],
    target: Annotated[Path, typer.Argument(help="Folder to be made.")],
    to: Annotated[
        str,
        typer.Option(
            help="qknorm for QKNormForCausalLM, or a family: qwen3, gemma3_text, olmo2, cohere, lfm2, "
            "llama."
        ),
    ] = "qknorm",
    layout: Annotated[
        str | None,
        typer.Option(
            help="half or interleaved: the layout of RoPE, for --to qknorm; as it is if unsaid."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, the dtype of the checkpoint, or float32, bfloat16, float16.")
    ] = "auto",
    as_json: o.AsJson = False,
) -> int:
    """Bring a model into another class of transformers, exactly or not at all.

    The two models are run in float32 on the same tokens and compared before anything is written. No code
    of a checkpoint is run. Exit code 2 if the model cannot be converted; nothing is left behind then.
    """
    try:
        import transformers

        from qknorm.integrations.transformers import convert as conversion
        from qknorm.integrations.transformers.families import FAMILIES
    except ImportError as error:
        raise ValueError("convert needs an extra: pip install 'qknorm[transformers]'") from error
    if target.exists():
        raise ValueError(f"{target} exists already: name a folder that is to be made")
    if layout not in (None, "half", "interleaved"):
        raise ValueError(f"--layout takes half or interleaved; got {layout}")
    if to != "qknorm" and to not in FAMILIES:
        raise ValueError(f"--to takes qknorm or {', '.join(FAMILIES)}; got {to}")
    with foreign(str(source), time_limit_s=0):
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model = _loaded(source, dtype)
        kind = model.config.model_type
        if kind != "qknorm":
            model = conversion.to_qknorm(model)
        if layout is not None and layout != model.config.rope_layout:
            model = conversion.with_layout(model, "half" if layout == "half" else "interleaved")
        if to != "qknorm":
            model = conversion.from_qknorm(model, to)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        model.save_pretrained(part)
        for pattern in COMPANIONS:
            for file in source.glob(pattern):
                shutil.copy2(file, part)
        part.chmod(0o755)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    parameters = sum(p.numel() for p in model.parameters())
    if as_json:
        print_json({"source": str(source), "from": kind, "target": str(target), "to": to})
    else:
        say(f"{source} ({kind}) is now {target} ({to}), {parameters / 1e6:.1f} million parameters")
    return 0


def _loaded(source: Path, dtype: str) -> Any:
    """The model of a folder. Raises ValueError if there is none that can be converted."""
    import torch
    import transformers

    from qknorm.integrations.transformers import convert as conversion
    from qknorm.integrations.transformers import lab_checkpoint

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype takes auto, float32, bfloat16 or float16; got {dtype}")
    if (source / CHECKPOINT_FILE).is_file():
        state = checkpoint.load(source / CHECKPOINT_FILE)
        model = lab_checkpoint.from_lab(state["config"]["model"], state["model"])
        return model if dtype == "auto" else model.to(getattr(torch, dtype))
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: is this the folder of a checkpoint?")
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    if config.model_type == "qknorm":
        kind: Any = transformers.AutoModelForCausalLM
    else:
        kind = conversion.family_of(config).model
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    model, report = kind.from_pretrained(
        source, dtype=wanted, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"no file of {source} holds {', '.join(missing[:5])}")
    if unexpected := sorted(report["unexpected_keys"]):
        raise ValueError(f"{config.model_type} has no place for {', '.join(unexpected[:5])} of {source}")
    return model

"""Read text and tokens from the standard library, text files, folders, JSONL files and token files."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

TokenDtype = Literal["uint8", "uint16", "int32"]
# Folders that are not part of the standard library, or are missing from some installations of Python.
STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
        source: "stdlib" for the source code of Python's standard library, or the path of a .txt, .jsonl
            or .bin file, or of a folder of .txt files.
        tokenizer: the path of a tokenizer.json. Without one (None) each byte is a token.
        token_dtype: the dtype of the tokens in a .bin file: "uint8", "uint16" or "int32".
        holdout: the share of the tokens that is kept for evaluation, from the end of the source.

    Raises:
        ValueError: `holdout` is not between 0 and 1, or `token_dtype` is unknown.
    """

    source: str = "stdlib"
    tokenizer: str | None = None
    token_dtype: TokenDtype = "uint16"
    holdout: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be between 0 and 1; got {self.holdout}")
        if self.token_dtype not in ("uint8", "uint16", "int32"):
            raise ValueError(f"token_dtype must be uint8, uint16 or int32; got {self.token_dtype!r}")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The tokens of a source.

    Attributes:
        train: tokens to train on, a 1-D integer tensor.
        holdout: tokens for evaluation, a 1-D integer tensor.
    """

    train: Tensor
    holdout: Tensor

    def batch(self, seed: int, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Draw the batch of a step, which depends only on the arguments, so that runs can be resumed.

        Args:
            seed: seed of the run.
            step: number of the step.
            batch: number of sequences.
            context: number of tokens in a sequence.

        Returns:
            Inputs and targets, int64 `[batch, context]`.
        """
        # The generator uses only 32 bits of its seed, so both numbers are hashed into 32 bits.
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def holdout_batches(self, count: int, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield fixed batches for evaluation, evenly spread over the held-out tokens.

        Args:
            count: number of batches.
            batch: number of sequences in a batch.
            context: number of tokens in a sequence.

        Yields:
            Inputs and targets, int64 `[batch, context]`.
        """
        last, parts = len(self.holdout) - context - 1, max(count * batch - 1, 1)
        # Integers, because fp32 cannot represent every position beyond 2^24.
        starts = torch.arange(count * batch, dtype=torch.int64) * last // parts
        for part in starts.split(batch):
            yield _windows(self.holdout, part, context)


def _windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = tokens[index].long()
    return window[:, :-1], window[:, 1:]


def load(config: DataConfig, *, vocab_size: int, context: int) -> Dataset:
    """Read, tokenize, check and split a source.

    Args:
        config: the source.
        vocab_size: number of tokens in the vocabulary of the model.
        context: number of tokens in a sequence.

    Returns:
        The tokens.

    Raises:
        ValueError: the source is missing, empty or too short, or a token is out of range.
    """
    tokens = _read_tokens(config)
    if tokens.numel() == 0:
        raise ValueError(f"{config.source} holds no tokens")
    pieces = tokens.split(1 << 20)  # casting a whole mapped file at once would need too much memory
    largest = max(int(piece.int().max()) for piece in pieces)
    smallest = min(int(piece.int().min()) for piece in pieces)
    if largest >= vocab_size or smallest < 0:
        worst = largest if largest >= vocab_size else smallest
        raise ValueError(
            f"{config.source} holds token {worst}, outside 0 ... {vocab_size - 1}: set the vocabulary "
            f"size to at least {largest + 1}, or check token_dtype"
        )
    cut = len(tokens) - int(len(tokens) * config.holdout)
    train, holdout = tokens[:cut], tokens[cut:]
    for name, part in (("training", train), ("held-out", holdout)):
        if len(part) <= context:
            raise ValueError(
                f"{config.source} has {len(part)} {name} tokens, too few for a context of {context}: "
                "use a shorter context or more text"
            )
    return Dataset(train=train, holdout=holdout)


def vocabulary(config: DataConfig) -> int | None:
    """Return the size of the vocabulary of a source; None for a .bin file, which does not state it."""
    if config.source.endswith(".bin"):
        return None
    if config.tokenizer is None:
        return 256
    size: int = _load_tokenizer(config.tokenizer).get_vocab_size()
    return size


def _read_tokens(config: DataConfig) -> Tensor:
    path = Path(config.source)
    if config.source == "stdlib":
        return _encode(_stdlib_text(), config.tokenizer)
    if not path.exists():
        raise ValueError(f'no such file or folder: {path}. Use "stdlib" for the built-in corpus.')
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise ValueError(f"{path} holds no .txt files")
        for file in files:
            _check_regular(file)
        return _encode(b"\n".join(file.read_bytes() for file in files), config.tokenizer)
    _check_regular(path)
    if path.suffix == ".txt":
        return _encode(path.read_bytes(), config.tokenizer)
    if path.suffix == ".jsonl":
        return _encode(b"\n".join(_jsonl_texts(path)), config.tokenizer)
    if path.suffix == ".bin":
        return _read_bin(path, getattr(torch, config.token_dtype))
    raise ValueError(f"cannot read {path}: expected .txt, .jsonl, .bin or a folder of .txt files")


def _check_regular(path: Path) -> None:
    """Raise a ValueError for a device, a pipe or a socket, since reading it may never end."""
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: save its content to a file first")


def _read_bin(path: Path, dtype: torch.dtype) -> Tensor:
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, not a positive multiple of {dtype.itemsize}: check token_dtype"
        )
    # The file is mapped into memory, and only the tokens that are indexed are cast to int64.
    return torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype)


def _jsonl_texts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                yield text.encode()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f'{path}, line {number}: expected a JSON object with a "text" that is a string'
                ) from error


def _stdlib_text() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file for file in root.rglob("*.py") if not STDLIB_SKIP.intersection(file.relative_to(root).parts)
    )
    if not files:
        raise ValueError(f"this Python ({sys.executable}) ships no sources: give a text file instead")
    # A fixed shuffle, so that the held-out end holds files of many packages.
    random.Random(0).shuffle(files)
    return b"\n".join(file.read_bytes() for file in files)


def _encode(text: bytes, tokenizer: str | None) -> Tensor:
    if tokenizer is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
    ids = _load_tokenizer(tokenizer).encode(text.decode(errors="replace")).ids
    return torch.tensor(ids, dtype=torch.int32)


def _load_tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            "reading a tokenizer.json needs an extra: pip install 'qknorm[tokenizers]'"
        ) from error
    if not Path(path).is_file():
        raise ValueError(f"no such tokenizer: {path}")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error


class Codec:
    """Converts text to token ids and back.

    Args:
        tokenizer: the path of a tokenizer.json. Without one (None) each byte is a token.

    Raises:
        ValueError: the tokenizer cannot be read, or needs an extra that is not installed.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else _load_tokenizer(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        if self._tokenizer is None:
            return list(text.encode())
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, with the replacement character for invalid UTF-8."""
        if self._tokenizer is None:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        text: str = self._tokenizer.decode(ids)
        return text

"""What ``recycle`` has learned as a file: safetensors, with the vocabulary that it is about."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import ConfigError
from ..files import write_whole
from ..models.base import LanguageModel

FORMAT = "draftree recycled successors"
VERSION = "1"
_WAY_OUT = "give a file that --recycle-file wrote with this target, or a new name"


class Entries(NamedTuple):
    """Tokens and their successors.

    Attributes:
        tokens: [R] int64, ascending.
        successors: [R, k] int32.
        logprobs: [R, k] float32, descending; -inf where there is none.
    """

    tokens: Tensor
    successors: Tensor
    logprobs: Tensor

    def fit(self, vocab: int) -> bool:
        """They can be of a vocabulary of this size."""
        kinds = (self.tokens.dtype, self.successors.dtype, self.logprobs.dtype)
        count, width = len(self.tokens), self.successors.shape[-1]
        if kinds != (torch.int64, torch.int32, torch.float32) or not width:
            return False
        if self.tokens.dim() != 1 or not self.successors.shape == self.logprobs.shape == (count, width):
            return False
        ids = torch.cat([self.tokens, self.successors.flatten().long()])
        ranked = bool((self.logprobs <= 1e-3).all()) and bool((self.logprobs[:, 1:] <= self.logprobs[:, :-1]).all())
        return ranked and bool(((ids >= 0) & (ids < vocab)).all())


def vocabulary_of(target: LanguageModel) -> str:
    """What tells vocabularies apart: a digest of all tokens, or their number where there is no tokenizer."""
    tokenizer = getattr(target, "tokenizer", None)
    if tokenizer is None:
        return f"{target.capabilities.vocab_size} tokens"
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def write_entries(path: Path, entries: Entries, vocabulary: str) -> None:
    """Write the file, whole or not at all.

    Raises:
        RunError: it cannot be written.
    """
    about = {"format": FORMAT, "version": VERSION, "vocabulary": vocabulary}
    write_whole(path, save({name: x.contiguous() for name, x in entries._asdict().items()}, metadata=about))


def read_entries(path: Path, vocab: int, vocabulary: str) -> Entries | None:
    """What the file has; None where there is no file but could be one.

    Raises:
        ConfigError: it cannot be read, is no such file, or is of another vocabulary; or its folder is not there.
    """
    if not path.exists() and path.parent.is_dir():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT or about.get("version") != VERSION:
                raise ConfigError(f"{path} is no file of recycled successors of version {VERSION}: {_WAY_OUT}")
            if about.get("vocabulary") != vocabulary:
                raise ConfigError(f"recycle file {path} is of a model with another vocabulary: {_WAY_OUT}")
            entries = Entries(*(file.get_tensor(name) for name in Entries._fields))
    except OSError as error:
        raise ConfigError(f"cannot read recycle file {path}: {error.strerror or error}: {_WAY_OUT}") from None
    except SafetensorError as error:
        raise ConfigError(f"recycle file {path} is corrupt ({error}): {_WAY_OUT}") from None
    if not entries.fit(vocab):
        raise ConfigError(f"recycle file {path} is corrupt (its numbers make no table): {_WAY_OUT}")
    return entries

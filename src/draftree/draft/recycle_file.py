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

from ..artifacts import write_whole
from ..errors import ConfigError
from ..models.base import LanguageModel

FORMAT = "draftree recycled successors"
VERSION = "1"
_WAY_OUT = "give a file that --recycle-file wrote with this target, or a new name"


class Entries(NamedTuple):
    """Contexts and their successors.

    Attributes:
        contexts: [R, 2] int64, the token before the last, -1 for whatever, and the last token.
        successors: [R, k] int32.
        probabilities: [R, k] float32, descending; 0 where there is none.
    """

    contexts: Tensor
    successors: Tensor
    probabilities: Tensor

    def fit(self, vocab: int) -> bool:
        """They can be of a vocabulary of this size."""
        kinds = (self.contexts.dtype, self.successors.dtype, self.probabilities.dtype)
        if kinds != (torch.int64, torch.int32, torch.float32) or self.contexts.dim() != 2:
            return False
        count, width = self.successors.shape if self.successors.dim() == 2 else (-1, 0)
        if not width or self.contexts.shape != (count, 2) or self.probabilities.shape != (count, width):
            return False
        before, last = self.contexts.T
        ids = torch.cat([before + (before == -1).long(), last, self.successors.flatten().long()])
        inside = bool(((self.probabilities >= 0) & (self.probabilities <= 1.001)).all())
        ranked = inside and bool((self.probabilities[:, 1:] <= self.probabilities[:, :-1]).all())
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

"""What folders of published heads have in common: a ``config.json``, weights, and what can be wrong with them.

Weights are safetensors, or pickles of nothing but tensors.
"""

from __future__ import annotations

import json
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...artifacts import first_error
from ...errors import ConfigError, DraftreeError, DraftreeWarning, ModelFileError, first_line
from ..abilities import DraftHead, FeatureModel, MarginalHead
from ..base import LanguageModel
from .eagle_network import HeadWeights

CONFIG = "config.json"
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""What readers of damaged files raise."""
_NAMED = 3
"""Tensors that a message names."""

T = TypeVar("T")


@dataclass(frozen=True)
class HeadFolder(ABC):
    """A published head in a folder.

    Attributes:
        folder: where it lies.
        document: its ``config.json``.
    """

    folder: Path
    document: Mapping[str, Any]

    @property
    @abstractmethod
    def target(self) -> str | None:
        """The model that it was made for, if its config names one."""

    @abstractmethod
    def load(self, target: LanguageModel) -> DraftHead | MarginalHead:
        """The head, for a target.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it was made for another target.
            UnsupportedModelError: the target's hidden states cannot be read.
        """

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What it is, in words, by what is said of it; it is read whole.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
        """

    @property
    def made_for(self) -> str:
        """The target, in words."""
        return self.target or "its target"

    def parsed(self, kind: type[T], fields: Mapping[str, Any]) -> T:
        """Fields of its config as a dataclass; those that are null are left out.

        Raises:
            ModelFileError: some are missing or wrong.
        """
        known = {key: value for key, value in fields.items() if value is not None}
        try:
            return TypeAdapter(kind).validate_json(json.dumps(known), strict=True)
        except ValidationError as error:
            raise self.unreadable(f"its {CONFIG} is wrong: {first_error(error)}") from None
        except ConfigError as error:
            raise self.unreadable(f"its {CONFIG} is wrong: {error}") from None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is raised in here by damaged files comes as a ``ModelFileError``."""
        try:
            yield
        except DraftreeError:
            raise
        except pickle.UnpicklingError:
            raise self.unreadable("a pickle of it holds more than tensors, which may be code: it is not run") from None
        except UNREADABLE as error:
            raise self.unreadable(first_line(error)) from None

    def unreadable(self, why: str) -> ModelFileError:
        """What is raised where it cannot be read."""
        return ModelFileError(f"cannot read the draft head {self.folder}: {why}: copy it again, whole")

    def check_weights(self, weights: HeadWeights) -> None:
        """Check what a network has taken of its tensors; those that it has not are warned of.

        Raises:
            ModelFileError: some are missing, or of other shapes.
        """
        if weights.missing:
            raise self.unreadable(f"it lacks {_list(weights.missing)}")
        if weights.wrong:
            raise self.unreadable(weights.wrong[0])
        if weights.left:
            message = f"draft head {self.folder} has {_list(sorted(weights.left))} more than its kind uses"
            warnings.warn(message, DraftreeWarning, stacklevel=4)

    def check_sizes(self, given: FeatureModel, hidden_size: int, vocab_size: int) -> None:
        """Compare its target's hidden size and vocabulary with a target's.

        Raises:
            ConfigError: they differ.
        """
        can = given.capabilities
        own, its = (hidden_size, vocab_size), (given.hidden_size, can.vocab_size)
        if own != its:
            raise ConfigError(
                f"draft head {self.folder} was made for {self.target or 'a model'} of hidden size {own[0]} and "
                f"{own[1]} tokens, and {can.name} has hidden size {its[0]} and {its[1]} tokens: use the target that it "
                "was made for, or drafter 'auto'"
            )

    def check_layers(self, layers: Sequence[int], among: int) -> None:
        """Check that a target of ``among`` layers has these hidden states (``FeatureSpec``).

        Raises:
            ConfigError: it has not.
        """
        if not all(0 <= layer <= among for layer in layers):
            raise ConfigError(
                f"draft head {self.folder} reads the hidden states {list(layers)} of {self.made_for}, and the target "
                f"has {among} layers: use the target that it was made for"
            )


def part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table inside a document; empty where there is none."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in a folder; only those of a pickle are read to know them."""
    safe, pickled = _files(folder)
    if not safe:
        return set(read_tensors(folder, safe, pickled))
    found = set[str]()
    for path in safe:
        with safe_open(path, framework="pt") as file:
            found.update(file.keys())
    return found


def read_tensors(folder: Path, safe: Sequence[Path] = (), pickled: Sequence[Path] = ()) -> dict[str, Tensor]:
    """Tensors of the files that are given, or of all of a folder's; of pickles only where there are no safetensors.

    Raises:
        ValueError: there are none, or a pickle holds other things, or a number is not finite.
        Exception: as ``UNREADABLE``.
    """
    if not safe and not pickled:
        safe, pickled = _files(folder)
    if not safe and not pickled:
        raise ValueError("it has no weights (*.safetensors or pytorch_model.bin)")
    found: dict[str, Tensor] = {}
    for path in safe or pickled:
        if safe:
            found |= load_file(path)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of pickles, which end as errors or do not
            read = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(read, dict) or not all(isinstance(tensor, Tensor) for tensor in read.values()):
            raise ValueError(f"{path.name} is not a table of tensors")
        found |= read
    return found


def renamed(tensors: Mapping[str, Tensor], name: Callable[[str], str]) -> dict[str, Tensor]:
    """Finite tensors by other names.

    Raises:
        ValueError: a number of one is not finite.
    """
    found = {name(old): tensor for old, tensor in tensors.items()}
    for new, tensor in found.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"its {new} is not all finite numbers")
    return found


def checked_ids(ids: Tensor, what: str, vocab_size: int) -> Tensor:
    """[D] int64 the target's ids of a vocabulary that ``what`` gives.

    Raises:
        ValueError: there are none, some are beyond the target's, or one is there twice.
    """
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"{what} leads to token {int(ids.max()) if len(ids) else 0}, beyond {vocab_size} tokens")
    if len(ids.unique()) != len(ids):
        raise ValueError(f"{what} leads to a token twice")
    return ids


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Its files of safetensors, and of pickles."""
    pickled = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.bin"))
    return sorted(folder.glob("*.safetensors")), pickled


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:_NAMED])}{more})"

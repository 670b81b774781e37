"""Draft heads in folders: ``config.json`` (sizes, the target's name) and ``head.safetensors`` (weights, the draft
vocabulary, and a sample of the target's embeddings that tells it from other models)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ...artifacts import JsonFormat, make_folder, read_bytes, write_whole
from ...errors import ConfigError, ModelFileError, UnknownNameError, UnsupportedModelError, first_line
from ..abilities import FeatureModel, feature_model
from ..base import LanguageModel
from .eagle_head import HeadConfig, HeadNetwork
from .eagle_model import HeadModel

FORMAT, VERSION = "draftree-head", 1
CONFIG, WEIGHTS = "config.json", "head.safetensors"
SHIPPED = Path(__file__).parents[2] / "heads"
"""Folder of the heads that come with the package."""

_SAMPLED = (64, 32)
"""Rows and columns of the embeddings that are kept to know the target by."""
_SAME = 0.9
"""Correlation of two samples of one model: quantised and fine-tuned copies pass, other models have about 0."""


@dataclass(frozen=True, slots=True)
class HeadDocument:
    """What ``config.json`` holds: the target's name, and the sizes."""

    target: str
    config: HeadConfig


_FORMAT = JsonFormat(FORMAT, VERSION, "config of a draft head", "train another", content=HeadDocument, flat=True)


def is_head(folder: Path) -> bool:
    """Whether there is a head in this folder, whole or not."""
    try:
        return bool(json.loads(read_bytes(folder / CONFIG))["format"] == FORMAT)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return (folder / WEIGHTS).is_file()


def sample(target: FeatureModel) -> Tensor:
    """[64, 32] float32, or less of a smaller model: evenly spaced rows of the embeddings."""
    can = target.capabilities
    ids = torch.linspace(0, can.vocab_size - 1, min(_SAMPLED[0], can.vocab_size), device=can.device).long()
    return target.embeddings(ids)[:, : _SAMPLED[1]].float().cpu().contiguous()


def save_head(folder: Path, network: HeadNetwork, vocabulary: Tensor, target: FeatureModel) -> None:
    """Write a head in half precision; the config comes last, and without it there is no head.

    Raises:
        RunError: it cannot be written.
    """
    tensors = {name: value.detach().cpu().half().contiguous() for name, value in network.state_dict().items()}
    tensors |= {"vocabulary": vocabulary.cpu().int(), "target_sample": sample(target)}
    make_folder(folder)
    write_whole(folder / WEIGHTS, save(tensors))
    _FORMAT.write(folder / CONFIG, HeadDocument(target.capabilities.name, network.config))


def read_head(folder: Path) -> tuple[str, HeadNetwork, Tensor, Tensor]:
    """The name of the target, the network, the draft vocabulary [D] and the sample of the target.

    Raises:
        UnknownNameError: there is no head.
        ModelFileError: it cannot be read, or is not whole.
    """
    if not (folder / CONFIG).is_file():
        raise UnknownNameError(f"no draft head in {folder}: give a folder that 'draftree train head' wrote")
    with _reading(folder):
        document = _FORMAT.read(folder / CONFIG)
        with torch.device("meta"):  # no random weights, which would take longer than reading these
            network = HeadNetwork(document.config)
        tensors = load_file(folder / WEIGHTS)
        vocabulary, known = tensors.pop("vocabulary"), _numbers(tensors.pop("target_sample"), "target_sample")
        network.load_state_dict({name: _numbers(value, name) for name, value in tensors.items()}, assign=True)
        if vocabulary.dtype not in (torch.int32, torch.int64) or vocabulary.dim() != 1 or not len(vocabulary):
            raise ValueError("its draft vocabulary is not a list of tokens")
        if bool((vocabulary.diff() <= 0).any()) or not 0 <= vocabulary[0] <= vocabulary[-1] < network.config.vocab_size:
            raise ValueError("its draft vocabulary is not an ascending list of the target's tokens")
    return document.target, network, vocabulary.long(), known


def _numbers(weight: Tensor, name: str) -> Tensor:
    """A weight as float32.

    Raises:
        ValueError: it is of whole numbers, or some are not finite.
    """
    if not weight.is_floating_point() or not bool((numbers := weight.float()).isfinite().all()):
        raise ValueError(f"its {name} is not all finite numbers")
    return numbers


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RuntimeError, SafetensorError) as error:
        raise ModelFileError(
            f"cannot read the draft head {folder}: {first_line(error)}: copy it again, or train another"
        ) from None


def describe(folder: Path) -> dict[str, str]:
    """What a head is, in words, by what is said of it.

    Raises:
        UnknownNameError, ModelFileError: there is none that can be read.
    """
    made_for, network, vocabulary, _ = read_head(folder)
    config = network.config
    return {
        "draft head": "draftree's own format",
        "target": f"{made_for}: hidden size {config.hidden_size}, {config.vocab_size} tokens",
        "hidden states": "1 of the target, the final one",
        "network": f"1 layer of {config.hidden_size}, {sum(p.numel() for p in network.parameters()) / 1e6:.1f} million "
        "parameters",
        "drafts": f"{len(vocabulary)} of the target's tokens, and those of the text",
    }


def load_head(folder: Path, target: LanguageModel) -> HeadModel:
    """The head in a folder, for a target.

    Raises:
        UnknownNameError, ModelFileError: there is none that can be read.
        ConfigError: it was trained for another target.
        UnsupportedModelError: the target's hidden states cannot be read.
    """
    made_for, network, vocabulary, known = read_head(folder)
    name, given = target.capabilities.name, feature_model(target)
    way_out = f"train one for it with 'draftree train head --target {name}', or use drafter 'auto'"
    for what, own, size in _sizes(network.config, given):
        if own != size:
            raise ConfigError(
                f"draft head {folder} was trained for {made_for}, {what} {own}, but {name} has {size}: {way_out}"
            )
    if not _same(known, sample(given)):
        raise ConfigError(
            f"draft head {folder} was trained for {made_for}, and {name}'s embeddings are others: {way_out}"
        )
    return HeadModel(network, vocabulary, target, f"head {folder.name}")


def _sizes(config: HeadConfig, given: FeatureModel) -> tuple[tuple[str, int, int], ...]:
    """What must agree: its name, the head's size, and the target's."""
    return (
        ("hidden size", config.hidden_size, given.hidden_size),
        ("vocabulary size", config.vocab_size, given.capabilities.vocab_size),
    )


def _same(known: Tensor, found: Tensor) -> bool:
    """Are these samples of one model?"""
    return found.shape == known.shape and bool(torch.corrcoef(torch.stack([found, known]).flatten(1))[0, 1] >= _SAME)


def shipped_for(target: LanguageModel) -> Path | None:
    """Folder of the head that comes with the package for a target, by whatever name it was loaded; None: there is none.

    Reads no weights but the samples of those heads that have the target's sizes.

    Raises:
        ModelFileError: the package is not whole.
    """
    return next((folder for folder in sorted(SHIPPED.glob("*/")) if fits(folder, target)), None)


def fits(folder: Path, target: LanguageModel) -> bool:
    """Whether a head was trained for this model, or for another form of it; reads no weights but the sample.

    Raises:
        ModelFileError: it cannot be read.
    """
    with _reading(folder):
        config = _FORMAT.read(folder / CONFIG).config
    try:
        given = feature_model(target)
        if any(own != size for _, own, size in _sizes(config, given)):
            return False
        found = sample(given)
    except (AttributeError, NotImplementedError, UnsupportedModelError):  # it has embeddings of its own kind, or none
        return False
    with _reading(folder), safe_open(folder / WEIGHTS, framework="pt") as file:
        known = _numbers(file.get_tensor("target_sample"), "target_sample")
    return _same(known, found)


def shipped_head(target: LanguageModel) -> HeadModel:
    """The head that comes with the package for a target, by whatever name it was loaded.

    Raises:
        UnknownNameError: there is none.
        ModelFileError: the package is not whole.
    """
    if folder := shipped_for(target):
        return load_head(folder, target)
    name = target.capabilities.name
    raise UnknownNameError(
        f"no draft head comes with draftree for {name}: train one with 'draftree train head --target {name}' and give "
        "its folder, or use drafter 'auto'"
    )

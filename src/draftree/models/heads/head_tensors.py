"""Tensors of heads in files: read and named, a head's vocabulary, and the sample of its target's embeddings."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..protocols import FeatureModel
from .eagle_network import EagleConfig

WEIGHTS = "model.safetensors"
SAMPLE = "target_sample"
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
_SAMPLED = (64, 32)
"""Rows and columns of the embeddings that are kept to know the target by."""
_SAME = 0.9
"""Correlation of two samples of one model: quantised and fine-tuned copies pass, other models have about 0."""


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in a folder, by those of speculators; only those of a pickle are read to know them."""
    safe, _ = _files(folder)
    if not safe:
        return set(read_tensors(folder))
    found = set[str]()
    for path in safe:
        with safe_open(path, framework="pt") as file:
            found.update(map(_new_name, file.keys()))
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the names of speculators; pickles are read only where there are no safetensors.

    Raises:
        ValueError: there are none, or a pickle holds other things, or a number is not finite.
        Exception: as ``UNREADABLE``.
    """
    safe, pickled = _files(folder)
    if not safe and not pickled:
        raise ValueError("it has no weights (*.safetensors or pytorch_model.bin)")
    found: dict[str, Tensor] = {}
    for path in safe:
        found |= load_file(path)
    for path in () if safe else pickled:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of pickles, which end as errors or do not
            read = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(read, dict) or not all(isinstance(tensor, Tensor) for tensor in read.values()):
            raise ValueError(f"{path.name} is not a table of tensors")
        found |= read
    found = {_new_name(name): tensor for name, tensor in found.items()}
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"its {name} is not all finite numbers")
    return found


def _new_name(name: str) -> str:
    """The name of a tensor as speculators has it."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return "d2t" if name == "draft_id_to_target_id" else name.replace("fc_norms.", "fc_norm.")


def vocabulary_in(tensors: Mapping[str, Tensor], config: EagleConfig) -> tuple[Tensor, EagleConfig]:
    """[D] int64 the target's ids of the head's tokens, and the config with D.

    Raises:
        ValueError: there are none, some are beyond the target's, or one is there twice.
    """
    distances, marked, size = tensors.get("d2t"), tensors.get("t2d"), config.draft_vocab_size or config.vocab_size
    if distances is None and marked is None:
        if size != config.vocab_size:
            raise ValueError(f"it drafts {size} of {config.vocab_size} tokens and lacks d2t, which are which")
        return torch.arange(config.vocab_size), config
    chosen = None
    if marked is not None:
        if marked.is_floating_point() or tuple(marked.shape) != (config.vocab_size,):
            raise ValueError(f"t2d is {list(marked.shape)}, not a truth value for each of {config.vocab_size} tokens")
        chosen = marked.bool().nonzero()[:, 0]
    if distances is None:
        assert chosen is not None  # noqa: S101 - one of them is there
        ids = chosen
    elif distances.is_floating_point() or distances.dim() != 1:
        raise ValueError(f"d2t is {list(distances.shape)} of {distances.dtype}, not a whole number for each token")
    else:
        ids = torch.arange(len(distances)) + distances.long()
    if config.draft_vocab_size is not None and len(ids) != size:
        raise ValueError(f"it drafts {size} tokens, and d2t or t2d has {len(ids)}")
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ValueError(f"d2t leads to token {int(ids.max()) if len(ids) else 0}, beyond {config.vocab_size} tokens")
    if len(ids.unique()) != len(ids):
        raise ValueError("d2t leads to a token twice")
    if chosen is not None and not torch.equal(ids.sort().values, chosen):
        raise ValueError("d2t and t2d are of different tokens")
    return ids, replace(config, draft_vocab_size=len(ids))


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Its files of safetensors, and of pickles."""
    pickled = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.bin"))
    return sorted(folder.glob("*.safetensors")), pickled


def sample(target: FeatureModel) -> Tensor:
    """[64, 32] float32, or less of a smaller model: evenly spaced rows of the embeddings."""
    can = target.capabilities
    ids = torch.linspace(0, can.vocab_size - 1, min(_SAMPLED[0], can.vocab_size), device=can.device).long()
    return target.embeddings(ids)[:, : _SAMPLED[1]].float().cpu().contiguous()


def is_same(known: Tensor, found: Tensor) -> bool:
    """Are these samples of one model?"""
    return found.shape == known.shape and bool(torch.corrcoef(torch.stack([found, known]).flatten(1))[0, 1] >= _SAME)


def read_sample(folder: Path) -> Tensor | None:
    """The sample of the target that is kept with a head.

    Raises:
        ValueError: it is no table of finite numbers.
        Exception: as ``UNREADABLE``.
    """
    if not (folder / WEIGHTS).exists():
        return None
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        if SAMPLE not in file.keys():  # noqa: SIM118 - it is no dict
            return None
        known: Tensor = file.get_tensor(SAMPLE)
    if not known.is_floating_point() or not bool(known.isfinite().all()):
        raise ValueError(f"its {SAMPLE} is not all finite numbers")
    return known

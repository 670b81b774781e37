"""Tensors of heads in files: read and named, a head's vocabulary, and the sample of its target's embeddings."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from ...artifacts import read_bytes
from ...errors import needs_extra
from ..protocols import FeatureModel
from .head_config import Array, EagleConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SAMPLE = "target_sample"
PACKED = ".q4_1"
"""Ends the name of a matrix that is kept as [rows, bytes] of Q4_1 blocks, 5 bits a weight: draftree's own EAGLE-1 heads
may be so."""
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
_SIGNS = 4096
"""Weights of a tensor whose signs are compared, at least half as many."""
_SAME = 0.9
"""Correlation of two samples of one model: quantised and fine-tuned copies pass, other models have about 0."""


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in a folder, by those of speculators; only those of a pickle are read to know them."""
    safe, _ = _files(folder)
    if not safe:
        return set(read_tensors(folder))
    found = set[str]()
    for path in safe:
        with safe_open(path, framework="np") as file:
            found.update(map(_new_name, file.keys()))
    return found


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder, by the names of speculators; pickles are read only where there are no safetensors.

    Raises:
        ValueError: there are none, or a pickle holds other things, or a number is not finite.
        MissingPackageError: there are pickles alone, and torch is missing.
        Exception: as ``UNREADABLE``.
    """
    safe, pickled = _files(folder)
    if not safe and not pickled:
        raise ValueError("it has no weights (*.safetensors or pytorch_model.bin)")
    found: dict[str, Array] = {}
    for path in safe:
        content = read_bytes(path, path.stat().st_size)  # a device without an end has size 0
        for name, stored in deserialize(content):  # type: ignore[no-untyped-call]
            values = _array(stored)
            found[name] = gguf.dequantize(values, gguf.GGMLQuantizationType.Q4_1) if name.endswith(PACKED) else values
    for path in () if safe else pickled:
        found |= _unpickled(path)
    found = {_new_name(name): tensor for name, tensor in found.items()}
    for name, tensor in found.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise ValueError(f"its {name} is not all finite numbers")
    return found


_SIZES = (*(("I", n) for n in (1, 2, 4, 8)), *(("F", n) for n in (2, 4, 8)))
_TYPES = {"BF16": "<u2", "BOOL": "?", "U8": "u1"} | {f"{kind}{8 * n}": f"<{kind.lower()}{n}" for kind, n in _SIZES}
"""Types of safetensors, by NumPy's names; the bits of a BF16 are the upper half of a float32's."""


def _array(stored: Mapping[str, Any]) -> Array:
    """A tensor of a file; float32 where its numbers are bfloat16."""
    if (kind := stored["dtype"]) not in _TYPES:
        raise ValueError(f"it holds numbers of type {kind}")
    found = np.frombuffer(bytearray(stored["data"]), _TYPES[kind]).reshape(stored["shape"])
    return (found.astype(np.uint32) << np.uint32(16)).view(np.float32) if kind == "BF16" else found


def _unpickled(path: Path) -> dict[str, Array]:
    """The tensors of a pickle that holds nothing else."""
    with needs_extra("torch", f"the pickle {path}"):
        import torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of pickles, which end as errors or do not
        read = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(read, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in read.values()):
        raise ValueError(f"{path.name} is not a table of tensors")
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in read.items()}


def _new_name(name: str) -> str:
    """The name of a tensor as speculators has it."""
    name = name.removeprefix("model.").removesuffix(PACKED)
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return "d2t" if name == "draft_id_to_target_id" else name.replace("fc_norms.", "fc_norm.")


def vocabulary_in(tensors: Mapping[str, Array], config: EagleConfig) -> tuple[NDArray[np.int64], EagleConfig]:
    """[D] the target's ids of the head's tokens, and the config with D.

    Raises:
        ValueError: there are none, some are beyond the target's, or one is there twice.
    """
    distances, marked, size = tensors.get("d2t"), tensors.get("t2d"), config.draft_vocab_size or config.vocab_size
    if distances is None and marked is None:
        if size != config.vocab_size:
            raise ValueError(f"it drafts {size} of {config.vocab_size} tokens and lacks d2t, which are which")
        return np.arange(config.vocab_size), config
    chosen = None
    if marked is not None:
        if marked.dtype.kind == "f" or marked.shape != (config.vocab_size,):
            raise ValueError(f"t2d is {list(marked.shape)}, not a truth value for each of {config.vocab_size} tokens")
        chosen = np.flatnonzero(marked)
    if distances is None:
        assert chosen is not None  # noqa: S101 - one of them is there
        ids = chosen
    elif distances.dtype.kind == "f" or distances.ndim != 1:
        raise ValueError(f"d2t is {list(distances.shape)} of {distances.dtype}, not a whole number for each token")
    else:
        ids = np.arange(len(distances)) + distances.astype(np.int64)
    if config.draft_vocab_size is not None and len(ids) != size:
        raise ValueError(f"it drafts {size} tokens, and d2t or t2d has {len(ids)}")
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ValueError(f"d2t leads to token {int(ids.max()) if len(ids) else 0}, beyond {config.vocab_size} tokens")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("d2t leads to a token twice")
    if chosen is not None and not np.array_equal(np.sort(ids), chosen):
        raise ValueError("d2t and t2d are of different tokens")
    return ids, replace(config, draft_vocab_size=len(ids))


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Its files of safetensors, and of pickles."""
    pickled = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.bin"))
    return sorted(folder.glob("*.safetensors")), pickled


def sample(target: FeatureModel) -> NDArray[np.float32]:
    """[64, 32] float32, or less of a smaller model: evenly spaced rows of the embeddings."""
    vocab = target.capabilities.vocab_size
    rows = target.embedding_rows(_spaced(vocab, min(_SAMPLED[0], vocab)))
    return np.ascontiguousarray(rows[:, : _SAMPLED[1]])


def _spaced(vocab: int, count: int) -> NDArray[np.int64]:
    """[count] ids from the first to the last: in float32 from both ends, as heads that were trained have them."""
    step = np.float32(vocab - 1) / np.float32(max(1, count - 1))
    from_first = np.arange(count, dtype=np.float32) * step
    from_last = np.float32(vocab - 1) - from_first[::-1]
    return np.where(np.arange(count) < count // 2, from_first, from_last).astype(np.int64)


def is_same(known: Array, found: Array) -> bool:
    """Are these samples of one model?"""
    return found.shape == known.shape and bool(np.corrcoef(found.ravel(), known.ravel())[0, 1] >= _SAME)


def read_sample(folder: Path) -> Array | None:
    """The sample of the target that is kept with a head.

    Raises:
        ValueError: it is no table of finite numbers.
        Exception: as ``UNREADABLE``.
    """
    if not (folder / WEIGHTS).exists():
        return None
    with safe_open(folder / WEIGHTS, framework="np") as file:
        if SAMPLE not in file.keys():  # noqa: SIM118 - it is no dict
            return None
        known: Array = file.get_tensor(SAMPLE)
    if known.dtype.kind != "f" or not np.isfinite(known).all():
        raise ValueError(f"its {SAMPLE} is not all finite numbers")
    return known


def fingerprint_of(weights: Iterable[Array]) -> str:
    """16 hexadecimal digits of the weights of a head, the same as of its network (``huggingface.inspection``)."""
    digest, signs = hashlib.sha256(), []
    for weight in weights:
        digest.update(f"{weight.shape}".encode())
        flat = weight.reshape(-1)
        signs.append(np.signbit(flat[:: -(-flat.size // _SIGNS) or 1]))
    if signs:
        digest.update(np.packbits(np.concatenate(signs)).tobytes())
    return digest.hexdigest()[:16]

"""Weights and contexts of llama.cpp as objects that free themselves, and passes by numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from ...errors import CacheError, DraftreeError, ModelFileError, RunError, UnsupportedModelError
from ..gguf.gguf_checks import check
from ..gguf.gguf_file import AGAIN, GGUFHeader
from .library import BF16, F16, Q8_0, BatchStruct, Library

IDS = 256
"""Sequence ids of a context: as many as llama.cpp allows."""
TOKENS = 512
"""Most tokens that llama.cpp computes at once; a longer pass takes turns."""
_NO_CELL = 1
"""What ``llama_decode`` returns where there is no room."""
_BLOCK = 32
"""Values of a block of Q8_0."""


class Weights:
    """A model that is loaded.

    Attributes:
        header: of the file.
        pointer: llama.cpp's.
        vocab: pointer to its vocabulary.
        vocab_size: V.
        types: ggml's numbers of those of keys and of values.

    Raises:
        ModelFileError: the file cannot be loaded.
        UnsupportedModelError: it holds no model that can be given draft trees.
    """

    def __init__(self, library: Library, path: Path) -> None:
        self.library, self.header = library, check(path)
        library.complaint()
        self.pointer = library.model_load_from_file(str(path).encode(), library.model_default_params())
        if not self.pointer:
            raise unloadable(library, path)
        finalize(self, library.model_free, self.pointer)
        refuse(library, self.pointer, self.header)
        self.vocab = library.model_get_vocab(self.pointer)
        self.vocab_size: int = library.vocab_n_tokens(self.vocab)
        self.types = self._types()

    def _types(self) -> tuple[int, int]:
        """Types of keys and of values.

        Where they are float16 both, llama.cpp's attention on a CPU splits its sums over threads from 512 cells on if
        one token is decoded, and takes tiles of 64 if many are: a tree would be rounded otherwise than AR decoding.
        With types that differ each token is computed by itself. Keys in Q8_0 are as exact here as float16 and faster
        than bfloat16 values, which heads of another width get.
        """
        if self.library.supports_gpu_offload():
            return F16, F16
        return (Q8_0, F16) if self.header.widths[0] % _BLOCK == 0 else (F16, BF16)


@dataclass(slots=True, frozen=True)
class Tokens:
    """Tokens of one pass.

    Attributes:
        ids: [n] token ids.
        positions: [n].
        sequences: of each token, the sequence ids that it belongs to; it attends to the cells of the first.
        wanted: [n] whether its logits are wanted.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[Sequence[int]] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)


class Context:
    """A context of llama.cpp: cells of keys and values, and passes.

    Attributes:
        cells: how many there are.

    Raises:
        RunError: there is not the memory for it.
    """

    def __init__(self, weights: Weights, cells: int, threads: int) -> None:
        library = weights.library
        params = library.context_default_params()
        params.n_ctx = params.n_batch = cells
        params.n_ubatch = min(TOKENS, cells)
        params.n_seq_max, params.kv_unified = IDS, True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.type_k, params.type_v = weights.types
        library.complaint()
        self._pointer = library.init_from_model(weights.pointer, params)
        if not self._pointer:
            raise RunError(
                f"llama.cpp cannot make a context of {cells} tokens: {library.complaint()}: use a shorter one"
            )
        finalize(self, library.free, self._pointer)
        self._weights = weights
        self.cells: int = library.n_ctx(self._pointer)
        self._memory = library.get_memory(self._pointer)
        self._ids, self._positions, self._counts = (np.zeros(self.cells, np.int32) for _ in range(3))
        self._sequences, self._wanted = np.zeros(self.cells, np.uint64), np.zeros(self.cells, np.int8)
        self._batch = BatchStruct(
            token=self._ids.ctypes.data,
            pos=self._positions.ctypes.data,
            n_seq_id=self._counts.ctypes.data,
            seq_id=self._sequences.ctypes.data,
            logits=self._wanted.ctypes.data,
        )

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let the cells of ``source`` at positions from start to end, -1 for all, belong to ``target`` too."""
        self._weights.library.memory_seq_cp(self._memory, source, target, start, end)

    def drop(self, sequence: int, start: int) -> None:
        """Let the cells of a sequence at positions from start on belong to it no more; nobody's are free."""
        self._weights.library.memory_seq_rm(self._memory, sequence, start, -1)

    def clear(self) -> None:
        """Free all cells."""
        self._weights.library.memory_clear(self._memory, False)

    def decode(self, tokens: Tokens) -> NDArray[np.float32] | None:
        """A pass.

        Returns:
            [w, V] logits of the tokens that are wanted; None: there are not so many free cells, and nothing has
            changed.

        Raises:
            CacheError: llama.cpp does not take the tokens.
        """
        library, n, found = self._weights.library, len(tokens.ids), sum(tokens.wanted)
        counts = list(map(len, tokens.sequences))
        flat = np.array([own for each in tokens.sequences for own in each], np.int32)
        self._ids[:n], self._positions[:n], self._counts[:n] = tokens.ids, tokens.positions, counts
        self._sequences[:n] = list(accumulate(counts[:-1], lambda at, count: at + 4 * count, initial=flat.ctypes.data))
        self._wanted[:n] = tokens.wanted
        self._batch.n_tokens = n
        result = library.decode(self._pointer, self._batch)
        if result == _NO_CELL:
            return None
        if result:
            raise CacheError(f"llama.cpp fails with {result} in a pass of {n} tokens: {library.complaint()}")
        logits = np.empty((found, self._weights.vocab_size), np.float32)
        if found:
            ctypes.memmove(logits.ctypes.data, library.get_logits(self._pointer), logits.nbytes)
        return logits

    def state(self) -> NDArray[np.uint8]:
        """Keys and values of all cells that belong to a sequence."""
        library = self._weights.library
        data = np.empty(library.state_get_size(self._pointer), np.uint8)
        written = library.state_get_data(self._pointer, data.ctypes.data, len(data))
        return data[:written]

    def restore(self, state: NDArray[np.uint8]) -> None:
        """Put them into the first cells, side by side in the same order; all others are free."""
        self.clear()
        if not self._weights.library.state_set_data(self._pointer, state.ctypes.data, len(state)):
            raise CacheError(f"llama.cpp cannot restore its cache: {self._weights.library.complaint()}")


def unloadable(library: Library, path: Path) -> DraftreeError:
    """The error of a model that llama.cpp has just failed to load, with the reason out of its complaints."""
    why = "error loading model: "
    reasons = [line.split(why)[-1] for line in library.complaints if why in line]
    reason = reasons[-1] if reasons else "it gives no reason"
    if not reasons or "failed to load model" in reason:  # the reason came first
        reason = next(iter(library.complaints), reason)
    library.complaints = []
    if "unknown model architecture" in reason:
        return UnsupportedModelError(f"{path}: {reason} to {library.name}: {_OTHER_BACKEND}")
    return ModelFileError(f"llama.cpp cannot load {path}: {reason}: {AGAIN}, or use backend 'transformers'")


_OTHER_BACKEND = "use backend 'transformers', if transformers knows it"


def refuse(library: Library, model: int, header: GGUFHeader) -> None:
    """Reject a loaded model whose cache cannot hold trees.

    Args:
        model: the pointer to it.

    Raises:
        UnsupportedModelError: it cannot be given draft trees.
    """
    own = "use llama.cpp itself for it"
    why = None
    if library.model_has_encoder(model):
        why = "it is an encoder-decoder model: load a decoder-only one"
    elif (
        not library.model_has_decoder(model) or header.metadata.get(f"{header.architecture}.attention.causal") is False
    ):
        why = "it is an encoder, which generates no text: load a decoder-only one"
    elif library.model_is_hybrid(model) or library.model_is_recurrent(model):
        why = f"it keeps a recurrent state that cannot branch: {own}"
    elif window := library.model_n_swa(model):
        why = f"its cache forgets what lies beyond a window of {window} tokens: use backend 'transformers', or {own}"
    if why:
        raise UnsupportedModelError(f"{header.path} ({header.architecture}) cannot verify draft trees: {why}")

"""A context of llama.cpp: cells of keys and values, states of sequences, and passes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from ...errors import CacheError, CacheFullError, RunError
from .library import BatchStruct, Weights

IDS = 256
"""Sequence ids of a context: as many as llama.cpp allows."""
GRAIN = 256
"""Cells of a context are a multiple of this."""
TOKENS = 512
"""Most tokens that llama.cpp computes at once; a longer pass takes turns."""
_NO_CELL = 1
"""What ``llama_decode`` returns where there is no room."""


def grains(cells: int) -> int:
    """The least cells of a context for so many."""
    return max(1, -(-cells // GRAIN)) * GRAIN


class Token(NamedTuple):
    """A token of a pass.

    Attributes:
        sequences: ids that it belongs to; it attends to the cells of the first.
        wanted: whether its logits are wanted.
    """

    id: int
    position: int
    sequences: Sequence[int]
    wanted: bool


class Context:
    """A context of llama.cpp: cells of keys and values, states of sequences, and passes.

    Layers with a window keep all their cells too (``swa_full``): a row that goes back needs what a window has passed.

    Attributes:
        cells: how many there are.
        sequences: how many it knows; a recurrent model takes the memory of a state for each.

    Raises:
        RunError: there is not the memory for it.
    """

    def __init__(self, weights: Weights, cells: int, threads: int, sequences: int = IDS) -> None:
        self._weights, self._threads = weights, threads
        self._make(cells, sequences)

    def _make(self, cells: int, sequences: int) -> None:
        weights, library, cells = self._weights, self._weights.library, grains(cells)
        params = library.context_default_params()
        params.n_ctx = params.n_batch = cells
        params.n_ubatch = min(TOKENS, cells)
        params.n_seq_max, params.kv_unified, params.swa_full = sequences, True, True
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = 1
        params.type_k, params.type_v = weights.types
        library.listen()
        pointer = library.init_from_model(weights.pointer, params)
        if not pointer:
            raise RunError(
                f"llama.cpp cannot make a context of {cells} tokens: {library.complaint()}: use a shorter one"
            )
        self._pointer, self._free, self.sequences = pointer, finalize(self, library.free, pointer), sequences
        self.cells: int = library.n_ctx(pointer)
        self._memory = library.get_memory(pointer)
        self._ids, self._positions, self._counts = (np.zeros(self.cells, np.int32) for _ in range(3))
        self._sequences, self._wanted = np.zeros(self.cells, np.uint64), np.zeros(self.cells, np.int8)
        self._batch = BatchStruct(
            token=self._ids.ctypes.data,
            pos=self._positions.ctypes.data,
            n_seq_id=self._counts.ctypes.data,
            seq_id=self._sequences.ctypes.data,
            logits=self._wanted.ctypes.data,
        )

    def resize(self, cells: int, sequences: int = IDS) -> None:
        """Move all that belongs to a sequence to the first cells of a context of another size.

        Raises:
            CacheFullError: there is not the memory for it; the size is what it was.
        """
        state, former = self.state(), (self.cells, self.sequences)
        failure: RunError | None = None
        self._free()  # before the other one takes its memory
        del self._pointer, self._memory
        try:
            self._make(cells, sequences)
        except RunError as error:
            failure = error
            self._make(*former)
        self.restore(state)
        if failure:
            raise CacheFullError(str(failure)) from failure

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let the cells of ``source`` at positions from start to end, -1 for all, belong to ``target`` too."""
        self._weights.library.memory_seq_cp(self._memory, source, target, start, end)

    def drop(self, sequence: int, start: int) -> None:
        """Let the cells of a sequence at positions from start on belong to it no more; nobody's are free."""
        self._weights.library.memory_seq_rm(self._memory, sequence, start, -1)

    def clear(self) -> None:
        self._weights.library.memory_clear(self._memory, False)

    def decode(self, tokens: Sequence[Token]) -> NDArray[np.float32] | None:
        """A pass.

        Returns:
            [w, V] logits of the tokens that are wanted; None: there are not so many free cells, and nothing has
            changed.

        Raises:
            CacheError: llama.cpp does not take the tokens.
        """
        library, n = self._weights.library, len(tokens)
        self._ids[:n], self._positions[:n], sequences, self._wanted[:n] = zip(*tokens, strict=True)
        flat, counts = np.array([id_ for ids in sequences for id_ in ids], np.int32), [*map(len, sequences)]
        self._counts[:n] = counts
        self._sequences[:n] = list(accumulate(counts[:-1], lambda at, count: at + 4 * count, initial=flat.ctypes.data))
        self._batch.n_tokens = n
        result = library.decode(self._pointer, self._batch)
        if result == _NO_CELL:
            return None
        if result:
            raise CacheError(f"llama.cpp fails with {result} in a pass of {n} tokens: {library.complaint()}")
        logits = np.empty((self._wanted[:n].sum(), self._weights.vocab_size), np.float32)
        if len(logits):
            ctypes.memmove(logits.ctypes.data, library.get_logits(self._pointer), logits.nbytes)
        return logits

    def size_of(self, sequence: int) -> int:
        """Bytes of the keys, the values and the state of a sequence."""
        return int(self._weights.library.state_seq_get_size(self._pointer, sequence))

    def state(self) -> NDArray[np.uint8]:
        """Keys and values of all cells that belong to a sequence, and states of sequences."""
        library = self._weights.library
        data = np.empty(library.state_get_size(self._pointer), np.uint8)
        written = library.state_get_data(self._pointer, data.ctypes.data, len(data))
        return data[:written]

    def restore(self, state: NDArray[np.uint8]) -> None:
        """Put them into the first cells, side by side in the same order; all others are free."""
        self.clear()
        if not self._weights.library.state_set_data(self._pointer, state.ctypes.data, len(state)):
            raise CacheError(f"llama.cpp cannot restore its cache: {self._weights.library.complaint()}")

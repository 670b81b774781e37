"""What llama.cpp computes by the draft layer of a file: an independent reference of the order of its operations."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from ctypes import c_bool, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.models.llama.library import BatchStruct, open_library

_CONTEXT, _OF_DRAFT_LAYER = 256, 1
"""Tokens of a context, and its type (``LLAMA_CONTEXT_TYPE_MTP``)."""
_SET, _GET = "_Z26llama_set_embeddings_nextnP13llama_contextbb", "_Z26llama_get_embeddings_nextnP13llama_context"
"""C++ functions that let a context keep hidden states, and return them; the version of xllamacpp is pinned."""


class LlamaDraftLayer:
    """A model, and a context for each of: itself, and its draft layer."""

    def __init__(self, path: Path, vocabulary: int, hidden: int) -> None:
        self._library, self._sizes = open_library(), (vocabulary, hidden)
        spec = importlib.util.find_spec("xllamacpp")
        assert spec is not None and spec.origin is not None
        library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
        self._keep, self._kept = library[_SET], library[_GET]
        self._keep.argtypes, self._kept.argtypes, self._kept.restype = [c_void_p, c_bool, c_bool], [c_void_p], c_void_p
        params = self._library.model_default_params()
        params._flags[4] = True  # load_mtp
        self._model = self._library.model_load_from_file(os.fsencode(path), params)
        self._contexts = [self._context(kind) for kind in (0, _OF_DRAFT_LAYER)]

    def _context(self, kind: int) -> Any:
        params = self._library.context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _CONTEXT
        params.n_seq_max = params.n_threads = params.n_threads_batch = 1
        params._kinds[0], params.type_k, params.type_v, params.flash_attn_type = kind, 0, 0, 0
        context = self._library.init_from_model(self._model, params)
        assert context, self._library.complaint()
        self._keep(context, True, False)
        return context

    def close(self) -> None:
        for context in self._contexts:
            self._library.free(context)
        self._library.model_free(self._model)

    def _decode(self, context: Any, tokens: Sequence[int], first: int, states: Any = None) -> list[NDArray[np.float32]]:
        """[n, V] logits and [n, H] states after tokens at positions from ``first`` on; ``states``: before them."""
        n = len(tokens)
        positions, sequence = np.arange(first, first + n, dtype=np.int32), np.zeros(1, np.int32)
        sequences, wanted = np.full(n, sequence.ctypes.data, np.uint64), np.ones(n, np.int8)
        columns: list[NDArray[Any]] = [np.array(tokens, np.int32), positions, np.ones(n, np.int32), sequences, wanted]
        places = [each.ctypes.data for each in columns]
        batch = BatchStruct(n, places[0], None if states is None else states.ctypes.data, *places[1:])
        assert self._library.decode(context, batch) == 0, self._library.complaint()
        found = [np.empty((n, size), np.float32) for size in self._sizes]
        for values, place in zip(found, (self._library.get_logits(context), self._kept(context)), strict=True):
            ctypes.memmove(values.ctypes.data, place, values.nbytes)
        return found

    def logits(self, text: Sequence[int], further: Sequence[int]) -> NDArray[np.float32]:
        """[1 + m, V] the draft layer's after a text, and after each of m further tokens that are drafted."""
        target, layer = self._contexts
        _, states = self._decode(target, text, 0)
        after, states = self._decode(layer, text[1:], 1, states[:-1])
        found = [after[-1]]
        for number, token in enumerate(further):
            after, states = self._decode(layer, [token], len(text) + number, states[-1:].copy())
            found.append(after[-1])
        return np.stack(found)

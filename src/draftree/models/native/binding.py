"""The C interface of the native engine (``native/draftree.h``) by ctypes: found, checked, and errors as exceptions.

One call of C is one call here; arrays that go in and out are NumPy's. Nothing here knows of rows beyond their numbers.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import astuple, fields
from functools import cache, partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...artifacts import check_regular
from ...errors import CacheError, ConfigError, DraftreeError, ModelFileError, NotNativeError, RunError
from ...progress import StoppableProgress
from ..memory import largest_weights, too_large
from .architecture import Description, Hyperparameters

VERSION = "14"
"""``DRAFTREE_VERSION`` of the header that this module was written to."""
_FILES = {"darwin": "libdraftree.dylib", "win32": "draftree.dll"}
LIBRARY = Path(__file__).parent / _FILES.get(sys.platform, "libdraftree.so")

EMBEDDING, OUTPUT = 0, 2
"""Tensors whose rows can be read (``LoadedModel.rows``)."""
_BAD_FILE, _NO_MEMORY, _NO_TIER, _TOO_LARGE = -2, -3, -8, -10
_ERRORS: dict[int, tuple[type[DraftreeError], str]] = {
    _NO_MEMORY: (RunError, "there is not enough memory: use shorter prompts, or fewer requests at a time"),
    -4: (CacheError, "a node lies beyond the longest sequence: draft less deep"),
    -5: (CacheError, "the row is closed, or another model's: open its prompt again"),
    -6: (CacheError, "a parent does not come before its child, or the nodes kept are no path"),
    -7: (CacheError, "a token is not in the vocabulary"),
    -9: (CacheError, "hidden states are missing: load the draft head before the row is opened"),
}
"""Code of ``native/draftree.h`` -> what is raised; others are faults of this module."""


class CArchitecture(Structure):
    """``Architecture``: made of ``astuple`` of hyperparameters."""

    _fields_ = [(each.name, c_float if each.type == "float" else c_int32) for each in fields(Hyperparameters)]


class CEdits(Structure):
    """``Edits``: pointers into arrays."""

    _fields_ = [
        (name, c_void_p) for name in ("mask_of", "masks", "change_starts", "tokens", "positive", "negative", "addend")
    ]

    def set(self, field: str, values: NDArray[Any]) -> None:
        """Point to an array, which is kept as long as this."""
        vars(self)[f"_{field}"] = values
        setattr(self, field, values.ctypes.data)


WARPING = np.dtype([("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4")])
"""``Warping``."""
_Progress = ctypes.CFUNCTYPE(c_int, c_double)
_UNBOUNDED = 2**62

_P, _I, _L = c_void_p, c_int32, c_int64
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tier_name": (c_char_p, [_I]),
    "load": (
        c_int,
        [_P, _P, _I, POINTER(CArchitecture), *[_P] * 5, c_int, c_char_p, _L, _P, POINTER(_L), _P, POINTER(_P)],
    ),
    "free": (None, [_P]),
    "share_threads": (c_int, [_P, _P]),
    "tier": (c_char_p, [_P]),
    "cache_bytes": (_L, [_P]),
    "token_bytes": (_L, [_P]),
    "open": (c_int, [_P, POINTER(_I)]),
    "fork": (c_int, [_P, _I, _I, POINTER(_I)]),
    "close": (c_int, [_P, _I]),
    "extend": (c_int, [_P, _I, *[_P] * 7]),
    "commit": (c_int, [_P, _I, _P, _I]),
    "prune": (c_int, [_P, _I, _P, _I, _I]),
    "track": (c_int, [_P, _P, _I]),
    "load_draft_head": (c_int, [_P, _P, _L, POINTER(CArchitecture), *[_P] * 7, POINTER(_P)]),
    "rows": (c_int, [_P, _I, _P, _I, _P]),
    "learn": (c_int, [_P, _I, _P, _I]),
    "output_count": (_I, [_P, _I]),
    "output_tokens": (c_int, [_P, _I, _P]),
    "cut": (c_int, [_P, _I, _I]),
    "states": (c_int, [_P, _I, _I, _I, _P]),
    "argmax": (c_int, [_P, _I, _P, _P, _P]),
    "top": (c_int, [_P, _I, _P, _I, *[_P] * 6]),
    "log_probabilities": (c_int, [_P, _I, *[_P] * 3]),
    "draw": (c_int, [_P, _I, *[_P] * 5]),
    "logits": (c_int, [_P, _I, _I, _P]),
    "ngram_open": (c_int, [_I, POINTER(_P)]),
    "ngram_close": (None, [_P]),
    "ngram_extend": (c_int, [_P, _P, _I]),
    "ngram_end": (c_int, [_P]),
    "ngram_latest": (None, [_P, _P]),
    "ngram_matches": (None, [_P, _P, _I, _P]),
    "ngram_followed": (None, [_P, _P, _I, _P]),
    "ngram_probabilities": (_I, [_P, _P, _P, _P]),
    "translation_open": (c_int, [POINTER(_P)]),
    "translation_close": (None, [_P]),
    "translation_clear": (None, [_P]),
    "translation_put": (c_int, [_P, _P, _I, _I, _P, _I]),
    "draft_open": (c_int, [POINTER(_P)]),
    "draft_close": (None, [_P]),
    "draft": (c_int, [_P] * 5),
    "accept": (c_int, [_P] * 5),
    "length": (_I, [_P, _I]),
}


@cache
def open_library() -> Any:
    """The native engine's functions.

    Raises:
        NotNativeError: it was not built.
        ConfigError: it is of another version.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NotNativeError(f"the native engine was not built ({error})") from None
    library.draftree_version.restype = c_char_p
    if (found := library.draftree_version().decode()) != VERSION:
        raise ConfigError(f"{LIBRARY} is of version {found}, not {VERSION}: build it again (make setup, pip install)")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"draftree_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def tiers() -> list[str]:
    """The instruction sets that this CPU runs, the portable one first."""
    return [str(name, "ascii") for name in takewhile(bool, map(open_library().draftree_tier_name, count()))]


def error_of(code: int) -> Exception:
    """What an error code of C stands for."""
    kind, message = _ERRORS.get(code, (RuntimeError, f"the native engine returned error {code}"))
    return kind(message)


def check(code: int) -> None:
    """Raise what an error code stands for; 0 is none."""
    if code:
        raise error_of(code)


IntsLike = Sequence[int] | NDArray[np.integer]

PAGE, _PAGE_HEADER = 64, 64  # tokens of a page of the cache, and bytes before them (native/vector.h, native/cache.c)


def packed(numbers: IntsLike) -> bytes:
    """Numbers as C reads them: int32."""
    return np.asarray(numbers, np.int32).tobytes()


def address(numbers: NDArray[Any]) -> int:
    """Where an array's memory begins; ``ndarray.ctypes`` takes several calls to find it."""
    return numbers.__array_interface__["data"][0]  # type: ignore[no-any-return]


class Loaded:
    """A model or a draft head that C has loaded; one thread at a time may call it.

    Attributes:
        vocabulary, hidden_size, context: outputs, H and the most tokens of a row.
        token_bytes, page_bytes: of a new token (keys, values, hidden states), and of a page of ``PAGE`` of them.
        state_bytes, record_bytes: of a state of the recurrent layers, and of a node's record.
        row_bytes: what they take of a row at most, beside records of trees of more than 64 nodes.
        cache_bytes: returns how many the pages of the open rows take now.
        passes: that were begun; scores are those of the last.
    """

    token_bytes: int
    page_bytes: int
    state_bytes: int = 0
    record_bytes: int = 0
    row_bytes: int = 0

    def __init__(self, numbers: Hyperparameters) -> None:
        self._library = open_library()
        self._pointer, self.passes = c_void_p(), 0
        self.cache_bytes: Callable[[], int] = partial(self._library.draftree_cache_bytes, self._pointer)
        self.vocabulary, self.hidden_size, self.context = numbers.vocabulary, numbers.hidden, numbers.context

    def __del__(self) -> None:
        if pointer := getattr(self, "_pointer", None):
            self._library.draftree_free(pointer)

    def _weigh_tokens(self) -> None:
        """Find what new tokens take."""
        self.token_bytes = self._library.draftree_token_bytes(self._pointer)
        self.page_bytes = PAGE * self.token_bytes + _PAGE_HEADER

    def share_threads(self, other: Loaded) -> None:
        """Run on the threads of another model, which has as many, in place of its own."""
        check(self._library.draftree_share_threads(self._pointer, other._pointer))

    @property
    def tier(self) -> str:
        """The instruction set in use."""
        return str(self._library.draftree_tier(self._pointer), "ascii")

    def open(self) -> int:
        """A new row."""
        row = c_int32()
        check(self._library.draftree_open(self._pointer, byref(row)))
        return row.value

    def fork(self, row: int, length: int) -> int:
        """A new row with the first committed tokens of another."""
        fork = c_int32()
        check(self._library.draftree_fork(self._pointer, row, length, byref(fork)))
        return fork.value

    @property
    def address(self) -> int:
        """C's."""
        return self._pointer.value or 0

    def length(self, row: int) -> int:
        """Committed tokens of a row."""
        count: int = self._library.draftree_length(self._pointer, row)
        check(min(count, 0))
        return count

    def close(self, row: int) -> None:
        check(self._library.draftree_close(self._pointer, row))

    def extend(
        self,
        rows: IntsLike,
        counts: IntsLike,
        tokens: IntsLike,
        parents: IntsLike,
        wanted: IntsLike,
        target_rows: IntsLike = (),
        sources: IntsLike = (),
    ) -> None:
        """One pass over new nodes of rows: ``counts`` of each, [N] tokens, parents and whether scores are wanted.

        Args:
            target_rows, sources: of draft heads, for each row and each node (``models.native.head_binding``).
        """
        if not len(rows) == len(counts) or not sum(counts) == len(tokens) == len(parents) == len(wanted):
            raise CacheError(f"{len(tokens)} nodes of {len(rows)} rows: their numbers do not go together")
        self.passes += 1
        if code := self._library.draftree_extend(
            self._pointer,
            len(rows),
            np.asarray(rows, np.int32).tobytes(),
            np.asarray(counts, np.int32).tobytes(),
            np.asarray(tokens, np.int32).tobytes(),
            np.asarray(parents, np.int32).tobytes(),
            np.asarray(wanted, np.uint8).tobytes(),
            packed(target_rows) if len(target_rows) else None,
            packed(sources) if len(target_rows) else None,
        ):
            raise error_of(code)

    def commit(self, row: int, path: IntsLike) -> None:
        """Keep uncommitted nodes, a path from the last committed token down."""
        numbers = np.asarray(path, np.int32).tobytes()
        if code := self._library.draftree_commit(self._pointer, row, numbers, len(path)):
            raise error_of(code)

    def prune(self, row: int, keep: IntsLike, trunk: int) -> None:
        """Keep uncommitted nodes and commit the first ``trunk`` of them."""
        check(self._library.draftree_prune(self._pointer, row, packed(keep), len(keep), trunk))

    def states(self, row: int, first: int, count: int, kept: int) -> NDArray[np.float32]:
        """[count, kept, hidden] states of a row's cells from ``first`` on; ``kept``: how many the row keeps of each."""
        states = np.empty((count, kept, self.hidden_size), np.float32)
        check(self._library.draftree_states(self._pointer, row, first, count, states.ctypes.data))
        return states

    def argmax(self, slots: IntsLike, edits: CEdits | None = None) -> NDArray[np.int32]:
        """[w] the most probable token of each slot."""
        tokens, numbers = np.empty(len(slots), np.int32), np.asarray(slots, np.int32).tobytes()
        changed = None if edits is None else byref(edits)
        if code := self._library.draftree_argmax(self._pointer, len(slots), numbers, changed, address(tokens)):
            raise error_of(code)
        return tokens

    def top(
        self,
        slots: IntsLike,
        count: int,
        edits: CEdits | None = None,
        warpings: NDArray[np.void] | None = None,
        keys: NDArray[np.uint64] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """[w, count] the most probable tokens of each slot, their log-probabilities, and [w] entropies (nats).

        Args:
            warpings, keys: of ``Draft``, as for ``draw``.
        """
        shape = len(slots), count
        tokens, logprobs = np.empty(shape, np.int32), np.empty(shape, np.float32)
        entropies = np.empty(len(slots), np.float32)
        if code := self._library.draftree_top(
            self._pointer,
            len(slots),
            np.asarray(slots, np.int32).tobytes(),
            count,
            None if edits is None else byref(edits),
            None if warpings is None else warpings.tobytes(),
            None if keys is None else keys.tobytes(),
            address(tokens),
            address(logprobs),
            address(entropies),
        ):
            raise error_of(code)
        return tokens, logprobs, entropies

    def log_probabilities(self, slots: IntsLike, tokens: IntsLike) -> NDArray[np.float32]:
        """[w] log-probability (nats) of one token of each slot."""
        logprobs = np.empty(len(slots), np.float32)
        arguments = len(slots), packed(slots), packed(tokens), address(logprobs)
        check(self._library.draftree_log_probabilities(self._pointer, *arguments))
        return logprobs

    def draw(
        self, slots: IntsLike, keys: NDArray[np.uint64], warpings: NDArray[np.void], edits: CEdits | None = None
    ) -> NDArray[np.int32]:
        """[w] a token of each slot by the noise of its key; ``warpings``: [w] of ``WARPING``."""
        tokens, numbers = np.empty(len(slots), np.int32), np.asarray(slots, np.int32).tobytes()
        how = keys.tobytes(), warpings.tobytes(), None if edits is None else byref(edits)
        if code := self._library.draftree_draw(self._pointer, len(slots), numbers, *how, address(tokens)):
            raise error_of(code)
        return tokens

    def logits(self, slot: int, count: int | None = None) -> NDArray[np.float32]:
        """[count] a copy, with -inf past the last; by default, and at least, V."""
        logits = np.empty(count or self.vocabulary, np.float32)
        check(self._library.draftree_logits(self._pointer, slot, len(logits), logits.ctypes.data))
        return logits


class LoadedModel(Loaded):
    """A language model that C has loaded.

    Attributes:
        tracked: layers whose hidden states are kept (``track``).
        output_format: ggml's number of the output layer's type.
        logit_scale: logits are its products times this.
        weight_bytes: memory of the packed weights.

    Args:
        description: of it.
        threads: that share each call's work.
        tier: name of an instruction set; "": the best of this CPU.
        free: bytes of memory that there are.
        progress: called with 0 to 1 while weights are read; it may raise, which ends the load.

    Raises:
        ConfigError: there is no library, or the CPU lacks the instruction set.
        ModelFileError: the file cannot be read, or is damaged.
        RunError: there is not enough memory; where ``free`` shows it, nothing has been read.
    """

    def __init__(
        self,
        description: Description,
        threads: int,
        tier: str = "",
        free: int = _UNBOUNDED,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        super().__init__(description.hyperparameters)
        d = description
        self.output_format = int(d.model_tensors["format"][OUTPUT])
        self.logit_scale = d.hyperparameters.logit_scale
        arrays = (d.rope_frequencies, d.layer_rope, d.layer_window, d.layer_tensors, d.model_tensors)
        message, weight_bytes, stoppable = ctypes.create_string_buffer(256), c_int64(), StoppableProgress(progress)
        callback = _Progress(stoppable.report)
        with ExitStack() as opened:
            files = [opened.enter_context(_opened(path)) for path in d.files]
            code = self._library.draftree_load(
                (c_int64 * len(files))(*map(_descriptor, files)),
                (c_int64 * len(files))(*(os.fstat(file.fileno()).st_size for file in files)),
                len(files),
                byref(CArchitecture(*astuple(d.hyperparameters))),
                *(each.ctypes.data for each in arrays),
                threads,
                tier.encode(),
                largest_weights(free),
                ctypes.cast(callback, c_void_p),
                byref(weight_bytes),
                message,
                byref(self._pointer),
            )
        stoppable.check()
        self.weight_bytes = weight_bytes.value
        if code == _TOO_LARGE:
            raise too_large(d.files[0], self.weight_bytes, free)
        if code == _BAD_FILE:
            why = message.value.decode(errors="replace")
            raise ModelFileError(f"cannot load {d.files[0]}: {why}: download it again")
        if code == _NO_TIER:
            raise ConfigError(f"instruction set {tier!r} is not among this CPU's: choose from {', '.join(tiers())}")
        check(code)
        self.state_bytes, self.record_bytes, self.row_bytes = d.state_bytes, d.record_bytes, d.row_bytes
        self.track(())

    def rows(self, tensor: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n, H] rows of ``EMBEDDING`` or of ``OUTPUT``, as float32."""
        ids, rows = np.array(tokens, np.int32), np.empty((len(tokens), self.hidden_size), np.float32)
        arguments = tensor, ids.ctypes.data, len(ids), rows.ctypes.data
        check(self._library.draftree_rows(self._pointer, *arguments))
        return rows

    def track(self, layers: Sequence[int]) -> None:
        """Let rows that are opened from now on keep hidden states of these layers (``FeatureSpec.layers``).

        The list begins with the one before it.
        """
        check(self._library.draftree_track(self._pointer, packed(layers), len(layers)))
        self.tracked = tuple(layers)
        self._weigh_tokens()


def _opened(path: Path) -> BinaryIO:
    try:
        return check_regular(path).open("rb", buffering=0)
    except OSError as error:
        raise ModelFileError(f"cannot load {path}: {error}: download it again") from None


def _descriptor(file: BinaryIO) -> int:
    """What C reads an open file by."""
    if sys.platform == "win32":
        import msvcrt

        return msvcrt.get_osfhandle(file.fileno())
    return file.fileno()

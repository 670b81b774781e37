"""Drafting in the C interface (``native/draftree.h``) by ctypes: structures that are made once and filled in place.

``Drafting`` is one drafter's: a step fills its rule, parts, requests and sources, and calls ``draft``; when the trees
are verified, ``accept``. Nothing here knows of requests beyond their numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Array,
    Structure,
    addressof,
    byref,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
    string_at,
)
from struct import unpack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...tree import DraftTree
from .binding import address, check, open_library
from .translations import Key

BY_TEXT, BY_MODEL, BY_DRAFT_HEAD, BY_TRANSLATION, BY_CALLER = range(5)
"""What scores the nodes of a part."""
MOST_DEPTH, MOST_WIDTH = 2**31 - 1, 2**13
"""Of trees, and most candidates of a node, by C."""
NGRAM_MATCHES = 16


class CWarping(Structure):
    """``Warping``."""

    _fields_ = [("temperature", c_float), ("top_k", c_int32), ("top_p", c_float), ("min_p", c_float)]


class CPart(Structure):
    """``DraftPart``."""

    _fields_ = [
        ("kind", c_int32),
        ("enabled", c_int32),
        ("model", c_void_p),
        ("translation", c_void_p),
        ("outputs", c_int32),
        ("trust", c_double),
        ("onward", c_double),
        ("layer", c_double),
    ]


class CRequest(Structure):
    """``DraftRequest``."""

    _fields_ = [
        ("nodes", c_int32),
        ("depth", c_int32),
        ("constrained", c_int32),
        ("target_row", c_int32),
        ("position", c_int32),
        ("noise", c_uint64),
        ("warping", CWarping),
    ]


class CSource(Structure):
    """``DraftSource``."""

    _fields_ = [
        ("limit", c_int32),
        ("index", c_void_p),
        ("row", c_int32),
        ("unread_count", c_int32),
        ("unread", c_void_p),
        ("read", c_int32),
        ("left", c_int32),
    ]


class CRule(Structure):
    """``DraftRule``."""

    _fields_ = [
        ("width", c_int32),
        ("depth", c_int32),
        ("sizes", c_int32),
        ("below", c_void_p),
        ("seconds", c_void_p),
        ("rate", c_double),
        ("tokens", c_double),
        ("threshold", c_double),
    ]


class CTree(Structure):
    """``DraftTree``."""

    _fields_ = [("count", c_int32), ("part", c_int32), ("columns", c_void_p)]


class CWork(Structure):
    """``DraftWork``."""

    _fields_ = [("nanoseconds", c_int64), ("passes", c_int32)]


class COutcome(Structure):
    """``DraftOutcome``."""

    _fields_ = [("path_count", c_int32), ("token_count", c_int32), ("path", c_void_p), ("tokens", c_void_p)]


class CTrial(Structure):
    """``DraftTrial``."""

    _fields_ = [("part", c_int32), ("right", c_int32), ("logprob", c_double)]


class CMatches(Structure):
    """``NgramMatches``."""

    _fields_ = [("count", c_int32), ("positions", c_int32 * NGRAM_MATCHES), ("lengths", c_int32 * NGRAM_MATCHES)]


_ScoreNodes = CFUNCTYPE(c_int32, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
_FindStates = CFUNCTYPE(c_int32, c_int32, c_void_p, c_void_p, c_void_p)
_FindTranslations = CFUNCTYPE(c_int32, c_int32, c_int32, c_void_p)
_RAISED = 1
"""What a callback returns to C after an exception."""


class CStep(Structure):
    """``DraftStep``."""

    _fields_ = [
        ("part_count", c_int32),
        ("request_count", c_int32),
        ("coupled", c_int32),
        ("rule", POINTER(CRule)),
        ("parts", c_void_p),
        ("requests", c_void_p),
        ("sources", c_void_p),
        ("score", _ScoreNodes),
        ("find_states", _FindStates),
        ("find_translations", _FindTranslations),
    ]


Node = tuple[int, int, int, int]
"""Request, number, number of the parent, token; ROOT for a root."""
Scored = tuple[Sequence[int], Sequence[float], float]
"""Tokens, log-probabilities, entropy."""
ScoreNodes = Callable[[int, list[Node], int], Sequence[Scored]]
"""(part, nodes, width) -> what may follow each node, at most ``width`` tokens."""
FindStates = Callable[[list[Node]], tuple[Sequence[NDArray[np.uint32] | None], Sequence[int]]]
"""Nodes -> for each the mask of what may follow, and the token that must, -1 if none is known."""
FindTranslations = Callable[[int, Sequence[Key]], None]
"""(part, keys): puts their entries into the part's translation."""


class GrownTree(NamedTuple):
    """A finished tree.

    Attributes:
        tree: what is verified.
        numbers: [N] the number that each node had while it grew.
        read, left: [N] how far a part BY_TRANSLATION has read: tokens of its own, and what is left.
    """

    tree: DraftTree
    numbers: list[int]
    read: list[int]
    left: list[int]

    @classmethod
    def of(cls, columns: int, count: int, part: int) -> GrownTree:
        """What C has written at an address: [8, N], all but the path log-probabilities and entropies int32."""
        values = unpack(f"{3 * count}i{2 * count}f{3 * count}i", string_at(columns, 32 * count))
        tokens, parents, depths, paths, entropies, *others = (
            [*values[at : at + count]] for at in range(0, 8 * count, count)
        )
        return cls(DraftTree(tokens, parents, depths, paths, entropies, part), *others)


_NO_NODES = GrownTree(DraftTree.empty(), [], [], [])


class TextIndex:
    """A request's text, and where its n-grams stand.

    Args:
        shortest: tokens that a match has at least; 0: there is no index.
    """

    def __init__(self, shortest: int) -> None:
        self._library, self.index, self._matches = open_library(), c_void_p(), CMatches()
        if shortest:
            check(self._library.draftree_ngram_open(shortest, byref(self.index)))
        self.count, self._tokens = 0, np.empty(1024, np.int32)
        self.address: int = self._tokens.ctypes.data
        """Of the first of ``count`` tokens."""

    def __del__(self) -> None:
        if index := getattr(self, "index", None):
            self._library.draftree_ngram_close(index)

    def predict(self, tokens: Sequence[int]) -> None:
        """Another text, before the request's own."""
        ids = np.array(tokens, np.int32)
        if self.index:
            check(self._library.draftree_ngram_extend(self.index, ids.ctypes.data, len(ids)))
            check(self._library.draftree_ngram_end(self.index))

    @property
    def known(self) -> bool:
        """The end of the text stood somewhere before."""
        if not self.index:
            return False
        self._library.draftree_ngram_latest(self.index, byref(self._matches))
        return bool(self._matches.count)

    def extend(self, tokens: Sequence[int]) -> None:
        """More of the text."""
        end = self.count + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self.count], np.empty(end, np.int32)])
            self.address = self._tokens.ctypes.data
        self._tokens[self.count : end] = tokens
        if self.index:
            code = self._library.draftree_ngram_extend(self.index, self.address + 4 * self.count, len(tokens))
            if code:
                check(code)
        self.count = end


class Drafting:
    """The memory of one drafter's proposals.

    Attributes:
        rule, parts: to be filled before ``draft``; parts in the order in which they are tried, as sources and work.
        requests, sources: likewise, [B] and [B][parts], for as many as ``make_room`` was called with.
        work: [parts] what each took of the last proposal.
        layers: that were sought in it.
        coupled: candidates of models are those of the target's noise.

    Args:
        order: numbers of the parts, by which they are named here, in the order in which they are tried.
        score: scores nodes of parts BY_CALLER.
        find_states: finds what constraints allow.
        find_translations: fills the translations of parts BY_TRANSLATION.
    """

    def __init__(
        self, order: Sequence[int], score: ScoreNodes, find_states: FindStates, find_translations: FindTranslations
    ) -> None:
        self._library, self._pointer, self._layers = open_library(), c_void_p(), c_int32()
        check(self._library.draftree_draft_open(byref(self._pointer)))
        self._score, self._find_states, self._find_translations = score, find_states, find_translations
        self._order, parts = order, len(order)
        self._raised: BaseException | None = None
        self._masks: list[Sequence[NDArray[np.uint32] | None]] = []  # as long as C reads them
        self._numbers: Array[Any] = (c_int32 * 0)()
        self._trials: Array[CTrial] = (CTrial * 0)()
        self._curve: Sequence[float] | None = None
        self._curves = np.empty((2, 0))
        self.rule, self._parts, self._work = CRule(), (CPart * parts)(), (CWork * parts)()
        self.parts, self.work = list(self._parts), list(self._work)
        self.requests, self.sources = list[CRequest](), list[list[CSource]]()
        self.coupled, self.layers = False, 0
        self._step = CStep(
            part_count=parts,
            rule=ctypes.pointer(self.rule),
            parts=addressof(self._parts),
            score=_ScoreNodes(self._scored),
            find_states=_FindStates(self._states_found),
            find_translations=_FindTranslations(self._translations_found),
        )
        self.make_room(4)

    def __del__(self) -> None:
        if pointer := getattr(self, "_pointer", None):
            self._library.draftree_draft_close(pointer)

    def make_room(self, count: int) -> None:
        """Have so many requests, or more; those that were there stay as they are."""
        if count <= len(self.requests):
            return
        before, parts, count = self.requests, len(self.parts), 2 * count
        self._requests, self._sources = (CRequest * count)(), (CSource * (count * parts))()
        self._trees, self._outcomes = (CTree * count)(), (COutcome * count)()
        self._requests[: len(before)] = before
        self.requests, sources = list(self._requests), list(self._sources)
        self.sources = [sources[at : at + parts] for at in range(0, count * parts, parts)]
        self._step.requests, self._step.sources = addressof(self._requests), addressof(self._sources)

    def set_curves(self, seconds: Sequence[float], below: Sequence[float]) -> None:
        """``DraftRule``'s; empty: there are none."""
        rule = self.rule
        if seconds is not self._curve:
            self._curve, self._curves = seconds, np.array([seconds, below], np.float64)
            rule.sizes = len(seconds)
            rule.seconds = address(self._curves) if len(seconds) else None
            rule.below = address(self._curves[1]) if len(seconds) else None

    def draft(self, count: int) -> list[GrownTree]:
        """Grow the trees of the first ``count`` requests.

        Raises:
            whatever a callback has raised; RunError: there is not enough memory.
        """
        self._step.request_count, self._step.coupled, self._raised = count, self.coupled, None
        arguments = self._pointer, byref(self._step), self._trees, self._work, byref(self._layers)
        code = self._library.draftree_draft(*arguments)
        self._masks.clear()
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        if code:
            check(code)
        self.layers = self._layers.value
        grown = list[GrownTree]()
        for tree in self._trees[:count]:
            n = tree.count
            grown.append(GrownTree.of(tree.columns, n, self._order[tree.part]) if n else _NO_NODES)
        return grown

    def accept(self, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> list[tuple[int, bool, float]]:
        """Commit accepted paths; return the trials: part, whether its first candidate was right, its log-probability.

        Args:
            paths: of each request of the last proposal, numbers of its finished tree.
            tokens: of the target, of which the k-th follows the first k nodes of the path.
        """
        numbers, total = list[int](), 0
        for path, drawn in zip(paths, tokens, strict=True):
            numbers += path
            numbers += drawn
            total += len(drawn)
        if len(numbers) > len(self._numbers):
            self._numbers = (c_int32 * (2 * len(numbers)))()
        if total > len(self._trials):
            self._trials = (CTrial * (2 * total))()
        self._numbers[: len(numbers)] = numbers
        at, count = addressof(self._numbers), c_int32()
        for outcome, path, drawn in zip(self._outcomes, paths, tokens, strict=False):
            outcome.path_count, outcome.token_count = len(path), len(drawn)
            outcome.path = at
            outcome.tokens = at + 4 * len(path)
            at += 4 * (len(path) + len(drawn))
        arguments = self._pointer, byref(self._step), self._outcomes, self._trials, byref(count)
        if code := self._library.draftree_accept(*arguments):
            check(code)
        order = self._order
        return [(order[trial.part], bool(trial.right), trial.logprob) for trial in self._trials[: count.value]]

    def _scored(
        self, part: int, count: int, nodes: int, width: int, counts: int, tokens: int, logprobs: int, entropies: int
    ) -> int:
        try:
            candidates = self._score(self._order[part], _nodes(nodes, count), width)
            numbers, entropy = _memory(counts, count, np.int32), _memory(entropies, count, np.float64)
            ids = _memory(tokens, count * width, np.int32).reshape(count, width)
            logs = _memory(logprobs, count * width, np.float64).reshape(count, width)
            for node, (best, scores, nats) in enumerate(candidates):
                n = numbers[node] = min(len(best), width)
                ids[node, :n], logs[node, :n], entropy[node] = best[:n], scores[:n], nats
        except BaseException as error:  # noqa: BLE001 - C hands it on
            self._raised = error
            return _RAISED
        return 0

    def _states_found(self, count: int, nodes: int, masks: int, forced: int) -> int:
        try:
            arrays, tokens = self._find_states(_nodes(nodes, count))
            self._masks.append(arrays)
            _memory(masks, count, np.uint64)[:] = [0 if mask is None else mask.ctypes.data for mask in arrays]
            _memory(forced, count, np.int32)[:] = tokens
        except BaseException as error:  # noqa: BLE001 - C hands it on
            self._raised = error
            return _RAISED
        return 0

    def _translations_found(self, part: int, count: int, keys: int) -> int:
        try:
            columns = np.frombuffer(string_at(keys, 12 * count), np.int32).reshape(count, 3)
            self._find_translations(self._order[part], [(kind, text, token) for kind, text, token in columns.tolist()])
        except BaseException as error:  # noqa: BLE001 - C hands it on
            self._raised = error
            return _RAISED
        return 0


def _nodes(address: int, count: int) -> list[Node]:
    numbers = np.frombuffer(string_at(address, 16 * count), np.int32).reshape(count, 4)
    return [(request, node, parent, token) for request, node, parent, token in numbers.tolist()]


def _memory(address: int, count: int, kind: type[np.generic]) -> NDArray[Any]:
    """C's memory as an array."""
    whole = memoryview((ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(address))
    array: NDArray[Any] = np.frombuffer(whole, kind)
    return array

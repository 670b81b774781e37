"""Walk with a model and draft heads while C is refused memory: run by ``test_memory`` over a sanitized library.

python -m tests.models.native.out_of_memory MODEL LIBRARY HEAD...
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftree.errors import RunError
from draftree.models.gguf.gguf_checks import check
from draftree.models.heads.head_folder import find_head
from draftree.models.native import binding
from draftree.models.native.architecture import Description, describe
from draftree.models.native.head_binding import LAST_STATE, NO_STATE, HeadDescription, LoadedHead
from draftree.models.native.native_head import describe_head
from draftree.models.native.native_model import NativeModel

T = TypeVar("T")
THREADS, PAGE = 2, 64
TEXT = np.random.default_rng(0).integers(0, 274, 200).tolist()
KINDS = [(0.8, 0, 1, 0), (1, 1, 1, 0), (1, 20, 1, 0), (2, 0, 0.9, 0), (1.5, 200, 0.5, 0.01)]
"""Warpings of the slots: temperature, top-k, top-p, min-p."""


class Memory:
    """C's memory, which runs out at one call; what failed is called again with memory."""

    def __init__(self) -> None:
        self.library: Any = ctypes.CDLL(str(binding.LIBRARY))
        self.library.memory_calls.restype = self.library.memory_live.restype = ctypes.c_long
        self.failed: Counter[str] = Counter()

    def fail(self, first: int, last: int) -> None:
        self.library.memory_fail(ctypes.c_long(first), ctypes.c_long(last))

    def call(self, name: str, do: Callable[[], T], after: Callable[[], None] = lambda: None) -> T:
        """Call C; where memory is missing, check what is left (``after``) and call it again."""
        try:
            return do()
        except RunError:
            self.fail(1, 0)
            self.failed[name] += 1
            after()
            return do()


class Walker:
    """A model or a head, and what it has computed."""

    def __init__(self, memory: Memory, loaded: binding.Loaded, name: str) -> None:
        self._memory, self.loaded, self._name, self.found = memory, loaded, name, list[Any]()

    def call(self, name: str, *given: Any) -> Any:
        """A method of the model."""
        held, scores = self.loaded.cache_bytes(), self.scores()
        rows = len(given[0]) if name == "extend" else 0

        def check_left() -> None:
            more = 2 * PAGE * (self.loaded.token_bytes + 1) + self.loaded.row_bytes
            assert self.loaded.cache_bytes() <= held + rows * more
            if (left := self.scores()) is not None:  # the last pass's, or none: a pass that fails may end them
                np.testing.assert_equal(left, scores)

        result = self._memory.call(f"{self._name}.{name}", lambda: getattr(self.loaded, name)(*given), check_left)
        self.found.append(result)
        return result

    def scores(self) -> NDArray[np.float32] | None:
        """Logits of the first slot; None: there is none."""
        try:
            return self.loaded.logits(0, self.loaded.vocabulary + 300)
        except RuntimeError:
            return None

    def score(self, slots: int) -> None:
        """All that is computed of the last pass's slots."""
        vocab, some = self.loaded.vocabulary, list(range(slots))
        warpings = np.array([KINDS[slot % len(KINDS)] for slot in some], binding.WARPING)
        keys = np.arange(slots).astype(np.uint64)
        self.call("argmax", some, masks(slots, False))
        self.call("log_probabilities", some, [7] * slots)
        for edits in (None, masks(slots, self._name == "model")):
            for given in ((), (warpings,), (warpings, keys)):
                self.call("top", some, 5, edits, *given)
            if self._name == "model":
                self.call("draw", some, keys, warpings, edits)
        for slot in some:
            self.call("logits", slot, vocab + 300)


def masks(slots: int, changes: bool) -> binding.CEdits:
    """Edits of each slot: a mask, and changes."""
    edits = binding.CEdits()
    edits.set("mask_of", np.zeros(slots, np.int32))
    edits.set("masks", np.random.default_rng(1).integers(0, 2**32, 9, dtype=np.uint32))
    if changes:
        edits.set("change_starts", np.arange(slots + 1, dtype=np.int32))
        edits.set("tokens", np.full(slots, 7, np.int32))
        for name in ("positive", "negative", "addend"):
            edits.set(name, np.full(slots, 0.5, np.float32))
    return edits


def walk_model(model: Walker) -> int:
    """Rows, forks, trees; the row that is left."""
    row = model.call("open")
    model.call("extend", [row], [200], TEXT, range(-1, 199), [0] * 199 + [1])
    model.score(1)
    model.call("commit", row, range(200))
    fork = model.call("fork", row, 100)
    parents = [-1, 0, 0, 1, -1, -1, 0, 1]
    model.call("extend", [row, fork], [5, 3], TEXT[:8], parents, [1] * 8)
    model.score(8)
    model.call("prune", row, [0, 1, 3], 1)
    model.call("extend", [row], [2], [5, 6], [1, 2], [1, 1])
    model.score(2)
    model.call("commit", row, [0, 1, 2])
    model.call("states", row, 0, 10, len(model.loaded.tracked))  # type: ignore[attr-defined]
    model.call("rows", binding.EMBEDDING, np.arange(274))
    model.call("close", fork)
    return int(row)


def walk_head(head: Walker, target_row: int) -> None:
    row = head.call("open")
    head.call("learn", row, TEXT[1:101])
    head.call("extend", [row], [100], TEXT[1:101], range(-1, 99), [0] * 99 + [1], [target_row], range(100))
    head.score(1)
    head.call("commit", row, range(100))
    fork = head.call("fork", row, 50)
    head.call("learn", fork, TEXT[100:])
    drafted = [LAST_STATE] * 3 + [NO_STATE]
    head.call("extend", [row, fork], [3, 1], [1, 2, 3, 4], [-1, -1, -1, -1], [1] * 4, [target_row] * 2, drafted)
    head.score(4)
    head.call("outputs", row)
    head.call("cut", row, 60)
    head.call("extend", [row], [1], [9], [-1], [1], [target_row], [LAST_STATE])
    head.score(1)
    for each in (row, fork):
        head.call("close", each)


def walk(memory: Memory, description: Description, layers: tuple[int, ...], heads: list[HeadDescription]) -> list[Any]:
    """All results of a walk."""
    target = memory.call("load", lambda: binding.LoadedModel(description, THREADS))
    target.track(layers)
    model = Walker(memory, target, "model")
    found, row = model.found, walk_model(model)
    for each in heads:
        loaded = memory.call("load_head", lambda each=each: LoadedHead(each, target))  # type: ignore[misc]
        head = Walker(memory, loaded, "head")
        walk_head(head, row)
        found += head.found
    return found


def main(path: Path, folders: list[Path]) -> None:
    target, heads = NativeModel(path, threads=THREADS), list[HeadDescription]()
    for number, folder in enumerate(folders):
        head = find_head(folder)
        assert head is not None
        arrays = head.arrays(target.layers)
        target.track_features(arrays.features)
        heads.append(describe_head(f"head {number}", arrays, target))
    given = describe(check(path)), target.tracked.layers, heads
    memory = Memory()
    begun = memory.library.memory_live()
    expected = walk(memory, *given)
    for last, stride in ((0, 1), (2**31, 3)):  # one call fails, and all from one on until something has failed
        for number in count(1, stride):
            memory.fail(number, last or number)
            failed, found = memory.failed.total(), walk(memory, *given)
            np.testing.assert_equal(found, expected)
            assert memory.library.memory_live() == begun, "memory is lost"
            if memory.failed.total() == failed and memory.library.memory_calls() < number:
                break  # there was memory for all calls
    sys.stdout.write(f"{dict(memory.failed)}\n")


if __name__ == "__main__":
    binding.LIBRARY = Path(sys.argv[2])
    main(Path(sys.argv[1]), list(map(Path, sys.argv[3:])))

"""Draft with models and heads in C beside Python: run by ``test_draft_models`` over a sanitized library.

python -m tests.models.native.draft_walk MODEL LIBRARY HEAD...
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import Counter
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, byref, c_double, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.config import SamplingParams
from draftree.drafters.base import NodeStates, UnscoredNode
from draftree.drafters.draft_model import EagleSource, ModelSource, RowSource
from draftree.models.base import Nodes
from draftree.models.heads.head_folder import load_head
from draftree.models.native import binding
from draftree.models.native.draft_binding import CPart, CRequest, CSource, CStep, CWarping
from draftree.models.native.native_head import NativeHead
from draftree.models.native.native_model import NativeModel
from draftree.policies.base import Candidates
from draftree.request import Request
from draftree.sampling.constraint import ConstraintState
from draftree.sampling.warping import GOLDEN, mix
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT

from .out_of_memory import Memory

VOCAB, WIDTH, DEPTH, STEPS, ROOM = 274, 5, 3, 6, 64
PROMPTS = (1, 2, 7, 90)
"""Tokens of each."""


class CNode(Structure):
    _fields_ = [(name, c_int32) for name in ("request", "node", "parent", "token")]


class CLayer(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("part", "depth", "count")),
        ("nodes", POINTER(CNode)),
        ("masks", POINTER(c_void_p)),
    ]


class CFed(Structure):
    _fields_ = [("waiting", c_int32), ("count", c_int32), ("cells", POINTER(c_int32))]


class CMemory(Structure):
    _fields_ = [("bytes", c_void_p), ("capacity", c_int64)]


class CCandidates(Structure):
    _fields_ = [
        ("width", c_int32),
        ("counts", POINTER(c_int32)),
        ("tokens", POINTER(c_int32)),
        ("logprobs", POINTER(c_double)),
        ("entropies", POINTER(c_double)),
    ]


class _Functions(Structure):
    """native/check/drafting.c."""

    _fields_ = [
        ("begin_models", CFUNCTYPE(c_int, c_void_p, c_int32, c_void_p)),
        ("score_by_models", CFUNCTYPE(c_int, *[c_void_p] * 5)),
        ("commit_accepted", CFUNCTYPE(c_int, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_void_p)),
        ("free_pass_memory", CFUNCTYPE(None, c_void_p)),
    ]


class MaskState(ConstraintState):
    """Masks drawn by the text: half of the tokens, few of them, none, or any."""

    def __init__(self, seed: int, words: int) -> None:
        self._seed, self._words, draw = seed, words, np.random.default_rng(seed)
        masks = [draw.integers(0, 2**32, words, np.uint32) for _ in range(6)]
        few = masks[0] & masks[1] & masks[2] & masks[3] & masks[4] & masks[5]
        self._mask = (masks[0], few, few & np.uint32(0), None)[draw.integers(4)]

    @property
    def mask(self) -> NDArray[np.uint32] | None:
        return self._mask

    def after(self, token: int) -> ConstraintState:
        return MaskState(self._seed * 1000 + token + 1, self._words)


@dataclass(frozen=True)
class Masks:
    words: int

    def start(self) -> ConstraintState:
        return MaskState(1, self.words)


class CDrafter:
    """The functions of C on rows of their own, one part; its second part is nobody's.

    Args:
        outputs: tokens of the target's vocabulary.
    """

    def __init__(self, model: NativeModel | NativeHead, outputs: int) -> None:
        self._functions: Any = _Functions.in_dll(ctypes.CDLL(str(binding.LIBRARY)), "drafting")
        self._model, self.rows, self._memory = model, dict[Request, int](), CMemory()
        self._parts = (CPart * 2)(CPart(), CPart(1, 1, model.loaded.address, None, outputs))

    def begin(self, requests: Sequence[Request], coupled: bool) -> None:
        self._requests = list(requests)
        given, sources, self._texts = list[CRequest](), list[CSource](), list[Any]()
        for request in requests:
            if request not in self.rows:
                self.rows[request] = self._model.loaded.open()
            unread = request.ids[min(self.length(request), len(request.ids) - 1) :]
            self._texts.append((c_int32 * len(unread))(*unread))
            noise, target = mix(request.seed + GOLDEN), request.row.number if request.row else -1
            given.append(CRequest(0, 0, 0, target, len(request.ids), noise, CWarping(*request.params.warping)))
            text = addressof(self._texts[-1])
            sources += [CSource(row=-1), CSource(9, None, self.rows[request], len(unread), text)]
        self._given, self._sources = (CRequest * len(given))(*given), (CSource * len(sources))(*sources)
        arrays = [addressof(array) for array in (self._parts, self._given, self._sources)]
        self._step = CStep(2, len(given), coupled, None, *arrays)
        self._fed = (CFed * len(given))(*(CFed(9, 9, (c_int32 * ROOM)()) for _ in given))
        binding.check(self._functions.begin_models(byref(self._step), 1, self._fed))

    def score(
        self, depth: int, nodes: Sequence[UnscoredNode], masks: Sequence[NDArray[np.uint32] | None], width: int
    ) -> list[Candidates]:
        total = len(nodes)
        of = (c_void_p * total)(*(None if mask is None else mask.ctypes.data for mask in masks))
        c_nodes = (CNode * total)(*(CNode(*node) for node in nodes))
        layer = CLayer(1, depth, total, c_nodes, of if any(mask is not None for mask in masks) else None)
        ints, doubles = c_int32 * (total * width), c_double * (total * width)
        found = CCandidates(width, (c_int32 * total)(), ints(), doubles(), (c_double * total)())
        arguments = map(byref, (self._step, layer))
        binding.check(self._functions.score_by_models(*arguments, self._fed, byref(self._memory), byref(found)))
        candidates = []
        for i in range(total):
            own = slice(i * width, i * width + found.counts[i])
            candidates.append(Candidates(found.tokens[own], found.logprobs[own], found.entropies[i]))
        return candidates

    def keep(self, request: Request, path: Sequence[int]) -> None:
        at = self._requests.index(request)
        arguments = byref(self._fed[at]), (c_int32 * len(path))(*path), len(path), byref(self._memory)
        binding.check(self._functions.commit_accepted(byref(self._step), 1, at, *arguments))

    def length(self, request: Request) -> int:
        return self._model.loaded.length(self.rows[request])

    def close(self, request: Request) -> None:
        self._model.loaded.close(self.rows.pop(request))

    def free(self) -> None:
        for request in list(self.rows):
            self.close(request)
        self._functions.free_pass_memory(byref(self._memory))


@dataclass
class Case:
    """What requests have in common.

    Attributes:
        kind: "model", or that of a head.
        outputs: tokens of the target's vocabulary.
        warm: some have temperatures.
    """

    kind: str
    outputs: int = VOCAB
    warm: bool = False
    coupled: bool = True
    masks: bool = False
    seed: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def requests(self, target: NativeModel) -> list[Request]:
        made = []
        for i, length in enumerate(PROMPTS):
            temperature = (0.0, 0.8, 1.3, 1.0)[i] if self.warm else 0.0
            warping: dict[str, Any] = ({}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05})[i]
            masks = Masks(-(-self.outputs // 32)) if self.masks and i % 2 else None
            params = SamplingParams(temperature=temperature, seed=i + 1, constraint=masks, **warping)
            request = Request([self.token() for _ in range(length)], params, 10**6, frozenset(), NoText())
            if self.kind != "model":
                request.row = target.open()
                follow(target, request)
            made.append(request)
        return made

    def token(self) -> int:
        return self.random.randrange(self.outputs)


def follow(target: NativeModel, request: Request) -> None:
    """Let the target read a text but for its last token."""
    if request.row is None:
        return
    text = request.ids[request.row.length : -1]
    if text:
        target.extend([request.row], [Nodes.chain(text, 0)])
        target.commit(request.row, range(len(text)))


def compare(case: Case, target: NativeModel, source: RowSource) -> Counter[str]:
    """Steps with layers of random nodes: C finds what Python finds, and what a row finds that has read nothing yet."""
    found, requests = Counter[str](), case.requests(target)
    model: Any = source.model
    drafter, fresh = CDrafter(model, case.outputs), CDrafter(model, case.outputs)
    for number in range(STEPS):
        own = [request for request in requests if number % 2 == 0 or case.random.random() < 0.6] or requests[:1]
        scorer, states = source.scorer(own, case.coupled), NodeStates(own)
        drafter.begin(own, case.coupled)
        fresh.begin(own[-1:], case.coupled)
        layer = [UnscoredNode(b, ROOT, ROOT, 0) for b in range(len(own))]
        pools: list[list[tuple[int, int]]] = [[] for _ in own]  # parents and tokens
        for depth in range(DEPTH + 1):
            masks = [None if state is None else state.mask for state in states.of(layer)]
            width = case.random.choice([1, WIDTH, 500])
            expected, scored = scorer.score(layer, width), drafter.score(depth, layer, masks, width)
            assert scored == expected, (case, number, depth)
            found["constrained"] += sum(mask is not None for mask in masks)
            found["scored"] += len(layer)
            found["few"] += sum(len(each.tokens) < min(width, VOCAB) for each in expected)
            last = [i for i, node in enumerate(layer) if node.request == len(own) - 1]
            if last:
                nodes = [layer[i]._replace(request=0) for i in last]
                assert fresh.score(depth, nodes, [masks[i] for i in last], width) == [expected[i] for i in last]
            layer = grown(case, layer, expected, pools)
            if not layer:
                break
        source.settle(own, [(None, range(len(pool))) for pool in pools])  # type: ignore[misc]
        fresh.close(own[-1])
        failed = case.random.random() < 0.3  # then nobody learns what became of the trees
        for b, request in enumerate(own):
            path = [] if failed else accepted(case, pools[b])
            if not failed:
                source.observe([SimpleNamespace(request=request, path=path)])  # type: ignore[list-item]
                drafter.keep(request, path)
            assert drafter.length(request) == source.opened(request).row.length, (case, number)
            found["kept"] += len(path)
            request.ids += [pools[b][node][1] for node in path]
            request.ids += [case.token() for _ in range(case.random.choice([0, 1, 3] if failed else [1, 1, 3]))]
            follow(target, request)
    for request in requests:
        source.close(request)
        if request.row is not None:
            target.close(request.row)
    drafter.free()
    fresh.free()
    return found


def grown(
    case: Case, layer: Sequence[UnscoredNode], found: Sequence[Candidates], pools: Sequence[list[tuple[int, int]]]
) -> list[UnscoredNode]:
    """Children of some nodes, candidates or any tokens, of which most are to be scored."""
    added = []
    for (request, node, _, _), candidates in zip(layer, found, strict=True):
        for rank in range(case.random.choice([0, 1, 1, 2]) if node >= 0 else 2):
            token = candidates.tokens[rank] if rank < len(candidates.tokens) else case.token()
            pools[request].append((node, token))
            if case.random.random() < 0.8:
                added.append(UnscoredNode(request, len(pools[request]) - 1, node, token))
    return added


def accepted(case: Case, pool: Sequence[tuple[int, int]]) -> list[int]:
    """A random path of a pool from its root down."""
    path, above = list[int](), ROOT
    while below := [node for node, (parent, _) in enumerate(pool) if parent == above]:
        if case.random.random() < 0.2:
            break
        above = case.random.choice(below)
        path.append(above)
    return path


def cases(kinds: Sequence[str]) -> list[Case]:
    """All that matters, by itself and together."""
    found = []
    for kind in kinds:
        sizes = (VOCAB, VOCAB - 24, VOCAB + 26) if kind == "model" else (VOCAB,)
        for outputs in sizes:
            for masks in (False, True):
                found.append(Case(kind, outputs, masks=masks))
                found += [Case(kind, outputs, True, coupled, masks) for coupled in (True, False)]
    for seed, case in enumerate(found):
        case.seed = seed
        case.random.seed(seed)
    return found


def draft(memory: Memory, number: int, path: Path, folder: Path | None) -> list[Any]:
    """Two steps of two requests, in which a call of the allocator fails; what has failed is begun again."""
    target = NativeModel(path, threads=2)
    model: Any = target.twin() if folder is None else load_head(folder, target)
    case = Case("model" if folder is None else folder.name, warm=True, masks=True)
    requests, drafter, found = case.requests(target)[2:], CDrafter(model, VOCAB - 24), list[Any]()
    states = NodeStates(requests)

    def step() -> list[Candidates]:
        drafter.begin(requests, True)
        layer, scored = [UnscoredNode(b, ROOT, ROOT, 0) for b in range(2)], list[Candidates]()
        for depth in range(3):
            masks = [None if state is None else state.mask for state in states.of(layer)]
            new = drafter.score(depth, layer, masks, WIDTH)
            best = [each.tokens[0] if each.tokens else 0 for each in new]
            layer = [UnscoredNode(n.request, depth, n.node, token) for n, token in zip(layer, best, strict=True)]
            scored += new
        return scored

    memory.fail(number, number)
    for _ in range(2):
        found += memory.call("score", step)
        for b, request in enumerate(requests):
            drafter.keep(request, [0, 1][: b + 1])
            found.append(drafter.length(request))
            request.ids += [case.token() for _ in range(b + 3)]
            memory.call("follow", partial(follow, target, request))
    drafter.free()
    return found


def try_without_memory(path: Path, folder: Path | None) -> Counter[str]:
    """Each call of the allocator fails once; how often what has failed."""
    memory = Memory()
    expected = draft(memory, 0, path, folder)
    begun = memory.library.memory_live()
    for number in count(1):
        failed = memory.failed.total()
        assert draft(memory, number, path, folder) == expected, number
        if memory.failed.total() == failed and memory.library.memory_calls() < number:
            break
        assert memory.library.memory_live() == begun, "memory is lost"
    memory.fail(1, 0)
    return memory.failed


def main(path: Path, folders: list[Path]) -> None:
    target, found = NativeModel(path, threads=2), Counter[str]()
    heads: dict[str, Any] = {folder.name: load_head(folder, target) for folder in folders}
    for case in cases(["model", *heads]):
        source = ModelSource(target.twin(), case.outputs)
        found += compare(case, target, EagleSource(heads[case.kind], VOCAB) if case.kind in heads else source)
        found["cases"] += 1
    for folder in (None, *folders):
        found += try_without_memory(path, folder)
    sys.stdout.write(f"{dict(found)}\n")


if __name__ == "__main__":
    binding.LIBRARY = Path(sys.argv[2])
    main(Path(sys.argv[1]), list(map(Path, sys.argv[3:])))

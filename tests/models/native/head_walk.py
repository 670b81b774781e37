"""Walk with draft heads, and load damaged ones: run by ``test_head_damage`` over a sanitized library.

python -m tests.models.native.head_walk MODEL LIBRARY HEAD...    of each head its folder, or MODEL: that in its file
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftree.errors import CacheError, InputError
from draftree.models.base import Nodes, Row, prefill
from draftree.models.heads.head_folder import find_head
from draftree.models.native import binding
from draftree.models.native.architecture import Hyperparameters
from draftree.models.native.draft_layer import StoredDraftLayer
from draftree.models.native.head_binding import CHead, HeadDescription, LoadedHead
from draftree.models.native.native_head import NativeHead, describe_head
from draftree.models.native.native_model import NativeModel
from draftree.sampling.warping import Warping
from draftree.scores import Draft, Edit

from .damage import EXTREMES

_SIZES = ("layers", "rope_size", "rope_tables")
"""Numbers that say how long the arrays of a description are."""


def walk(head: NativeHead, target: NativeModel, random: np.random.Generator) -> None:
    """Read, read again, draft, fork and close rows, several of them in one pass."""
    vocab = target.capabilities.vocab_size
    texts = [random.integers(0, vocab, n).tolist() for n in random.integers(1, 200, 3)]
    targets: list[Row] = [prefill(target, text) for text in texts]
    rows: list[Row] = [head.open() for _ in texts]
    for step in range(4):
        fresh = [text[row.length + 1 :] for text, row in zip(texts, rows, strict=True)]
        head.read(rows, fresh, targets)
        head.read(rows, [[]] * len(rows), targets)
        for level in range(3):
            nodes = []
            for row, count in zip(rows, random.integers(0, 6, 3).tolist(), strict=True):
                most = len(row.parents) if level else 0
                tokens, parents = random.integers(0, vocab, count), random.integers(-1, most, count)
                nodes.append(Nodes(tokens.tolist(), parents.tolist()))
            scores = head.extend(rows, nodes)
            slots = range(scores.starts[-1])
            mask = random.integers(0, 2**32, (vocab + 31) // 32, dtype=np.uint32)
            draft = Draft([Warping(0.8)] * len(slots), random.integers(0, 2**63, len(slots)).tolist())
            for of in (None, draft):
                scores.top(slots, 5, [Edit(mask=mask)] * len(slots), of)
            if len(slots):
                scores.logits(slots)
        for b, row in enumerate(rows):
            text = random.integers(0, vocab, int(random.integers(1, 70))).tolist()
            target.extend([targets[b]], [Nodes.chain(text)])
            target.commit(targets[b], range(len(text)))
            texts[b] = texts[b] + text
            if step == b:
                rows[b] = head.fork(row, row.length // 2)
                head.close(row)
    for row in rows:
        head.close(row)


def damaged(found: HeadDescription, random: np.random.Generator) -> HeadDescription:
    """A description with one number changed to an extreme one."""
    extreme = int(random.choice(np.array(EXTREMES, object)))
    number = int(np.int64(np.uint64(extreme % 2**64)).astype(np.int32))
    kind = random.integers(5)
    if kind == 0:
        name = str(random.choice([each.name for each in fields(Hyperparameters) if each.name not in _SIZES]))
        changed: dict[str, Any] = {name: type(getattr(found.hyperparameters, name))(number)}
        return replace(found, hyperparameters=replace(found.hyperparameters, **changed))
    if kind == 1:
        head = CHead.from_buffer_copy(found.head)
        at = int(random.integers(ctypes.sizeof(CHead) // 4))
        ctypes.c_int32.from_buffer(head, 4 * at).value = number
        return replace(found, head=head)
    if kind == 2:
        tokens = found.tokens.copy()
        tokens[random.integers(len(tokens))] = number
        return replace(found, tokens=tokens)
    name = ("layer_tensors", "model_tensors", "head_tensors")[random.integers(3)]
    places = getattr(found, name).copy()
    field = str(random.choice(["offset", "format", "rows", "columns"]))
    places.reshape(-1)[random.integers(places.size)][field] = number
    return replace(found, **{name: places})


def try_damaged(whole: HeadDescription, target: NativeModel, count: int) -> Counter[str]:
    """Load damaged descriptions; what becomes of each."""
    outcomes: Counter[str] = Counter()
    row = target.loaded.open()
    target.loaded.extend([row], [3], [1, 2, 3], [-1, 0, 1], [0, 0, 0])
    for seed in range(count):
        found = damaged(whole, np.random.default_rng(seed))
        if found.hyperparameters.vocabulary != whole.hyperparameters.vocabulary:
            found = replace(found, tokens=np.zeros(max(0, min(found.hyperparameters.vocabulary, 1 << 25)), np.int32))
        try:
            head = LoadedHead(found, target.loaded)
            own = head.open()
            head.learn(own, [5, 9])
            head.extend([own], [2], [5, 9], [-1, 0], [1, 1], [row], [0, 1])
            head.top([0, 1], 1)
            outcomes["ran"] += 1
        except (InputError, CacheError, RuntimeError) as error:
            outcomes[type(error).__name__] += 1
    return outcomes


def described(place: Path, target: NativeModel) -> HeadDescription:
    """A head in a folder, or in the target's file."""
    if place in target.description.files:
        return StoredDraftLayer(target).describe()
    head_folder = find_head(place)
    assert head_folder is not None
    return describe_head("head", head_folder.arrays(target.layers), target)


def main(path: Path, places: list[Path]) -> None:
    found: Counter[str] = Counter()
    for place in places:
        target = NativeModel(path, threads=3)
        description = described(place, target)
        head = NativeHead(description, target)
        for seed in range(4):
            walk(head, target, np.random.default_rng(seed))
            found["walks"] += 1
        found += try_damaged(description, target, 120)
    sys.stdout.write(f"{dict(found)}\n")


if __name__ == "__main__":
    binding.LIBRARY = Path(sys.argv[2])
    main(Path(sys.argv[1]), list(map(Path, sys.argv[3:])))

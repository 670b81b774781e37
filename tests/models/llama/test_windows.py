"""Layers with a window on llama.cpp: a row goes back to what the window has passed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from draftree import Engine, SamplingParams, SpeculationParams
from draftree.engine.scheduler import SchedulerParams
from draftree.models.base import Nodes, decoded, prefill
from draftree.models.llama import llama_model
from draftree.models.llama.context import Context, Token
from draftree.models.llama.library import ContextParams, Weights, open_library
from draftree.models.llama.llama_model import EXACT, LlamaModel
from draftree.tree import ROOT, Floats

from ... import tiny_gguf
from ...tiny_gguf import WINDOW

VOCAB = 256
KINDS = {"cohere2": 4, "gemma3": 2, "gpt-oss": 2}
"""Architecture -> layers: with a window all of gemma3's, and of the others some."""


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tiny_gguf.write(file, architecture=request.param, layers=KINDS[request.param], weights="Q8_0")


def text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_trees_behind_windows_are_exact(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks far behind the window's end, prunes, commits, rejected nodes, and a move to a larger context."""
    monkeypatch.setattr(llama_model, "FIRST_CELLS", 256)
    model, reference = LlamaModel(path, threads=1), LlamaModel(path, threads=1)
    assert model.capabilities.trees == EXACT
    ids = text(0, 12 * WINDOW)
    first = prefill(model, ids)
    rows = [(first, ids), (model.fork(first, 5 * WINDOW), ids[: 5 * WINDOW]), (model.fork(first, 3), ids[:3])]
    for step in range(3 * len(rows)):
        row, own = rows[step % len(rows)]
        tokens, parents = text(step, 20), [ROOT, *range(9), 4, 10, 10, ROOT, 13, 13, 8, 16, 17, 18]
        logits = model.extend([row], [Nodes(tokens, parents)]).logits(range(20)).copy()
        for leaf in (9, 12, 15, 19):
            path_to, node = list[int](), leaf
            while node != ROOT:
                path_to.insert(0, node)
                node = parents[node]
            alone = reference.open()
            expected = decoded(reference, alone, [*own, *(tokens[n] for n in path_to)])[-1]
            reference.close(alone)
            assert np.array_equal(logits[leaf], expected)
        if step % 2:
            model.commit(row, range(9))
            own += tokens[:9]
        else:
            model.prune(row, [*range(9), 16, 17, 18, 19], 9)
            own += tokens[:9]
            model.commit(row, [0, 1])
            own += [tokens[16], tokens[17]]
    assert model._context.cells > 256


def test_a_window_that_keeps_its_last_tokens_alone_would_lose_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a sequence goes on behind the beginning of another, with ``swa_full`` and without."""
    library = open_library()
    weights, make = Weights(library, path), library.init_from_model
    ids, length = text(1, 1000), 100

    def after_fork(whole: Sequence[int]) -> Floats | None:
        context = Context(weights, 1024, 1, sequences=2)
        for start in range(0, len(whole), 500):
            part = whole[start : start + 500]
            assert context.decode([Token(t, start + i, [0], False) for i, t in enumerate(part)]) is not None
        context.copy(0, 1, 0, length)
        return context.decode([Token(7, length, [1], True)])

    expected, found = after_fork(ids[:length]), after_fork(ids)
    assert expected is not None and found is not None
    assert np.array_equal(found, expected)

    def last_tokens_alone(model: int, params: ContextParams) -> object:
        params.swa_full = False
        return make(model, params)

    monkeypatch.setattr(library, "init_from_model", last_tokens_alone)
    found = after_fork(ids)
    assert found is None or np.abs(found - expected).max() > 0.1


def test_texts_with_trees_are_those_without_behind_kept_rows(path: Path) -> None:
    """A chat goes on from a row that is kept, and one from the middle of it, windows behind its end."""
    model, params = LlamaModel(path, threads=1), SamplingParams(max_tokens=40, ignore_eos=True)
    drafted = SpeculationParams(drafter=LlamaModel(path, threads=1), method="opt-tree", nodes=12)
    engine = Engine(model, drafted, scheduling=SchedulerParams(prefixes=4))
    start = text(2, 4) * (2 * WINDOW)
    texts = [start, start[: 5 * WINDOW] + text(3, 30), start + text(4, 9)]
    for ids in texts:
        (alone,) = Engine(LlamaModel(path, threads=1)).generate([ids], params)
        (found,) = engine.generate([ids], params)
        assert found.token_ids == alone.token_ids
        assert sum(found.stats.accepted) > 20
    assert found.stats.reused >= len(start)

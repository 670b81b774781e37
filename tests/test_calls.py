"""How many functions of Python one step calls: after a pass none of them is in the processor's caches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from benchmarks.overhead import called
from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.native.native_model import NativeModel
from draftree.policies.auto import AutoTree
from draftree.policies.fixed import StaticTree
from draftree.request import Request
from draftree.text.encoding import Tokenizer
from draftree.tree import ROOT, DraftTree

from . import tiny_gguf
from .policies.auto.test_batch import affine

PROMPT = [5, 200, 31, 7, 90, 4, 4, 150]
STEPS, WIDTH, DEPTH = 15, 4, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    """Most of its tokens end with a whole character: those that do not take longer to decode."""
    words = tiny_gguf.byte_level(extra=[f"word {number}" for number in range(3000)])
    path = tiny_gguf.write(tmp_path_factory.mktemp("model") / "model.gguf", layers=1, vocabulary=words)
    model = NativeModel(path, threads=1)
    for token in range(model.capabilities.vocab_size):
        cast(Tokenizer, model.tokenizer).decode([token])  # how a token is spelt is read once
    return model


class Known(Drafter):
    """Trees of 16 nodes, made beforehand, of which the target accepts the first ``right`` levels."""

    policy, parts = StaticTree(width=WIDTH, depth=DEPTH), ("known",)

    def __init__(self, answer: Sequence[int], right: int) -> None:
        self._trees = [self._tree(answer[at : at + right], right) for at in range(len(answer))]

    def _tree(self, right: Sequence[int], levels: int) -> DraftTree:
        tokens, parents, parent = list[int](), list[int](), ROOT
        for level in range(DEPTH):
            own = right[level : level + 1] if level < levels else []
            others = [token for token in range(WIDTH + 1) if token not in own]
            parents += [parent] * WIDTH
            parent = len(tokens)
            tokens += [*own, *others][:WIDTH]
        depths = [1 + node // WIDTH for node in range(WIDTH * DEPTH)]
        return DraftTree(tokens, parents, depths, [-1.0] * len(tokens), [1.0] * len(tokens))

    def propose(self, requests: Sequence[Request], *_: Any, **__: Any) -> list[DraftTree]:
        return [self._trees[len(request.ids) - request.prompt_length] for request in requests]


def measured(target: NativeModel, drafter: Drafter | None, params: SamplingParams) -> tuple[float, float]:
    """Medians of the calls and of the tokens of a step."""
    engine = Engine(target, Speculation(drafter))
    handle = engine.submit(PROMPT, params)
    calls, gained = list[int](), list[int]()
    for _ in range(STEPS):
        before = len(handle.request.ids)
        calls.append(called(engine.advance).total())
        gained.append(len(handle.request.ids) - before)
    handle.cancel()
    return statistics.median(calls), statistics.median(gained)


def answer(target: NativeModel, params: SamplingParams) -> list[int]:
    return Engine(target).generate([PROMPT], params)[0].token_ids


PARAMS = [SamplingParams(max_tokens=120, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 0.8)]


@pytest.mark.parametrize(("params", "most"), [*zip(PARAMS, (47, 50), strict=True)])
def test_a_step_without_drafts_makes_few_calls(params: SamplingParams, most: int, target: NativeModel) -> None:
    """It made 134."""
    assert measured(target, None, params) <= (most, 1)


@pytest.mark.parametrize("right", [0, 2, 4])
@pytest.mark.parametrize(("params", "more"), [*zip(PARAMS, (0, 3), strict=True)])
def test_a_step_that_verifies_a_tree_makes_few_more(
    params: SamplingParams, more: int, right: int, target: NativeModel
) -> None:
    """The number of nodes makes no difference, nor that of tokens but where the window of detokenising is shortened."""
    calls, gained = measured(target, Known(answer(target, params), right), params)
    assert gained == right + 1
    assert calls <= 59 + (more if right < 4 else 3)


def test_a_step_of_auto_makes_few_calls(target: NativeModel) -> None:
    """The first steps draft: there is credit. One makes 83 to 94 calls beside three for each accepted token; the clock
    decides how many are drafted."""
    drafter = TreeDrafter(AutoTree(target=affine(1.0, 0.0)), NgramSource())
    engine = Engine(target, Speculation(drafter))
    handle, calls = engine.submit(PROMPT, PARAMS[0], prediction=answer(target, PARAMS[0])), list[int]()
    for _ in range(STEPS):
        stats = handle.request.stats
        drafted, accepted = sum(stats.drafted), sum(stats.accepted)
        count = called(engine.advance).total()
        if sum(stats.drafted) > drafted:
            calls.append(count - 3 * (sum(stats.accepted) - accepted))
    handle.cancel()
    assert calls and min(calls) <= 96, calls


def test_the_count_notices_a_call_for_each_node(target: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    follow: Callable[..., tuple[list[int], list[int]]] = DraftTree.follow

    def slow(tree: DraftTree, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
        for _ in range(len(tree)):
            str(tree.depth)
        return follow(tree, drawn)

    monkeypatch.setattr(DraftTree, "follow", slow)
    assert measured(target, Known(answer(target, PARAMS[0]), 0), PARAMS[0])[0] > 59

"""Penalties along a request: at each node those of its whole text, while a step reads what is new of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draftree.config import SamplingParams
from draftree.draws import Draws, Penalties
from draftree.scores import Changes

PARAMS = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "encouraged": SamplingParams(repetition_penalty=0.7),
    "frequency": SamplingParams(frequency_penalty=0.31),
    "presence": SamplingParams(presence_penalty=-0.7),
    "bias": SamplingParams(logit_bias={3: 1.5, 9: -100.0}),
    "bias and presence": SamplingParams(presence_penalty=0.4, logit_bias={3: 1.5, 11: 0.1}),
    "all": SamplingParams(
        repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3, logit_bias={0: 2.5, 5: -1.5, 12: 0.3}
    ),
}
penalised = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
Row = tuple[float, float, float]


def rows(changes: Changes | None) -> dict[int, Row]:
    """By the tokens: positive, negative, addend."""
    assert changes is not None and len(set(changes.tokens.tolist())) == len(changes.tokens)
    columns = changes.positive, changes.negative, changes.addend
    assert {column.dtype for column in columns} == {np.dtype(np.float32)} and changes.tokens.dtype == np.int32
    positive, negative, addend = (column.tolist() for column in columns)
    return dict(zip(changes.tokens.tolist(), zip(positive, negative, addend, strict=True), strict=True))


def plain(params: SamplingParams, text: Sequence[int], prompt: int) -> dict[int, Row]:
    """The changes after a text by their definition, each float as it is rounded there."""
    seen = set(text) if params.repetition_penalty != 1 else set[int]()
    counts = Counter(text[prompt:] if params.frequency_penalty or params.presence_penalty else ())
    biases, found = params.logit_bias or {}, dict[int, Row]()
    for token in seen.union(counts, biases):
        factor = np.float32(params.repetition_penalty if token in seen else 1)
        penalty = params.frequency_penalty * counts[token] + params.presence_penalty if token in counts else 0.0
        addend = np.float32(biases.get(token, 0.0) - penalty)
        found[token] = float(np.float32(1) / factor), float(factor), float(addend)
    return found


@penalised
@pytest.mark.parametrize("seed", range(12))
def test_penalties_are_those_of_the_whole_text(params: SamplingParams, seed: int) -> None:
    """At the root and on branches, in whatever order they come; a step may ask for none."""
    draw = random.Random(seed)
    vocab, prompt = draw.choice([3, 14, 200]), draw.choice([0, 1, 7, 60])
    history = [draw.randrange(vocab) for _ in range(prompt + draw.choice([0, 0, 5]))]
    draws = Draws(params, 0, history, prompt)
    for _ in range(10):
        for _ in range(draw.choice([0, 1, 4])):
            path = [draw.randrange(vocab) for _ in range(draw.choice([0, 0, 1, 3, 9]))]
            assert rows(draws.edit(path).changes) == plain(params, [*history, *path], prompt)
        history += [draw.randrange(vocab) for _ in range(draw.choice([0, 1, 1, 6]))]


@penalised
def test_changes_stay_as_they_are_while_the_text_goes_on(params: SamplingParams) -> None:
    """An engine may still read those of a step as the next one begins."""
    history = [1, 2, 3, 1]
    draws = Draws(params, 0, history, 2)
    given = [draws.edit(path).changes for path in ((), (3, 4), (1,))]
    before = [*map(rows, given)]
    for token in (3, 4, 4, 8):
        history.append(token)
        draws.edit(())
    assert [*map(rows, given)] == before


class Counting(Sequence[int]):
    """A history that counts how many of its tokens are read."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.reads = ids, 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: Any) -> Any:
        found = self.ids[at]
        self.reads += len(found) if isinstance(at, slice) else 1
        return found


@penalised
@pytest.mark.parametrize("prompt", [5000, 10])
def test_a_step_reads_only_what_is_new(params: SamplingParams, prompt: int) -> None:
    """It read the whole text, and went through all distinct tokens of a long prompt, at each step."""
    draw = random.Random(0)
    history = Counting([draw.randrange(4000) for _ in range(5000)])
    draws = Draws(params, 0, history, prompt)
    draws.edit(())
    assert history.reads <= 5000
    for gained in (1, 4, 2):
        history.ids += [draw.randrange(4000) for _ in range(gained)]
        history.reads = 0
        for path in ((), (1, 2, 3), (1, 4), (9,)):
            assert rows(draws.edit(path).changes) == plain(params, [*history.ids, *path], prompt)
        assert history.reads <= gained


@penalised
def test_a_step_makes_anew_only_what_is_new(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens whose changes are found one by one in Python."""
    found, changes = list[int](), Penalties._changes

    def counted(penalties: Penalties, tokens: Any, *more: Any) -> Changes:
        found.append(len(tokens))
        return changes(penalties, tokens, *more)

    monkeypatch.setattr(Penalties, "_changes", counted)
    history = [*range(3000), *range(50)]
    draws = Draws(params, 0, history, 3000)
    draws.edit(())
    for gained in ([7], [8, 8, 4000]):
        history += gained
        found.clear()
        for path in ((), (1, 2), (1, 3)):
            draws.edit(path)
        assert sum(found) <= len(set(gained)) + 4

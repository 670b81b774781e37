"""Trees that C grows of models of other vocabularies are those of the loop in Python, and so are the rows behind."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.fitting import fitted
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.models import translated
from draftree.models.base import LanguageModel
from draftree.models.native import translations
from draftree.models.native.native_model import NativeModel
from draftree.models.translated import TranslatedRow
from draftree.papers.opt_tree import OptTree
from draftree.request import Outcome, Request, StepCost
from draftree.sampling.constraint import ConstraintState
from draftree.text.detokenizer import NoText

from ..models.vocabularies import PAIRS, VOCABULARIES, models_in, tokenizer_of
from ..tiny_gguf import write
from .test_native_growth import differ, walk

TEXTS = ("the thé 🙂 in", "a\n\nb", "<think>他说：“好”。</think> the or er", "🙂🙂" * 12, "他" * 9)
WARPINGS: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """Of all vocabularies; those that are called small have a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    found = models_in(folder)
    for name in ("pieces", "bytes"):
        path = write(folder / f"small-{name}.gguf", layers=1, context=64, vocabulary=VOCABULARIES[name](), seed=3)
        found[f"small {name}"] = NativeModel(path, threads=1)
    return found


@dataclass(frozen=True)
class Masks(ConstraintState):
    """Allows most tokens, few, none or any, by what came before."""

    seed: int

    @property
    def mask(self) -> NDArray[np.uint32] | None:
        draw = np.random.default_rng(self.seed)
        many, few = (draw.random((2, 320)) < np.array([[0.7], [0.05]])).astype(np.bool_)
        bits = (many, few, few & False, None)[draw.choice(4, p=[0.5, 0.3, 0.05, 0.15])]
        return None if bits is None else np.packbits(bits, bitorder="little").view(np.uint32)

    def after(self, token: int) -> ConstraintState:
        return Masks(hash((self.seed, token)) % 2**32)


class Pair:
    """Two drafters of the same model and policy, the trees of the first grown by C, and requests that they share."""

    def __init__(self, models: dict[str, LanguageModel], seed: int) -> None:
        draw = self.draw = random.Random(seed)  # noqa: S311
        of_target, of_drafter = PAIRS[seed % len(PAIRS)]
        small = f"small {of_drafter}"
        self.target = models[of_target]
        model = models[small if small in models and draw.random() < 0.3 else of_drafter]
        self.vocab, self.seen = self.target.capabilities.vocab_size, Counter[str]()
        lookup, policy = draw.random() < 0.3, draw.choice([(1e-9, 3), (0.02, 5), (None, 8)])
        self.drafters, self.sources = list[TreeDrafter](), list[ModelSource]()
        for _ in range(2):
            source = ModelSource(fitted(model, self.target), self.vocab)
            parts = EnsembleSource((NgramSource(2), source)) if lookup else source
            self.drafters.append(TreeDrafter(OptTree(*policy), parts))
            self.drafters[-1].prepare(self.target)
            self.sources.append(source)
        assert self.drafters[0]._native is not None
        self.drafters[1]._native = None
        self.requests = [self._request(number) for number in range(draw.choice([1, 2, 3]))]
        for request in self.requests:
            for drafter in self.drafters:
                drafter.open(request)

    def _request(self, number: int) -> Request:
        draw, temperature = self.draw, self.draw.choice([0.0, 0.0, 0.8, 1.3])
        ids = tokenizer_of(self.target).encode(draw.choice(TEXTS))[draw.choice([0, 0, 1]) :]
        ids = ids if ids and draw.random() < 0.7 else [self._token() for _ in range(draw.randrange(1, 40))]
        params = SamplingParams(temperature=temperature, seed=number + 1, **draw.choice(WARPINGS))
        request = Request(ids, params, 10**6, frozenset(), NoText())
        request.draws.state = Masks(draw.randrange(2**30)) if draw.random() < 0.3 else None
        return request

    def _token(self) -> int:
        return self.draw.randrange(self.vocab)

    def differs(self) -> bool:
        """Make a step of some requests: whether the two come to different trees, or to different rows."""
        draw = self.draw
        own = [request for request in self.requests if draw.random() < 0.8] or self.requests[:1]
        coupled = draw.choice([True, False])
        budgets = [Budget(draw.choice([0, 1, 6, 12]), draw.choice([None, None, 2])) for _ in own]
        trees, expected = (drafter.propose(own, budgets, coupled) for drafter in self.drafters)
        if any(differ(one, other) for one, other in zip(trees, expected, strict=True)):
            return True
        self.seen["nodes"] += sum(map(len, trees))
        failed, outcomes = draw.random() < 0.15, list[Outcome]()
        for request, tree in zip(own, trees, strict=True):
            path, tokens = walk(tree, draw)
            text = tokenizer_of(self.target).encode(draw.choice(TEXTS))
            tokens[-1] = self._token() if draw.random() < 0.2 else text[request.stats.steps % len(text)]
            outcomes.append(Outcome(request, tree, path, tokens, len(tokens), StepCost(1, 0.01, 1.0, 0.0, 0)))
            request.ids += tokens
            request.stats.steps += 1
            for token in tokens:
                request.draws.state = request.state and request.state.after(token)
        if failed:
            self.sources[1]._drop(own)  # or it would keep what it has read, once a step without drafts is observed
            return False
        for drafter in self.drafters:
            drafter.observe(outcomes)
        return any(
            self._rows_differ(request, bool(outcome.path)) for request, outcome in zip(own, outcomes, strict=True)
        )

    def _rows_differ(self, request: Request, accepted: bool) -> bool:
        if any(request not in source._states for source in self.sources):
            return False
        found = []
        for source in self.sources:
            row = source.opened(request).row
            assert isinstance(row, TranslatedRow)
            found.append((row.length, row.tokens, row.ends, row.inner.length))
        self.seen["left"] += sum(bool(left) for _, left in found[0][2])
        self.seen["accepted"] += accepted
        self.seen["constrained"] += request.state is not None
        return found[0] != found[1]


def differing(models: dict[str, LanguageModel], seeds: range, steps: int = 6) -> tuple[int, Counter[str]]:
    """Of how many seeds some step differs; what was seen."""
    count, seen = 0, Counter[str]()
    for seed in seeds:
        pair = Pair(models, seed)
        count += any([pair.differs() for _ in range(steps)])
        seen += pair.seen
    return count, seen


def test_trees_and_rows_are_those_of_python(models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, seen = translations.Translation._entry, Counter[str]()

    def counted(self: translations.Translation, kind: int, text: int, token: int) -> Any:
        seen[("first", "expected", "reading")[kind]] += 1
        return expected(self, kind, text, token)

    monkeypatch.setattr(translations.Translation, "_entry", counted)
    count, found = differing(models, range(60))
    assert not count
    assert min((found + seen).values()) > 20, found + seen


@pytest.mark.parametrize(
    ("constant", "value"),
    [("_CANDIDATES", 1), ("_MORE", 1), ("_UNLIKELY", -3.0), ("_LEAST", 0.01), ("_NOTHING_PREDICTED", None)],
)
def test_another_translation_would_be_noticed(
    models: dict[str, LanguageModel], constant: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:  # what is expected is not
        monkeypatch.setattr(translated.TranslatedScores, "_expected", lambda *_: translated._NOTHING_PREDICTED)
    else:
        monkeypatch.setattr(translated, constant, value)
    assert any(differing(models, range(seed, seed + 1))[0] for seed in range(24))


def test_what_is_forgotten_is_found_again(models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, forgotten = translations.Translation.number, 0

    def counted(self: translations.Translation, text: bytes) -> int:
        nonlocal forgotten
        forgotten += len(self._texts) == 1
        return numbers(self, text)

    monkeypatch.setattr(translations, "_MOST", 20)
    monkeypatch.setattr(translations.Translation, "number", counted)
    assert not differing(models, range(12))[0]
    assert forgotten > 3 * 12, "more than once of each seed"

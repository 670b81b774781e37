"""A model that drafts for a target with another vocabulary: what it has read is what the target's tokens spell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.models.base import LanguageModel, Nodes
from draftree.models.translated import TranslatedModel, TranslatedRow
from draftree.sampling.warping import Warping
from draftree.scores import NO_EDIT, Draft, Edit
from draftree.text.spelling import Spelling
from draftree.tree import ROOT

from ..toy import ToyModel, chi_square, distribution
from .vocabularies import PAIRS, models_in, tokenizer_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    return models_in(tmp_path_factory.mktemp("models"))


def spelling(model: LanguageModel) -> Spelling:
    return Spelling(tokenizer_of(model), model.capabilities.vocab_size)


def text_of(spelt: Spelling, tokens: Sequence[int]) -> bytes:
    return b"".join(spelt.texts[token] for token in tokens if token not in spelt.special)


class _Log:
    """A model, and the tokens that its rows hold."""

    def __init__(self, inner: LanguageModel) -> None:
        self._inner, self.committed, self.nodes = inner, dict[int, list[int]](), dict[int, list[int]]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def open(self) -> object:
        row = self._inner.open()
        self.committed[id(row)], self.nodes[id(row)] = [], []
        return row

    def fork(self, row: object, length: int) -> object:
        other = self._inner.fork(row, length)  # type: ignore[arg-type]
        self.committed[id(other)], self.nodes[id(other)] = self.committed[id(row)][:length], []
        return other

    def extend(self, rows: Sequence[object], nodes: Sequence[Nodes]) -> object:
        found = self._inner.extend(rows, nodes)  # type: ignore[arg-type]
        for row, new in zip(rows, nodes, strict=True):
            self.nodes[id(row)] += new.tokens
        return found

    def commit(self, row: object, path: Sequence[int]) -> None:
        self._inner.commit(row, path)  # type: ignore[arg-type]
        self.committed[id(row)] += [self.nodes[id(row)][node] for node in path]
        self.nodes[id(row)] = []

    def prune(self, row: object, keep: Sequence[int], trunk: int) -> None:
        self._inner.prune(row, keep, trunk)  # type: ignore[arg-type]
        kept = [self.nodes[id(row)][node] for node in keep]
        self.committed[id(row)] += kept[:trunk]
        self.nodes[id(row)] = kept[trunk:]


def path_to(row: TranslatedRow, node: int) -> list[int]:
    path = list[int]()
    while node != ROOT:
        path.append(node)
        node = int(row.parents[node])
    return path[::-1]


def check(log: _Log, row: TranslatedRow, own: Spelling, theirs: Spelling) -> None:
    """What a row has read, and what of it is still to be read, is the text of its tokens."""
    committed, nodes = log.committed[id(row.inner)], log.nodes[id(row.inner)]
    read = text_of(own, committed)
    assert read + row.end[1] == text_of(theirs, row.tokens)
    for number, node in enumerate(row.nodes):
        fed = text_of(own, [nodes[i] for i in row.inner_above([node.inner])])
        below = [row.nodes[each].token for each in path_to(row, number)]
        assert read + fed + node.left == text_of(theirs, row.tokens + below)
    for length, (end, left) in enumerate(row.ends, start=1):
        if not end:
            continue  # passed over, where it began again
        assert text_of(own, committed[:end]) + left == text_of(theirs, row.tokens[:length])


@pytest.mark.parametrize(("of_target", "of_drafter"), PAIRS)
def test_it_has_read_what_the_target_spells(models: dict[str, LanguageModel], of_target: str, of_drafter: str) -> None:
    """Behind any passes, commits, prunings and forks."""
    log, random = _Log(models[of_drafter]), Random(5)
    model = TranslatedModel(log, models[of_target])  # type: ignore[arg-type]
    own, theirs = spelling(models[of_drafter]), spelling(models[of_target])
    words = [token for token, text in enumerate(theirs.texts) if text and token not in theirs.special]
    row = model.open()
    assert isinstance(row, TranslatedRow)
    model.extend([row], [Nodes.chain([random.choice(words)])])
    model.commit(row, [0])
    while row.inner.length < 100:
        before, count = len(row.nodes), random.randrange(1, 5)
        branches, wanted = random.random() < 0.5, random.randrange(0, count + 1)
        parents = [random.randrange(ROOT, before + i) if branches else before + i - 1 for i in range(count)]
        tokens = [random.choice(words) for _ in parents]
        scores = model.extend([row], [Nodes(tokens, parents, wanted)])
        check(log, row, own, theirs)
        if wanted:
            top, slot = scores.top(range(wanted), 4), random.randrange(wanted)
            if np.isfinite(top.logprobs[slot][0]):
                model.extend([row], [Nodes(top.tokens[slot][:1].tolist(), [len(row.nodes) - wanted + slot])])
                check(log, row, own, theirs)
        if random.random() < 0.5:
            path = path_to(row, random.randrange(len(row.nodes)))
            if random.random() < 0.5:
                model.commit(row, path)
            else:
                below = [node for node in range(len(row.nodes)) if row.parents[node] == path[-1]]
                model.prune(row, sorted([*path, *below]), len(path))
            check(log, row, own, theirs)
        if random.random() < 0.2 and row.length > 4:
            other = model.fork(row, row.length - random.randrange(3))
            assert isinstance(other, TranslatedRow)
            model.close(row)
            row = other
            check(log, row, own, theirs)


def test_what_was_read_in_pieces_is_read_once_it_is_scored(models: dict[str, LanguageModel]) -> None:
    """All of a text that is shorter than the window, and no token before."""
    log = _Log(models["pieces"])
    model = TranslatedModel(log, models["bytes"])  # type: ignore[arg-type]
    row, tokens = model.open(), tokenizer_of(models["bytes"]).encode("the thé 🙂 in or er" * 4)
    assert isinstance(row, TranslatedRow) and model.most_read == 128 and 64 < len(tokens) < 128
    for begin in range(0, len(tokens) - 1, 16):
        part = tokens[begin : min(begin + 16, len(tokens) - 1)]
        model.extend([row], [Nodes.chain(part, 0)])
        model.commit(row, range(len(part)))
    assert not log.nodes[id(row.inner)] and not log.committed[id(row.inner)]
    model.extend([row], [Nodes.chain(tokens[-1:], 1)])
    assert text_of(spelling(models["pieces"]), log.nodes[id(row.inner)]) == text_of(spelling(models["bytes"]), tokens)


def test_nodes_beyond_the_context_are_not_read(models: dict[str, LanguageModel]) -> None:
    """Nothing is known of what follows them; the nodes above are read, and the text goes on."""
    model, tokens = TranslatedModel(models["pieces"], models["bytes"]), [40] * 300
    row = model.open()
    model.extend([row], [Nodes.chain(tokens[:100], 1)])
    scores = model.extend([row], [Nodes(tokens[:200], [*range(99, 299)])])
    known = np.isfinite(scores.top(range(200), 1).logprobs[:, 0]).tolist()
    assert known.count(True) > 100 and known == sorted(known, reverse=True) and not known[-1]
    model.commit(row, range(300))
    scores = model.extend([row], [Nodes.chain([40])])
    assert np.isfinite(scores.top([0], 1).logprobs).all()


class FailingError(Exception):
    """Of a test."""


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("method", ["extend", "commit", "prune"])
def test_a_row_outlives_a_failure_inside_its_model(
    models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch, method: str, before: bool
) -> None:
    """In front of the model's own change or behind it: what it reads from then on is the text again."""
    log = _Log(models["pieces"])
    model = TranslatedModel(log, models["tags"])  # type: ignore[arg-type]
    own, theirs = spelling(models["pieces"]), spelling(models["tags"])
    tokens = tokenizer_of(models["tags"]).encode("the thé 🙂 in" * 2)
    row = model.open()
    assert isinstance(row, TranslatedRow)
    model.extend([row], [Nodes.chain(tokens[:5], wanted=1)])
    model.commit(row, range(5))
    whole = getattr(log, method)

    def failing(*args: object) -> None:
        if not before:
            whole(*args)
        raise FailingError

    def step(tokens: Sequence[int]) -> None:
        at = len(row.nodes)
        model.extend([row], [Nodes.chain(tokens, wanted=1)])
        if method == "prune":
            model.prune(row, [at + i for i in range(len(tokens))], len(tokens) - 1)
        else:
            model.commit(row, [at + i for i in range(len(tokens))])

    monkeypatch.setattr(log, method, failing, raising=False)
    with pytest.raises(FailingError):
        step(tokens[row.length : row.length + 4])
    monkeypatch.setattr(log, method, whole)
    model.commit(row, [])
    while row.length < len(tokens) - 4:
        step(tokens[row.length : row.length + 3])
        model.commit(row, [])
        check(log, row, own, theirs)
    assert row.tokens == tokens[: row.length]
    other = model.fork(row, row.length - 2)
    assert isinstance(other, TranslatedRow)
    check(log, other, own, theirs)


class _Letters:
    """A tokenizer that takes the longest token first."""

    chat_template: str | dict[str, str] | None = None
    special_tokens_map: Mapping[str, Any] = {}

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: number for number, token in enumerate(tokens)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found = list[int]()
        while text:
            token = max((token for token in self._ids if text.startswith(token)), key=len)
            found.append(self._ids[token])
            text = text[len(token) :]
        return found

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join([[*self._ids][token] for token in token_ids])

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def toys() -> tuple[ToyModel, ToyModel]:
    """A target that can be enumerated, and a model of other tokens, some of which begin with the same one of its."""
    target, drafter = ToyModel(3, spread=1.0), ToyModel(5, seed=8, spread=1.0)
    target.tokenizer, drafter.tokenizer = _Letters("a", "b", "ab"), _Letters("ab", "a", "bba", "b", "ba")
    return target, drafter


@pytest.mark.parametrize("scheme", ["match", "multi-round", "multi-round-replacement", "top1-residual"])
def test_sampled_text_follows_the_targets_distribution(scheme: str) -> None:
    """By chi-square, of 600 texts."""
    (target, drafter), requests, length = toys(), 600, 3
    engine = Engine(target, SpeculationParams(drafter=drafter, method="static", nodes=5, verification=scheme))
    each = [SamplingParams(max_tokens=length, temperature=1.0, seed=seed) for seed in range(requests)]
    found = engine.generate([[1, 2]] * requests, each)
    counts = torch.zeros((3,) * length)
    counts.index_put_(tuple(torch.tensor([each.token_ids for each in found]).T), torch.ones(requests), accumulate=True)
    assert sum(sum(each.stats.drafted) for each in found) > requests
    assert chi_square(counts.flatten(), distribution(target, [1, 2], length).flatten()) > 1e-4


def test_probabilities_of_tokens_that_begin_alike_add_up() -> None:
    """ "a" has that of "a", "b" those of "bba", "b" and "ba", "ab" that of "ab"."""
    target, drafter = toys()
    model = TranslatedModel(drafter, target)
    row = model.open()
    scores = model.extend([row], [Nodes.chain([0, 1, 2], wanted=1)])
    p = drafter.after([0, 0]).softmax(-1).tolist()  # what it has read: "ab", "ab"
    assert np.exp(scores.logits([0])[0]) == pytest.approx([p[1], p[2] + p[3] + p[4], p[0]])
    top = scores.top([0], 3)
    assert np.exp(top.logprobs[0]) == pytest.approx(sorted([p[1], p[2] + p[3] + p[4], p[0]], reverse=True))


def test_a_constraint_that_allows_what_no_token_stands_for_leaves_a_distribution() -> None:
    """ "ab" stands for none of the drafter's tokens, and is what the mask allows."""
    target, drafter = ToyModel(3), ToyModel(2)
    target.tokenizer, drafter.tokenizer = _Letters("a", "b", "ab"), _Letters("a", "b")
    model = TranslatedModel(drafter, target)
    scores = model.extend([model.open()], [Nodes.chain([0, 1])])
    edits = [Edit(mask=np.array([0b100], np.uint32))] * 2
    assert np.isfinite(scores.logits([0, 1])).all()
    assert scores.argmax([0, 1], edits).tolist() == [2, 2]
    assert scores.draw([0, 1], [3, 4], [Warping(1.0)] * 2, edits).tolist() == [2, 2]
    assert np.isneginf(scores.top([0, 1], 3, edits).logprobs).all()
    assert np.isneginf(scores.top([0, 1], 3, edits, Draft([Warping(0.8)] * 2, [1, 2])).logprobs).all()


def test_a_constraint_changes_nothing_beside_it(models: dict[str, LanguageModel]) -> None:
    """All rows of a pass got as many of the model's tokens as a constrained one needs."""
    model = TranslatedModel(models["pieces"], models["bytes"])
    nodes, mask = Nodes.chain([20, 21, 22]), np.full(10, 0x55555555, np.uint32)
    scores = model.extend([model.open(), model.open()], [nodes, nodes])
    alone, beside = scores.top([0], 5), scores.top([0, 1], 5, [NO_EDIT, Edit(mask=mask)])
    assert beside.tokens[0].tolist() != beside.tokens[1].tolist()
    np.testing.assert_array_equal(beside.tokens[0], alone.tokens[0])
    np.testing.assert_array_equal(beside.logprobs[0], alone.logprobs[0])

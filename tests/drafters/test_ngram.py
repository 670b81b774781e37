"""Lookup: matches and their distribution against a reading of whole texts and by hand, and the trees drafted."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.config import Budget, SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import LONGEST, MATCHES, NgramIndex, NgramSource, followed, probabilities
from draftree.errors import ConfigError
from draftree.policies.fixed import StaticTree
from draftree.request import Request
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT, DraftTree

from ..lookups import Reference


def index_of(text: Sequence[int], shortest: int = 2) -> NgramIndex:
    index = NgramIndex(shortest)
    index.extend(text)
    return index


def predicted(text: Sequence[int], tail: Sequence[int], shortest: int = 2) -> dict[int, float]:
    """What has followed a tail in a text."""
    return probabilities(index_of(text, shortest).matches(tail))


def entropy_of(distribution: Mapping[int, float]) -> float:
    """Nats; what is missing from 1 is one outcome."""
    outcomes = [*distribution.values(), 1 - sum(distribution.values())]
    return -sum(p * math.log(p) for p in outcomes)


texts = st.lists(st.integers(0, 2), max_size=40)
examples = settings(max_examples=150, deadline=None, derandomize=True)


@given(text=texts, tail=st.lists(st.integers(0, 2), max_size=LONGEST), shortest=st.integers(1, 3))
@examples
def test_matches_and_probabilities_equal_those_of_reading_the_whole_text(
    text: list[int], tail: list[int], shortest: int
) -> None:
    reference = Reference([text], shortest)
    places = reference.search(tail)[:MATCHES]
    found = index_of(text, shortest).matches(tail)
    assert [(known[at:], length) for known, at, length in found] == [(text[at:], n) for _, at, n in places]
    want = reference.probabilities(places)
    assert list(probabilities(found).items()) == list(want.items())
    assert list(want.values()) == sorted(want.values(), reverse=True) and sum(want.values()) < 1


@given(text=texts, first=texts, steps=st.lists(texts, max_size=3), path=st.lists(st.integers(0, 2), max_size=4))
@examples
def test_matches_follow_the_text_and_the_path_however_many_tokens_a_step_has(
    text: list[int], first: list[int], steps: list[list[int]], path: list[int]
) -> None:
    index = NgramIndex()
    index.extend(text)
    index.end()
    index.extend(first)
    for step in steps:
        index.latest()
        index.extend(step)
    found, whole = index.latest(), [*first, *(token for step in steps for token in step)]
    assert index.text == whole and len(index) == len(whole)
    for depth, token in enumerate(path, start=1):
        found = followed(found, token) or index.matches([*whole, *path[:depth]][-LONGEST:])
    want = Reference([text, whole]).predict(path, len(whole) - len(first))
    assert list(probabilities(found).items()) == list(want.items())


def test_no_match_reaches_across_the_end_of_a_text() -> None:
    index = index_of([1, 2, 3], 1)
    index.end()
    index.extend([4, 5])
    assert len(index) == 2 and index.text == [4, 5]
    assert index.matches([3]) == [] and index.latest() == []
    assert [(at, n) for _, at, n in index.matches([3, 4])] == [(6, 1)]
    assert list(probabilities(index.matches([2]))) == [3]


def test_a_long_match_far_back_is_kept_among_many_short_ones() -> None:
    """Of the places of two frequent tokens the latest were found; the text was copied from none of them."""
    original = [5, 1, 2, 6, 7, 1, 2, 8, 1, 2, 9]
    text = [*original, *[1, 2, 3] * 50, 5, 1]
    index = index_of(text)
    for token in original[2:]:
        assert next(iter(probabilities(index.latest()))) == token
        index.extend([token])


def drafted(prompt: Sequence[int], prediction: Sequence[int], output: Sequence[int], length: int = 4) -> list[int]:
    """The chain behind an output."""
    request = Request(prompt, SamplingParams(), 100, frozenset(), NoText(), prediction=prediction)
    source = NgramSource()
    source.open(request)
    request.ids += output
    tree = TreeDrafter(StaticTree(width=1, depth=length), source).propose([request], [Budget(length)])[0]
    found: list[int] = tree.tokens
    return found


def test_a_predicted_output_is_drafted_from_the_first_token_on_and_again_after_an_edit() -> None:
    prompt, prediction = [1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17]
    assert drafted(prompt, prediction, []) == [10, 11, 12, 13]
    assert drafted(prompt, prediction, [10, 11]) == [12, 13, 14, 15]
    assert drafted(prompt, prediction, [10, 11, 99]) == []
    assert drafted(prompt, prediction, [10, 11, 99, 14, 15]) == [16, 17]
    assert drafted(prompt, [], []) == []


def test_the_votes_of_two_match_lengths_by_hand() -> None:
    """After 7, 1, 2 came 3; after 1, 2 alone 4 twice."""
    distribution = predicted([7, 1, 2, 3, 1, 2, 4, 1, 2, 4], [7, 1, 2])
    three, four = 3**1.5, 2 * 2**1.5
    total = three + four + 2 * 3
    assert list(distribution) == [4, 3] and list(distribution.values()) == pytest.approx([four / total, three / total])


def test_of_equally_frequent_successors_the_most_recent_comes_first() -> None:
    assert list(predicted([1, 2, 1, 3, 1, 4], [1], 1)) == [4, 3, 2]
    assert list(predicted([1, 4, 1, 3, 1, 2, 1, 3, 1, 4], [1], 1)) == [4, 3, 2]


def test_a_more_frequent_successor_comes_before_a_more_recent_one() -> None:
    assert list(predicted([1, 2, 1, 2, 1, 3], [1], 1)) == [2, 3]


def test_a_successor_after_a_longer_match_comes_before_one_as_frequent_after_a_shorter() -> None:
    assert list(predicted([7, 1, 2, 8, 1, 3], [7, 1], 1)) == [2, 3]


def test_nothing_is_predicted_from_less_than_the_shortest_match() -> None:
    assert predicted([1, 2, 3, 1, 2, 3], [1, 2], 3) == {}
    assert predicted([1, 2, 3, 9, 2], [9, 2], 2) == {}


def test_nothing_is_predicted_without_a_text_or_across_its_end() -> None:
    assert predicted([], [1], 1) == predicted([1, 2, 3], [3], 1) == predicted([1, 2, 3], [], 1) == {}


def test_a_long_text_takes_bounded_memory() -> None:
    text = [i * i % 977 for i in range(30_000)]
    tracemalloc.start()
    index = index_of(text)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 300 * len(text) and len(index.matches(text[-LONGEST:])) == MATCHES


def request_of(ids: Sequence[int]) -> Request:
    return Request(ids, SamplingParams(), 100, frozenset(), NoText())


def propose(drafter: TreeDrafter, *requests: Request, nodes: int = 20) -> list[DraftTree]:
    return drafter.propose(requests, [Budget(nodes)] * len(requests))


def opened(drafter: TreeDrafter, ids: Sequence[int]) -> Request:
    made = request_of(ids)
    drafter.open(made)
    return made


def chain(depth: int = 4) -> StaticTree:
    return StaticTree(width=1, depth=depth)


def test_a_repeating_text_is_continued_as_before() -> None:
    drafter = TreeDrafter(chain(), NgramSource())
    tree = propose(drafter, opened(drafter, [1, 2, 3, 4, 5, 6, 7, 1, 2]))[0]
    assert tree.tokens == [3, 4, 5, 6]


def test_drafts_go_on_round_the_end_of_the_text() -> None:
    drafter = TreeDrafter(chain(7), NgramSource())
    assert propose(drafter, opened(drafter, [1, 2, 3, 1, 2]))[0].tokens == [3, 1, 2, 3, 1, 2, 3]


def test_continuations_that_differ_become_branches() -> None:
    drafter = TreeDrafter(StaticTree(width=2, depth=2), NgramSource())
    tree = propose(drafter, opened(drafter, [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]))[0]
    assert (tree.tokens, tree.parents) == ([5, 3, 6, 4], [-1, -1, 0, 1])


def test_a_drafts_probability_and_entropy_are_those_of_the_matches() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    drafter = TreeDrafter(StaticTree(width=9, depth=2), NgramSource())
    tree = propose(drafter, opened(drafter, text))[0]
    reference = Reference([text])
    above: dict[int, tuple[tuple[int, ...], float]] = {ROOT: ((), 0.0)}
    assert len(tree) > 3
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        path, logprob = above[parent]
        distribution = reference.predict(path)
        above[node] = (*path, token), logprob + math.log(distribution[token])
        assert float(tree.path_logprobs[node]) == pytest.approx(above[node][1], abs=1e-5)
        assert float(tree.entropies[node]) == pytest.approx(entropy_of(distribution), abs=1e-5)


def test_each_branch_is_continued_by_its_own_tail() -> None:
    """What follows 2 depends on whether 1 or 3 came before it."""
    text = [0, 1, 2, 8, 0, 3, 2, 9, 0]
    drafter = TreeDrafter(StaticTree(width=2, depth=3), NgramSource(shortest=1))
    tree = propose(drafter, opened(drafter, text), nodes=99)[0]
    follows: dict[int, int] = {}
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        if parent >= 0 and int(tree.tokens[parent]) == 2:
            follows.setdefault(int(tree.tokens[tree.parents[parent]]), int(tree.tokens[node]))
    assert follows == {1: 8, 3: 9}


def test_nothing_is_drafted_where_nothing_matches() -> None:
    drafter = TreeDrafter(chain(), NgramSource())
    assert len(propose(drafter, opened(drafter, [1, 2, 3, 4, 5]))[0]) == 0


def test_tokens_that_were_gained_are_read_before_the_next_proposal() -> None:
    drafter = TreeDrafter(chain(2), NgramSource())
    made = opened(drafter, [1, 2, 3])
    assert len(propose(drafter, made)[0]) == 0
    made.ids += [4, 1, 2]
    assert propose(drafter, made)[0].tokens == [3, 4]


def test_every_sequence_looks_up_in_its_own_text() -> None:
    drafter = TreeDrafter(chain(4), NgramSource())
    texts = [[1, 2, 3, 1, 2], [1, 2, 4, 1, 2], [5, 6, 7], [1, 2, 5, 1, 2]]
    three, four, five = [3, 1, 2, 3], [4, 1, 2, 4], [5, 1, 2, 5]
    requests = [opened(drafter, ids) for ids in texts]
    assert [tree.tokens for tree in propose(drafter, *requests)] == [three, four, [], five]
    assert [tree.tokens for tree in propose(drafter, requests[3], requests[0])] == [five, three]


def test_a_sequence_that_closes_leaves_the_others_alone() -> None:
    drafter = TreeDrafter(chain(1), NgramSource())
    one, two = opened(drafter, [1, 2, 3, 1, 2]), opened(drafter, [1, 2, 4, 1, 2])
    drafter.close(one)
    assert propose(drafter, two)[0].tokens == [4]


def test_a_budget_is_kept() -> None:
    drafter = TreeDrafter(StaticTree(width=3, depth=5), NgramSource(shortest=1))
    made = opened(drafter, [1, 2, 1, 3, 1, 2, 2, 3, 3, 1])
    assert len(propose(drafter, made, nodes=6)[0]) == 6


@pytest.mark.parametrize("shortest", [0, -1, LONGEST + 1])
def test_a_match_length_out_of_range_is_refused(shortest: int) -> None:
    with pytest.raises(ConfigError, match=f"shortest is {shortest}:"):
        NgramSource(shortest)

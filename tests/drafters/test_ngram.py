"""Lookup: the n-gram distribution against a recount and by hand, and the trees drafted from it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.config import Budget, SamplingParams
from draftree.drafters.distributions import candidates_of
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.indexes import NgramIndex
from draftree.drafters.ngram import NgramSource
from draftree.errors import ConfigError
from draftree.policies.fixed import StaticTree
from draftree.request import Request
from draftree.text.detokenizer import NoText
from draftree.tree import DraftTree


def index_of(text: Sequence[int], shortest: int, longest: int) -> NgramIndex:
    index = NgramIndex(shortest, longest)
    index.extend(text)
    return index


def recount(text: Sequence[int], tail: Sequence[int], shortest: int, longest: int) -> tuple[dict[int, float], float]:
    """The blended distribution (escape method C) and its entropy, by reading the whole text for every match length."""
    distribution: defaultdict[int, float] = defaultdict(float)
    left = 1.0
    for n in range(min(longest, len(tail)), shortest - 1, -1):
        context = list(tail[len(tail) - n :])
        found = Counter(text[i + n] for i in range(len(text) - n) if list(text[i : i + n]) == context)
        if found:
            total, kinds = found.total(), len(found)
            for token, count in found.items():
                distribution[token] += left * count / (total + kinds)
            left *= kinds / (total + kinds)
    outcomes = [*distribution.values(), left]
    return dict(distribution), -sum(p * math.log(p) for p in outcomes)


texts = st.lists(st.integers(0, 2), max_size=40)
examples = settings(max_examples=150, deadline=None, derandomize=True)


@given(text=texts, tail=st.lists(st.integers(0, 2), max_size=6), shortest=st.integers(1, 3), more=st.integers(0, 3))
@examples
def test_the_distribution_equals_a_recount(text: list[int], tail: list[int], shortest: int, more: int) -> None:
    blend = index_of(text, shortest, shortest + more).predict(tuple(tail))
    counted, expected_entropy = recount(text, tail, shortest, shortest + more)
    assert blend == pytest.approx(counted)
    assert list(blend.values()) == sorted(blend.values(), reverse=True)
    assert candidates_of(blend, 1).entropy == pytest.approx(expected_entropy)


def test_no_ngram_reaches_across_the_end_of_a_text() -> None:
    index = index_of([1, 2, 3], 1, 3)
    index.end()
    index.extend([4, 5])
    assert len(index) == 2
    assert index.predict((3,)) == {} and list(index.predict((4,))) == [5] and list(index.predict((2,))) == [3]


def drafted(prompt: Sequence[int], prediction: Sequence[int], output: Sequence[int], length: int = 4) -> list[int]:
    """The chain behind an output."""
    request = Request(prompt, SamplingParams(), 100, frozenset(), NoText(), prediction=prediction)
    source = NgramSource()
    source.open(request)
    request.ids += output
    tree = TreeDrafter(StaticTree(width=1, depth=length), source).propose([request], [Budget(length)])[0]
    found: list[int] = tree.tokens.tolist()
    return found


def test_a_predicted_output_is_drafted_from_the_first_token_on_and_again_after_an_edit() -> None:
    prompt, prediction = [1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17]
    assert drafted(prompt, prediction, []) == [10, 11, 12, 13]
    assert drafted(prompt, prediction, [10, 11]) == [12, 13, 14, 15]
    assert drafted(prompt, prediction, [10, 11, 99]) == []
    assert drafted(prompt, prediction, [10, 11, 99, 14, 15]) == [16, 17]
    assert drafted(prompt, [], []) == []


def test_the_blend_of_two_match_lengths_by_hand() -> None:
    """After (1, 2) came 3 twice and 4 once: C = 3, U = 2; after 2 alone the same and 5 once: C = 4, U = 3."""
    blend = index_of([1, 2, 3, 1, 2, 4, 1, 2, 3, 2, 5], 1, 2).predict((1, 2))
    three, four, five, left = 2 / 5 + 2 / 5 * 2 / 7, 1 / 5 + 2 / 5 * 1 / 7, 2 / 5 * 1 / 7, 2 / 5 * 3 / 7
    assert list(blend) == [3, 4, 5]
    assert list(blend.values()) == pytest.approx([three, four, five])
    entropy = -sum(p * math.log(p) for p in (three, four, five, left))
    assert candidates_of(blend, 1).entropy == pytest.approx(entropy)


def test_of_equally_frequent_successors_the_most_recent_comes_first() -> None:
    assert list(index_of([1, 2, 1, 3, 1, 4], 1, 1).predict((1,))) == [4, 3, 2]
    assert list(index_of([1, 4, 1, 3, 1, 2, 1, 3, 1, 4], 1, 1).predict((1,))) == [4, 3, 2]


def test_a_more_frequent_successor_comes_before_a_more_recent_one() -> None:
    assert list(index_of([1, 2, 1, 2, 1, 3], 1, 1).predict((1,))) == [2, 3]


def test_a_successor_after_a_longer_match_comes_before_one_as_frequent_after_a_shorter() -> None:
    assert list(index_of([7, 1, 2, 8, 1, 3], 1, 2).predict((7, 1))) == [2, 3]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_no_more_than_the_width_is_predicted_and_the_distribution_is_not_renormalised(width: int) -> None:
    blend = index_of([1, 2, 1, 3, 1, 4], 1, 1).predict((1,))
    found, whole = candidates_of(blend, width), candidates_of(blend, 5)
    assert found.tokens == list(blend)[:width]
    assert np.exp(found.logprobs).tolist() == pytest.approx(list(blend.values())[:width])
    assert found.entropy == whole.entropy
    assert len(whole.tokens) == 3


def test_nothing_is_predicted_from_less_than_the_shortest_match() -> None:
    assert index_of([1, 2, 3, 1, 2, 3], 3, 5).predict((1, 2)) == {}
    assert index_of([1, 2, 3, 9, 2], 2, 5).predict((9, 2)) == {}


def test_nothing_is_predicted_without_a_text() -> None:
    assert NgramIndex(1, 3).predict((1,)) == {}
    assert candidates_of({}, 1).entropy == 0


def test_nothing_is_predicted_across_the_end_of_the_text() -> None:
    assert index_of([1, 2, 3], 1, 3).predict((3,)) == {}


@given(text=texts, cuts=st.lists(st.integers(0, 40), max_size=4))
@examples
def test_an_index_that_grew_in_parts_equals_one_built_at_once(text: list[int], cuts: list[int]) -> None:
    grown = NgramIndex(1, 3)
    for cut in sorted(cuts):
        grown.extend(text[len(grown) : cut])
    grown.extend(text[len(grown) :])
    whole = index_of(text, 1, 3)
    assert len(grown) == len(whole) == len(text)
    for tail in ((a, b, c) for a in range(3) for b in range(3) for c in range(3)):
        assert list(grown.predict(tail).items()) == list(whole.predict(tail).items())


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
    assert tree.tokens.tolist() == [3, 4, 5, 6]


def test_drafts_go_on_round_the_end_of_the_text() -> None:
    drafter = TreeDrafter(chain(7), NgramSource())
    assert propose(drafter, opened(drafter, [1, 2, 3, 1, 2]))[0].tokens.tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_continuations_that_differ_become_branches() -> None:
    drafter = TreeDrafter(StaticTree(width=2, depth=2), NgramSource())
    tree = propose(drafter, opened(drafter, [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]))[0]
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([5, 3, 6, 4], [-1, -1, 0, 1])


def test_a_drafts_probability_and_entropy_are_those_of_the_blend() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    drafter = TreeDrafter(StaticTree(width=9, depth=1), NgramSource())
    tree = propose(drafter, opened(drafter, text))[0]
    distribution, entropy = recount(text, text[-6:], 2, 6)
    assert dict(zip(tree.tokens.tolist(), np.exp(tree.path_logprobs).tolist(), strict=True)) == pytest.approx(
        distribution
    )
    assert tree.entropies.tolist() == pytest.approx([entropy] * len(distribution))


def test_each_branch_is_continued_by_its_own_tail() -> None:
    """What follows 2 depends on whether 1 or 3 came before it."""
    text = [1, 2, 8, 3, 2, 9, 0, 1, 0, 3, 0]
    drafter = TreeDrafter(StaticTree(width=2, depth=3), NgramSource(shortest=1, longest=2))
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
    assert propose(drafter, made)[0].tokens.tolist() == [3, 4]


def test_every_sequence_looks_up_in_its_own_text() -> None:
    drafter = TreeDrafter(chain(4), NgramSource())
    texts = [[1, 2, 3, 1, 2], [1, 2, 4, 1, 2], [5, 6, 7], [1, 2, 5, 1, 2]]
    three, four, five = [3, 1, 2, 3], [4, 1, 2, 4], [5, 1, 2, 5]
    requests = [opened(drafter, ids) for ids in texts]
    assert [tree.tokens.tolist() for tree in propose(drafter, *requests)] == [three, four, [], five]
    assert [tree.tokens.tolist() for tree in propose(drafter, requests[3], requests[0])] == [five, three]


def test_a_sequence_that_closes_leaves_the_others_alone() -> None:
    drafter = TreeDrafter(chain(1), NgramSource())
    one, two = opened(drafter, [1, 2, 3, 1, 2]), opened(drafter, [1, 2, 4, 1, 2])
    drafter.close(one)
    assert propose(drafter, two)[0].tokens.tolist() == [4]


def test_a_budget_is_kept() -> None:
    drafter = TreeDrafter(StaticTree(width=3, depth=5), NgramSource(shortest=1))
    made = opened(drafter, [1, 2, 1, 3, 1, 2, 2, 3, 3, 1])
    assert len(propose(drafter, made, nodes=6)[0]) == 6


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (-1, 3), (4, 3)])
def test_match_lengths_out_of_order_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ConfigError, match=f"match lengths are {shortest} to {longest}: use 1 <= shortest <= longest"):
        NgramSource(shortest, longest)

"""The n-gram index in C finds what the one in Python finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from ctypes import byref, c_double, c_int32, c_void_p

import pytest

from draftree.drafters.ngram import LONGEST, NgramIndex, NgramMatch, followed, probabilities
from draftree.models.native.binding import open_library
from draftree.models.native.draft_binding import NGRAM_MATCHES, CMatches


def array(tokens: Sequence[int]) -> object:
    return (c_int32 * len(tokens))(*tokens)


def found(matches: CMatches) -> list[tuple[int, int]]:
    return [(matches.positions[i], matches.lengths[i]) for i in range(matches.count)]


def places(matches: Sequence[NgramMatch]) -> list[tuple[int, int]]:
    return [(at, length) for _, at, length in matches]


@pytest.mark.parametrize("seed", range(60))
def test_same_matches_and_probabilities_along_random_paths(seed: int) -> None:
    draw, library = random.Random(seed), open_library()
    alphabet, shortest = draw.choice([2, 3, 6, 20]), draw.choice([1, 2, 3, LONGEST])
    text = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 300))]
    prediction = [draw.randrange(alphabet) for _ in range(draw.choice([0, 1, 40]))]
    expected, index, matches = NgramIndex.begun(text, prediction, shortest), c_void_p(), CMatches()
    assert library.draftree_ngram_open(shortest, byref(index)) == 0
    if prediction:
        begun = [*text[-LONGEST:], *prediction]
        assert library.draftree_ngram_extend(index, array(begun), len(begun)) == 0
        assert library.draftree_ngram_end(index) == 0
    assert library.draftree_ngram_extend(index, array(text), len(text)) == 0
    tokens, values = (c_int32 * NGRAM_MATCHES)(), (c_double * NGRAM_MATCHES)()
    some = 0
    for _ in range(20):
        library.draftree_ngram_latest(index, byref(matches))
        path, tail = expected.latest(), expected.text[-LONGEST:]
        for _ in range(6):
            assert found(matches) == places(path)
            count = library.draftree_ngram_probabilities(index, byref(matches), tokens, values)
            assert dict(zip(tokens[:count], values[:count], strict=True)) == pytest.approx(probabilities(path))
            assert tokens[:count] == [*probabilities(path)]
            some += count
            token, after = draw.randrange(alphabet), CMatches()
            path, tail = followed(path, token), [*tail, token][-LONGEST:]
            library.draftree_ngram_followed(index, byref(matches), token, byref(after))
            assert found(after) == places(path)
            if not path:
                path = expected.matches(tail)
                library.draftree_ngram_matches(index, array(tail), len(tail), byref(after))
            matches = after
        more = [draw.randrange(alphabet) for _ in range(draw.randrange(5))]
        expected.extend(more)
        assert library.draftree_ngram_extend(index, array(more), len(more)) == 0
    assert some or shortest == LONGEST or alphabet == 20
    library.draftree_ngram_close(index)


def test_a_refused_extension_leaves_the_index_as_it_was() -> None:
    library, index, before, after = open_library(), c_void_p(), CMatches(), CMatches()
    assert library.draftree_ngram_open(0, byref(index)) != 0
    assert library.draftree_ngram_open(2, byref(index)) == 0
    assert library.draftree_ngram_extend(index, array([1, 2, 3, 1, 2]), 5) == 0
    library.draftree_ngram_latest(index, byref(before))
    assert library.draftree_ngram_extend(index, array([3, -1]), 2) != 0
    library.draftree_ngram_latest(index, byref(after))
    assert found(before) == found(after) != []
    library.draftree_ngram_close(index)

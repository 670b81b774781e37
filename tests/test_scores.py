"""Scores: NumPy's are the reference, those on a device give the same; and they end with the model's next pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftree.errors import CacheError
from draftree.models.base import LanguageModel, Nodes, prefill_scored
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.torch_scores import TorchScores
from draftree.sampling.warping import Warping, draw, gumbel_noise, softmax, stream_key, warp
from draftree.scores import Changes, Edit, NumpyScores, Scores, edited

from .tiny import tiny
from .toy import ToyModel

WARPINGS = [
    Warping(0.0),
    Warping(1.0),
    Warping(0.3),
    Warping(1.7, top_k=7),
    Warping(0.9, top_p=0.8),
    Warping(1.2, min_p=0.1),
    Warping(1.4, top_k=40, top_p=0.95, min_p=0.02),
]


def rows_of(count: int, vocab: int, spread: float = 3.0) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(vocab + count).standard_normal((count, vocab))).astype(np.float32)


def edits_of(count: int, vocab: int) -> list[Edit]:
    """Masks, changes, both and none, in turn."""
    rng, found = np.random.default_rng(count), []
    for i in range(count):
        tokens = rng.permutation(vocab)[: vocab // 3 + 1].astype(np.int32)
        factors, addend = rng.uniform(0.5, 2, (2, len(tokens))), rng.standard_normal(len(tokens))
        positive, negative = factors.astype(np.float32)
        changes = Changes(tokens, positive, negative, addend.astype(np.float32))
        bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
        bits[rng.permutation(vocab)[: vocab // 2]] = i % 8 != 7  # the last of eight allows nothing
        mask = np.packbits(bits, bitorder="little").view(np.uint32)
        found.append(Edit(changes if i % 4 in (1, 3) else None, mask if i % 4 in (2, 3) else None))
    return found


@pytest.mark.parametrize("vocab", [33, 512, 5000])
@pytest.mark.parametrize("with_edits", [False, True])
def test_those_of_torch_are_the_references(vocab: int, with_edits: bool) -> None:
    count = 24
    rows = rows_of(count + 2, vocab)
    reference, other = NumpyScores(rows, [count, 2]), TorchScores(torch.from_numpy(rows), [count, 2])
    slots = np.random.default_rng(0).permutation(count + 2)[:count].tolist()
    edits = edits_of(count, vocab) if with_edits else None
    keys = [stream_key(5, slot % 5) for slot in slots]
    warpings = [WARPINGS[i % len(WARPINGS)] for i in range(count)]
    assert np.array_equal(reference.argmax(slots, edits), other.argmax(slots, edits))
    assert np.array_equal(reference.draw(slots, keys, warpings, edits), other.draw(slots, keys, warpings, edits))
    np.testing.assert_allclose(reference.logits(slots, edits), other.logits(slots, edits), rtol=1e-6)
    one, two = reference.top(slots, 9, edits), other.top(slots, 9, edits)
    assert np.array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
    np.testing.assert_allclose(one.entropies, two.entropies, atol=1e-4)
    tokens = [(7 * slot) % vocab for slot in slots]
    np.testing.assert_allclose(
        reference.log_probabilities(slots, tokens), other.log_probabilities(slots, tokens), atol=1e-5
    )


def by_definition(row: NDArray[np.float32], key: int, warping: Warping) -> int:
    """The draw with the noise of all tokens."""
    if not warping.temperature:
        return int(row.argmax())
    return int((warp(row, warping).astype(np.float64) + gumbel_noise(key, len(row))).argmax())


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 1e4])
@pytest.mark.parametrize("vocab", [1, 2, 65, 3000])
def test_a_draw_is_that_of_the_noise_of_all_tokens(vocab: int, spread: float) -> None:
    """Noise is computed for the few tokens that can win: flat, peaked and equal logits, and all warpings."""
    rows = rows_of(60, vocab, spread)
    for i, row in enumerate(rows):
        key, warping = stream_key(i, 3), WARPINGS[i % len(WARPINGS)]
        found = NumpyScores(row[None], [1]).draw([0], [key], [warping])
        assert found.tolist() == [by_definition(row, key, warping)]


def test_ties_go_to_the_lower_token() -> None:
    rows = np.zeros((1, 9), np.float32)
    rows[0, [2, 5, 7]] = 1.0
    for scores in (NumpyScores(rows, [1]), TorchScores(torch.from_numpy(rows), [1])):
        assert scores.argmax([0]).tolist() == [2]
        assert scores.draw([0], [1], [Warping(0.0)]).tolist() == [2]
    assert NumpyScores(rows, [1]).top([0], 5).tokens.tolist() == [[2, 5, 7, 0, 1]]
    assert draw(np.array([-np.inf, 0.0, -np.inf]), 7) == 1


def test_the_most_probable_tokens_have_their_log_probabilities_and_the_entropy_of_all() -> None:
    rows = rows_of(3, 50)
    rows[1, 10:] = -np.inf
    found = NumpyScores(rows, [3]).top(range(3), 60)
    assert found.tokens.shape == (3, 50)
    for row, tokens, logprobs, entropy in zip(rows, *found, strict=True):
        p = softmax(row)
        np.testing.assert_allclose(np.exp(logprobs), p[tokens], atol=1e-6)
        assert np.all(logprobs[1:] <= logprobs[:-1])
        assert entropy == pytest.approx(-sum(x * np.log(x) for x in p.tolist() if x), abs=1e-5)


def test_changes_are_those_of_each_token_and_come_before_the_mask() -> None:
    row = np.array([2.0, -2.0, 1.0, 0.0, 5.0], np.float32)
    columns = ([0.5, 0.5, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0], [0.0, 0.0, 3.0, -1.0])
    changes = Changes(np.array([0, 1, 2, 3], np.int32), *(np.array(x, np.float32) for x in columns))
    assert edited(row, Edit(changes)).tolist() == [1.0, -4.0, 4.0, -1.0, 5.0]
    assert edited(row, Edit(changes, np.array([0b00111], np.uint32))).tolist() == [1.0, -4.0, 4.0, -np.inf, -np.inf]
    assert edited(row, Edit(None, np.array([0], np.uint32))).tolist() == row.tolist(), "what allows nothing is left out"
    assert row.tolist() == [2.0, -2.0, 1.0, 0.0, 5.0]


def test_calls_do_not_change_the_scores() -> None:
    rows = rows_of(4, 40)
    scores = NumpyScores(rows.copy(), [4])
    copy = scores.logits(range(4))
    copy[:] = 0
    scores.draw(range(4), [1] * 4, WARPINGS[1:5], edits_of(4, 40))
    assert np.array_equal(scores.rows, rows)


@pytest.mark.parametrize("make", [ToyModel, lambda: HFModel(tiny(), self_test=False)])
def test_scores_end_with_the_models_next_pass(make: Any) -> None:
    model: LanguageModel = make()
    row, scores = prefill_scored(model, [1, 2, 3])
    model.commit(row, [])
    model.fork(row)
    assert scores.argmax([0]).shape == (1,)  # only passes end them
    later = model.extend([row], [Nodes.chain([1])])
    calls: list[Any] = [
        lambda: scores.argmax([0]),
        lambda: scores.top([0], 1),
        lambda: scores.log_probabilities([0], [1]),
        lambda: scores.draw([0], [1], [Warping(1.0)]),
        lambda: scores.logits([0]),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="earlier pass"):
            call()
    assert later.argmax([0]).shape == (1,)


def test_those_on_a_device_end_too() -> None:
    scores: Scores = TorchScores(torch.zeros(1, 4), [1])
    scores.expire()
    with pytest.raises(CacheError, match="earlier pass"):
        scores.argmax([0])

"""Responses in step: those of the engine, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from draftree.errors import CacheError
from draftree.models.base import prefill
from draftree.models.huggingface.hf_model import HFModel
from draftree.train.responses import respond, respond_in_step

from ..heads import PROMPTS
from ..tiny import VOCAB, tiny

MORE = [*PROMPTS, [7], [3, 1, 4, 1, 5, 9, 2, 6] * 9, [20, 21]]


@pytest.fixture(scope="module")
def target() -> HFModel:
    model = HFModel(tiny(), self_test=False)
    model.track_features()
    model.capabilities = replace(model.capabilities, eos_ids=frozenset(range(0, VOCAB, 9)))
    return model


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_they_are_those_of_the_engine(rows: int, target: HFModel) -> None:
    """Greedy and sampled ones, ended by a token or by their length, of prompts and of their second round."""
    numbers = [3, 0, 6, 2, 5, 1, 4, 9, 12]
    want, got = (
        {r.number: r for r in draw(target, MORE, numbers, rows=rows, max_tokens=24, seed=5)}
        for draw in (respond, respond_in_step)
    )
    assert sorted(got) == sorted(want) == sorted(numbers)
    assert max(r.gained for r in want.values()) == 24 > min(r.gained for r in want.values())
    for number, one in want.items():
        other = got[number]
        assert (other.temperature, other.prompt_length) == (one.temperature, one.prompt_length)
        assert torch.equal(other.tokens, one.tokens)
        assert other.features.dtype == torch.float16
        assert torch.allclose(other.features.float(), one.features.float(), atol=1e-2)


def test_numbers_are_read_as_rows_become_free(target: HFModel) -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(7):
            read.append(number)
            yield number

    drawn = respond_in_step(target, MORE, numbers(), rows=2, max_tokens=20, seed=0)
    next(drawn)
    assert read == [0, 1]
    assert len(list(drawn)) == 6
    assert target.cache.nbytes == 0  # what was allotted for them is free again


def test_a_model_that_tracks_no_hidden_states_gives_none() -> None:
    drawn = list(respond_in_step(HFModel(tiny(), self_test=False), MORE, [0, 1], rows=2, max_tokens=8, seed=0))
    assert [r.features.shape for r in sorted(drawn, key=lambda r: r.number)] == [
        (len(PROMPTS[n]) + 7, 0) for n in (0, 1)
    ]


def test_open_rows_are_not_overwritten(target: HFModel) -> None:
    row = prefill(target, [1, 2, 3])
    with pytest.raises(CacheError, match="cannot feed 2 rows of 64: close the open rows"):
        next(respond_in_step(target, [[5]], [0], rows=2, max_tokens=8, seed=0))
    target.close(row)

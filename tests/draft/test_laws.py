"""Candidates of a model's laws: the right tokens, log-probs and entropies, whatever the logits are padded with."""

from __future__ import annotations

import pytest
import torch

from draftree.config import SamplingParams
from draftree.draft.drawing import Drawing
from draftree.draft.laws import Laws
from draftree.sequence import Sequence
from draftree.text import text_stream

VOCAB = 8192


def sequence(temperature: float) -> Sequence:
    return Sequence([1], SamplingParams(temperature=temperature), 9, frozenset(), text_stream(None, (), [1]))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drawing", [Drawing.TOP, Drawing.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_candidates_are_those_of_log_softmax(temperature: float, drawing: Drawing, spread: float) -> None:
    logits = torch.randn((1, 3, VOCAB), generator=torch.Generator().manual_seed(0)) * spread
    logits[..., -192:] = float("-inf")
    nodes = [(sequence(temperature), n) for n in range(3)]
    found = Laws(drawing).candidates(nodes, logits, torch.zeros(3, dtype=torch.int64), torch.arange(3), 5)
    law = (logits[0].double() / (temperature or 1.0)).log_softmax(-1)
    assert torch.equal(found.tokens, law.topk(5).indices)
    torch.testing.assert_close(found.logprobs.double(), law.topk(5).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.entropies.double(), torch.special.entr(law.exp()).sum(-1), atol=1e-4, rtol=0)


def test_some_columns_of_several_rows_can_be_asked_for() -> None:
    logits = torch.randn((2, 3, VOCAB), generator=torch.Generator().manual_seed(0))
    batch, column = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    names = [torch.arange(VOCAB) + 7, torch.arange(VOCAB - 64) + 9]
    logits[1, :, -64:] = float("-inf")
    found = Laws(Drawing.TOP).candidates([(sequence(0.0), n) for n in range(3)], logits, batch, column, 4, names)
    want = logits[batch, column].topk(4).indices + torch.tensor([[7], [9], [9]])
    assert torch.equal(found.tokens, want)

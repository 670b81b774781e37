"""The target's most probable successors: what topk finds, packed for one transfer."""

from __future__ import annotations

import pytest
import torch

from draftree.sampling import Successors, successors


@pytest.mark.parametrize(("vocab", "count"), [(64, 8), (1000, 3), (4096, 8), (50257, 8), (7, 8)])
@pytest.mark.parametrize("rows", [1, 8, 19])
def test_they_are_the_largest_of_the_distribution_in_order(vocab: int, count: int, rows: int) -> None:
    logits = torch.randn((2, rows, vocab), generator=torch.Generator().manual_seed(vocab + rows)) * 3
    packed = successors(logits, count)
    logprobs = logits.log_softmax(-1)
    want = logprobs.topk(min(count, vocab))
    for b in range(2):
        found = Successors.unpack(packed[b])
        assert torch.equal(found.tokens, want.indices[b])
        assert torch.allclose(found.logprobs, want.values[b])

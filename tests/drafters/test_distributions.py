"""Candidates of a model's distributions: the right tokens, log-probs and entropies; and the noise that they foresee."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.drafters.heads.draft_logits import DraftLogits
from draftree.models.huggingface.torch_sampling import gumbel_noise, warp
from draftree.request import Request
from draftree.sampling.noise import stream_key
from draftree.text.detokenizer import NoText
from draftree.tree import Drawing

VOCAB, WIDTH = 40, 6
LARGE = 8192
HISTORY = [3, 1, 2]


def request(params: SamplingParams, ids: list[int] = HISTORY) -> Request:
    return Request(ids, params, 9, frozenset(), NoText())


def logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picks(row: Tensor, params: SamplingParams, position: int) -> Tensor:
    """[V] the distribution of the target's pick, by the module's formula."""
    if not params.temperature:
        return row.log_softmax(-1)
    noise = gumbel_noise([stream_key(params.seed or 0, position)], VOCAB)[0].float()
    return (params.temperature * (warp(row[None], params.warping)[0] + noise)).log_softmax(-1)


LAWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.5, top_k=10, seed=6),
    SamplingParams(temperature=1.3, top_p=0.9, seed=7),
]


@pytest.mark.parametrize("params", LAWS)
@pytest.mark.parametrize("reduced", [False, True])
def test_layers_foresee_the_noise_of_their_own_positions(params: SamplingParams, reduced: bool) -> None:
    known = torch.arange(VOCAB - 1, -1, -1) if reduced else None  # entry i is token V - 1 - i
    distributions, made = DraftLogits(Drawing.COUPLED), request(params)
    for depth in range(3):
        row = logits(VOCAB, seed=depth)
        shown = row.flip(0) if reduced else row
        names = [] if known is None else [known]
        found = distributions.candidates([(made, depth)], shown[None], [0], WIDTH, names, depths=[depth])
        distribution = picks(row, params, len(HISTORY) + depth)
        want = distribution.topk(WIDTH)
        assert found.tokens[0].tolist() == want.indices.tolist()
        assert np.allclose(found.logprobs[0], want.values, atol=1e-5)
        assert float(found.entropies[0]) == pytest.approx(float(torch.special.entr(distribution.exp()).sum()), abs=1e-4)


def test_nodes_of_many_sequences_and_depths_have_the_noise_of_their_own() -> None:
    requests = [request(params, [*HISTORY, *range(i)]) for i, params in enumerate(LAWS)]
    asked = [(requests[b], b) for b in (2, 0, 1, 3, 1, 2)]
    depths = [0, 1, 0, 2, 1, 2]
    rows = logits(len(asked), VOCAB)
    found = DraftLogits(Drawing.COUPLED).candidates(asked, rows, range(len(asked)), WIDTH, depths=depths)
    for f, (made, _) in enumerate(asked):
        want = picks(rows[f], made.params, len(made.ids) + depths[f]).topk(WIDTH)
        assert found.tokens[f].tolist() == want.indices.tolist()
        assert np.allclose(found.logprobs[f], want.values, atol=1e-5)


def test_a_model_that_is_nearly_right_is_believed_as_often_as_it_says() -> None:
    """With errors of its logits as large as it allows for, the first candidate comes true as often as it claims;
    without the noise it would claim less and be right less often."""
    count, hits, claimed, blind = 3000, 0, 0.0, 0
    for seed in range(count):
        params = SamplingParams(temperature=1.0, seed=seed)
        guess = logits(VOCAB, seed=seed)
        error = -torch.empty(VOCAB).exponential_(generator=torch.Generator().manual_seed(seed + count)).log()
        said = int((guess + error + gumbel_noise([stream_key(seed, len(HISTORY))], VOCAB)[0]).argmax())
        found = DraftLogits(Drawing.COUPLED).candidates([(request(params), -1)], guess[None], [0], 1, depths=[0])
        hits += int(found.tokens[0, 0]) == said
        claimed += float(np.exp(found.logprobs[0, 0]))
        blind += int(guess.argmax()) == said
    assert hits / count == pytest.approx(claimed / count, abs=4 * 0.5 / count**0.5)
    assert hits > 1.3 * blind


@pytest.mark.parametrize("drawing", [Drawing.TOP, Drawing.WITHOUT_REPLACEMENT])
def test_only_match_verification_sees_the_noise(drawing: Drawing) -> None:
    row = logits(VOCAB)
    found = [
        DraftLogits(drawing).candidates([(made, -1)], row[None], [0], WIDTH, depths=[0]).tokens.tolist()
        for made in (request(SamplingParams(temperature=1.0, seed=seed)) for seed in range(5))
    ]
    assert found == [[row.topk(WIDTH).indices.tolist()]] * 5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_candidates_are_those_of_log_softmax(temperature: float, spread: float) -> None:
    logits = torch.randn((3, LARGE), generator=torch.Generator().manual_seed(0)) * spread
    logits[..., -192:] = float("-inf")
    nodes = [(request(SamplingParams(temperature=temperature)), n) for n in range(3)]
    drawing = Drawing.WITHOUT_REPLACEMENT if temperature else Drawing.COUPLED  # no noise is known
    found = DraftLogits(drawing).candidates(nodes, logits, range(3), 5, depths=[0] * 3)
    distribution = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    assert np.array_equal(found.tokens, distribution.topk(5).indices)
    assert np.allclose(found.logprobs, distribution.topk(5).values, atol=1e-4, rtol=0)
    assert np.allclose(found.entropies, torch.special.entr(distribution.exp()).sum(-1), atol=1e-4, rtol=0)


def test_some_columns_of_several_rows_can_be_asked_for() -> None:
    logits = torch.randn((6, LARGE), generator=torch.Generator().manual_seed(0))
    one, other, slots = torch.arange(LARGE) + 7, torch.arange(LARGE - 64) + 9, [2, 3, 4]
    logits[3:, -64:] = float("-inf")
    found = DraftLogits(Drawing.COUPLED).candidates(
        [(request(SamplingParams()), n) for n in range(3)], logits, slots, 4, [one, other, other], depths=[0] * 3
    )
    want = logits[slots].topk(4).indices + torch.tensor([[7], [9], [9]])
    assert np.array_equal(found.tokens, want)

"""Candidates of a model's distributions: the right tokens, log-probs and entropies; and the noise that they foresee."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.drafters.base import UnscoredNode
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ngram import candidates_of
from draftree.models.base import prefill_scored
from draftree.models.huggingface.torch_scores import HeadScores, TorchScores, gumbel_noise, warp
from draftree.policies.base import NO_CANDIDATES
from draftree.request import Request
from draftree.sampling.warping import Warping, stream_key
from draftree.scores import Draft, Edit, NumpyScores, Scores
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT

from ..toy import ToyModel

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
    noise = gumbel_noise([stream_key(params.seed or 0, position)], torch.arange(VOCAB)[None])[0].float()
    return (params.temperature * (warp(row[None], params.warping)[0] + noise)).log_softmax(-1)


LAWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.5, top_k=10, seed=6),
    SamplingParams(temperature=1.3, top_p=0.9, seed=7),
]


KINDS = ("numpy", "torch", "head")


def scores_of(kind: str, rows: Tensor) -> Scores:
    """Scores of [W, V] logits: of a head that has its tokens the other way round."""
    if kind == "head":
        ids = torch.arange(rows.shape[1] - 1, -1, -1).expand(len(rows), -1)
        return HeadScores(rows.flip(1), ids, [len(rows)])
    return TorchScores(rows, [len(rows)]) if kind == "torch" else NumpyScores(rows.numpy(), [len(rows)])


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_foresee_the_noise_of_their_own_positions(kind: str) -> None:
    """Of rows of many requests and depths; those at temperature 0 are the model's own."""
    rows, depths = logits(len(LAWS) * 3, VOCAB), [*range(3)] * len(LAWS)
    params = [law for law in LAWS for _ in range(3)]
    positions = [len(HISTORY) + depth for depth in depths]
    keys = [stream_key(p.seed or 0, position) for p, position in zip(params, positions, strict=True)]
    order = [5, 0, 11, 3, 4, 7, 8, 1, 2, 6, 9, 10]
    draft = Draft([params[i].warping for i in order], [keys[i] for i in order])
    found = scores_of(kind, rows).top(order, WIDTH, None, draft)
    for f, i in enumerate(order):
        distribution = picks(rows[i], params[i], positions[i])
        want = distribution.topk(WIDTH)
        some = want.values.isfinite().numpy()  # of those that are ruled out any may come
        assert found.tokens[f][some].tolist() == want.indices[some].tolist()
        assert np.allclose(found.logprobs[f], want.values, atol=1e-5)
        assert float(found.entropies[f]) == pytest.approx(float(torch.special.entr(distribution.exp()).sum()), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_score_their_own_tokens(kind: str) -> None:
    """Masks, draws and log-probabilities too are by the target's tokens."""
    rows = logits(3, VOCAB)
    plain, scores = NumpyScores(rows.numpy(), [3]), scores_of(kind, rows)
    mask = np.array([0b1011 << 7, 0b11], np.uint32)
    edits = [Edit(mask=mask), Edit(), Edit(mask=np.zeros(2, np.uint32))]
    slots, keys, warpings = [0, 1, 2], [3, 4, 5], [law.warping for law in LAWS[:3]]
    for given in (None, edits):
        assert scores.argmax(slots, given).tolist() == plain.argmax(slots, given).tolist()
        assert scores.draw(slots, keys, warpings, given).tolist() == plain.draw(slots, keys, warpings, given).tolist()
        assert scores.top([2, 0], 2, given and given[::-2]).tokens.tolist() == (
            plain.top([2, 0], 2, given and given[::-2]).tokens.tolist()
        )
    assert np.allclose(
        scores.log_probabilities(slots, [7, 8, 39]), plain.log_probabilities(slots, [7, 8, 39]), atol=1e-5
    )


@pytest.mark.parametrize("coupled", [True, False])
def test_a_draft_model_scores_each_depth_with_its_own_noise(coupled: bool) -> None:
    """With coupled candidates alone."""
    model, params = ToyModel(VOCAB, seed=2), LAWS[1]
    made = request(params)
    scorer = ModelSource(model, VOCAB).scorer([made], coupled)
    below, text = [UnscoredNode(0, ROOT, ROOT, 0), UnscoredNode(0, 0, ROOT, 5), UnscoredNode(0, 1, 0, 9)], [*HISTORY]
    for depth, node in enumerate(below):
        text += [node.token] * (node.node != ROOT)
        row = torch.from_numpy(prefill_scored(ToyModel(VOCAB, seed=2), text)[1].logits([0])[0])
        seen = picks(row, params, len(HISTORY) + depth) if coupled else row
        assert scorer.score([node], WIDTH)[0].tokens == seen.topk(WIDTH).indices.tolist()


def test_a_draft_model_with_more_tokens_drafts_the_targets_alone() -> None:
    model, made = ToyModel(VOCAB, seed=2), request(LAWS[1])
    scorer = ModelSource(model, 7).scorer([made], coupled=False)
    found = scorer.score([UnscoredNode(0, ROOT, ROOT, 0)], WIDTH)[0]
    row = torch.from_numpy(prefill_scored(ToyModel(VOCAB, seed=2), HISTORY)[1].logits([0])[0])[:7].log_softmax(-1)
    assert found.tokens == row.topk(WIDTH).indices.tolist()
    assert np.allclose(found.logprobs, row.topk(WIDTH).values, atol=1e-5)
    assert len(scorer.distributions([(0, ROOT)])[0].logits) == 7


def test_a_model_that_is_nearly_right_is_believed_as_often_as_it_says() -> None:
    """With errors of its logits as large as it allows for, the first candidate comes true as often as it claims;
    without the noise it would claim less and be right less often."""
    count, hits, claimed, blind = 1000, 0, 0.0, 0
    for seed in range(count):
        params = SamplingParams(temperature=1.0, seed=seed)
        guess = logits(VOCAB, seed=seed)
        error = -torch.empty(VOCAB).exponential_(generator=torch.Generator().manual_seed(seed + count)).log()
        said = int(
            (guess + error + gumbel_noise([stream_key(seed, len(HISTORY))], torch.arange(VOCAB)[None])[0]).argmax()
        )
        draft = Draft([params.warping], [stream_key(seed, len(HISTORY))])
        found = NumpyScores(guess[None].numpy(), [1]).top([0], 1, None, draft)
        hits += int(found.tokens[0, 0]) == said
        claimed += float(np.exp(found.logprobs[0, 0]))
        blind += int(guess.argmax()) == said
    assert hits / count == pytest.approx(claimed / count, abs=4 * 0.5 / count**0.5)
    assert hits > 1.3 * blind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_candidates_are_those_of_log_softmax(kind: str, temperature: float, spread: float) -> None:
    logits = torch.randn((3, LARGE), generator=torch.Generator().manual_seed(0)) * spread
    logits[..., -192:] = float("-inf")
    found = scores_of(kind, logits).top(range(3), 5, None, Draft([Warping(temperature)] * 3))
    distribution = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    assert np.array_equal(found.tokens, distribution.topk(5).indices)
    assert np.allclose(found.logprobs, distribution.topk(5).values, atol=1e-4, rtol=0)
    assert np.allclose(found.entropies, torch.special.entr(distribution.exp()).sum(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_candidates_of_few_tokens_are_cut_to_the_width_and_not_renormalised(width: int) -> None:
    found = candidates_of({4: 0.5, 3: 0.25, 2: 0.125}, width)
    assert list(found.tokens) == [4, 3, 2][:width]
    assert [math.exp(x) for x in found.logprobs] == pytest.approx([0.5, 0.25, 0.125][:width])
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in (0.5, 0.25, 0.125, 0.125)))
    assert not candidates_of({}, width).tokens and candidates_of({}, width).entropy == NO_CANDIDATES.entropy == 0

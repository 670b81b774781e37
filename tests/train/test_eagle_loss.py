"""What is trained is what drafts: unrolled steps equal a head's own drafting, and padding changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree.models.base import FINAL_STATE, FeatureSpec, Nodes, prefill
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.huggingface.cache import feature_part, feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.train.eagle_fit import Batch, loss, unrolled
from draftree.train.responses import Response

from ..heads import frozen, random_head, random_network
from ..published import Recipe, eagle_head
from ..tiny import VOCAB, tiny

LONG = [5, 9, 2, 33, 7, 21, 60, 4, 4, 18, 29, 50, 3, 11]
STEPS = 4


@pytest.fixture(scope="module")
def target() -> HFModel:
    model = HFModel(tiny(), self_test=False)
    model.track_features(FeatureSpec((0, 1, 2)) | FINAL_STATE)
    return model


def response(target: HFModel, ids: list[int], prompt: int) -> Response:
    row = prefill(target, ids)
    features = feature_row(row).last_features()[:-1].clone()
    target.close(row)
    return Response(0, 0.0, prompt, torch.tensor(ids), features, feature_row(row).tracked)


def made(kind: str, target: HFModel, folder: Path) -> HeadModel:
    """A head with random weights: draftree's own, or EAGLE-3."""
    return random_head(target) if kind == "eagle" else eagle_head(Recipe().save(folder), target)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_unrolled_steps_equal_drafting(kind: str, target: HFModel, tmp_path: Path) -> None:
    head = made(kind, target, tmp_path)
    learned = response(target, LONG, prompt=5)
    features = feature_part(learned.tracked, learned.features, head.features)
    batch = Batch.of([response(target, LONG[3:9], prompt=2), learned], torch.device("cpu"), head.features)
    predicted = unrolled(head.network, target.embeddings(torch.arange(VOCAB)), batch, STEPS)
    for root in range(5, 9):
        row = head.open()
        head.advance([row], [learned.tokens[1 : root + 1].tolist()], [features[:root]])
        for depth in range(1, STEPS):
            head.extend([row], [Nodes([int(learned.tokens[root + depth])], [depth - 2])])
        for depth in range(STEPS):
            assert torch.allclose(predicted[depth][1, root - 4 + depth], row.predicted[depth], atol=1e-4)
        head.close(row)


def test_the_truth_is_the_hidden_state_of_the_position_itself(target: HFModel) -> None:
    learned = response(target, LONG, prompt=5)
    batch = Batch.of([learned], torch.device("cpu"))
    at = batch.at[batch.valid]
    final = feature_part(learned.tracked, learned.features, FINAL_STATE)
    assert torch.equal(batch.truth[batch.valid], final[4:])
    assert torch.equal(batch.tokens[0, at], learned.tokens[4:-1])
    assert torch.equal(batch.features[0, at], final[3:-1])
    two = Batch.of([learned], torch.device("cpu"), FeatureSpec((2, 0)))
    wanted = feature_part(learned.tracked, learned.features, FeatureSpec((2, 0)))
    assert torch.equal(two.features[0, at], wanted[3:-1]) and torch.equal(two.truth, batch.truth)


def test_a_prompt_of_one_token_has_no_hidden_state_before_it(target: HFModel) -> None:
    batch = Batch.of([response(target, LONG[:4], prompt=1)], torch.device("cpu"))
    assert batch.at[batch.valid].tolist() == [0, 1]


@torch.no_grad()
def test_padding_has_no_part_in_the_loss(target: HFModel) -> None:
    head, parts = random_head(target), frozen(target, torch.arange(VOCAB))
    one, two = response(target, LONG, prompt=5), response(target, LONG[2:10], prompt=4)

    def of(*responses: Response) -> float:
        batch = Batch.of(responses, torch.device("cpu"))
        predicted = unrolled(head.network, parts.embeddings, batch, 1)
        return float(loss(head.network, predicted, batch, parts.weight, None, decay=1.0, feature_weight=0.5))

    counts = [len(r.features) - r.prompt_length + 1 for r in (one, two)]
    mean = sum(n * of(r) for n, r in zip(counts, (one, two), strict=True)) / sum(counts)
    assert of(one, two) == pytest.approx(mean, rel=1e-4)


@torch.no_grad()
def test_the_loss_is_least_for_the_truth(target: HFModel) -> None:
    parts, network = frozen(target, torch.arange(VOCAB)), random_network(target)
    batch = Batch.of([response(target, LONG, prompt=5)], torch.device("cpu"))
    p = torch.nn.functional.linear(batch.truth[batch.valid], parts.weight).softmax(-1)
    entropy = float(-(p * p.log()).sum(-1).mean())
    best = float(loss(network, [batch.truth], batch, parts.weight, None, decay=1.0, feature_weight=1.0))
    assert best == pytest.approx(entropy, rel=1e-4)
    assert float(loss(network, [batch.truth + 0.3], batch, parts.weight, None, decay=1.0, feature_weight=1.0)) > best

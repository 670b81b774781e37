"""Hidden states of the target: the right ones, for the right tokens, only where asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftree.errors import CacheError, UnsupportedModelError
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface import HFModel

from ..tiny import FAMILIES, tiny

PROMPT = [3, 1, 4, 1, 5]
TREE = Nodes(torch.tensor([9, 2, 6, 5]), torch.tensor([-1, -1, 1, 2]))


def tracked(kind: str = "llama") -> HFModel:
    model = HFModel(tiny(kind), self_test=False)
    model.track_features()
    return model


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_they_are_what_the_output_layer_turns_into_logits(kind: str) -> None:
    model = tracked(kind)
    row = prefill(model, PROMPT)
    features = row.waiting_features()
    causal = model.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert torch.allclose(model.model.get_output_embeddings()(features), causal, atol=1e-4)


def test_a_commit_keeps_those_of_its_path() -> None:
    model = tracked()
    rows = [prefill(model, PROMPT), prefill(model, PROMPT[:2])]
    for row in rows:
        row.drop_features()
    model.extend(rows, [TREE, Nodes.chain([7])])
    model.commit(rows[0], [1, 2, 3])
    model.commit(rows[1], [])
    causal = model.model.base_model(input_ids=torch.tensor([[*PROMPT, 2, 6, 5]]), use_cache=False)[0][0]
    assert torch.allclose(rows[0].waiting_features(), causal[len(PROMPT) :], atol=1e-5)
    with pytest.raises(CacheError, match="no hidden states wait"):
        rows[1].waiting_features()


def test_several_commits_wait_until_they_are_dropped() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    for token in (7, 8):
        model.extend([row], [Nodes.chain([token])])
        model.commit(row, [0])
    assert row.waiting_features().shape == (len(PROMPT) + 2, 32)
    row.drop_features()
    assert row.last_features(len(PROMPT) + 2).shape == (len(PROMPT) + 2, 32), "they are kept"


def test_they_are_kept_in_few_pieces() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    for _ in range(100):
        model.extend([row], [Nodes.chain([7])])
        model.commit(row, [0])
        row.drop_features()
    assert len(row.features) < 70
    causal = model.model.base_model(input_ids=torch.tensor([[*PROMPT, *[7] * 100]]), use_cache=False)[0][0]
    assert torch.allclose(row.last_features(len(PROMPT) + 100), causal, atol=1e-4)


def test_nodes_fed_in_two_passes_are_one_path() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    row.drop_features()
    model.extend([row], [Nodes.chain([7])])
    model.extend([row], [Nodes(torch.tensor([8]), torch.tensor([0]))])
    model.commit(row, [0, 1])
    causal = model.model.base_model(input_ids=torch.tensor([[*PROMPT, 7, 8]]), use_cache=False)[0][0]
    assert torch.allclose(row.waiting_features(), causal[len(PROMPT) :], atol=1e-5)


def test_a_fork_has_its_own() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    fork = model.fork(row)
    assert torch.equal(row.waiting_features(), fork.waiting_features())


@pytest.mark.parametrize("length", [2, len(PROMPT), len(PROMPT) + 1])
def test_a_fork_has_those_of_its_tokens_and_nobody_has_read_them(length: int) -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    model.extend([row], [Nodes.chain([7, 8])])
    model.commit(row, [0, 1])
    row.drop_features()
    assert torch.equal(model.fork(row, length).waiting_features(), row.last_features(len(PROMPT) + 2)[:length])


def test_a_fork_of_a_row_that_was_tracked_late_has_what_there_is() -> None:
    model = HFModel(tiny(), self_test=False)
    row = prefill(model, PROMPT)
    model.track_features()
    model.extend([row], [Nodes.chain([7, 8])])
    model.commit(row, [0, 1])
    assert torch.equal(model.fork(row, len(PROMPT) + 1).waiting_features(), row.waiting_features()[:1])
    assert not model.fork(row, len(PROMPT)).features


def test_two_models_on_the_same_weights_read_them_by_one_hook() -> None:
    first = tracked()
    second = first.twin()
    second.track_features()
    one, two = prefill(first, PROMPT), prefill(second, PROMPT[:3])
    first.extend([one], [Nodes.chain([7])])
    second.extend([two], [Nodes.chain([7, 8])])
    first.commit(one, [0])
    second.commit(two, [0, 1])
    assert len(one.waiting_features()) == 6
    assert len(two.waiting_features()) == 5
    assert len(first.model.get_decoder()._forward_hooks) == 1


def test_a_model_that_nobody_asks_keeps_none() -> None:
    model = HFModel(tiny(), self_test=False)
    row = prefill(model, PROMPT)
    model.extend([row], [Nodes.chain([7])])
    model.commit(row, [0])
    assert not row.features
    assert not row.pending


def test_a_model_whose_logits_are_not_its_output_layers_is_refused() -> None:
    weights = tiny()

    class Capped(nn.Module):
        def forward(self, *given: object, **named: object) -> object:
            out = type(weights).forward(weights, *given, **named)
            out.logits = 2 * out.logits.tanh()
            return out

    model = HFModel(weights, self_test=False)
    weights.forward = Capped().forward
    with pytest.raises(UnsupportedModelError, match=r"are not its output layer's .*: use drafter 'lookup'"):
        model.track_features()


def test_a_model_without_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(tiny(), self_test=False)
    monkeypatch.setattr(type(model.model), "get_decoder", lambda self: self)
    with pytest.raises(UnsupportedModelError, match="are not apart"):
        model.track_features()

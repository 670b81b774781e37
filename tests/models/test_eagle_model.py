"""A head's rows: trees equal chains, batches equal single rows, and each logit is of the token that it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftree.errors import CacheError
from draftree.models.base import Nodes, prefill
from draftree.models.heads.eagle_model import HeadModel, HeadRow
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.tree import ROOT

from ..heads import DRAFTED, check_same_costs, random_head
from ..references import extended, prefilled
from ..tiny import VOCAB, tiny

PROMPTS = [[2, 4, 6, 8, 10, 12], [1, 3, 5], [20, 21, 22, 23]]
TREE = Nodes([2, 8, 4], [ROOT, ROOT, ROOT])
BELOW = Nodes([6, 10, 12, 14], [0, 0, 2, 1])
DEEPER = Nodes([16, 18], [4, 6])
PATHS = {3: [2, 6], 4: [2, 10], 5: [4, 12], 6: [8, 14], 7: [2, 10, 16], 8: [8, 14, 18]}
"""Node -> tokens down to it."""


@pytest.fixture
def target() -> HFModel:
    return HFModel(tiny(), self_test=False)


def fed(head: HeadModel, target: HFModel, prompt: list[int]) -> tuple[HeadRow, Tensor]:
    """A row with all of a prompt, and the logits after it."""
    row = prefill(target, prompt)
    new = head.open()
    logits = head.advance([new], [prompt[1:]], [feature_row(row).last_features()[:-1]]).tensor
    target.close(row)
    return new, logits


def chain(head: HeadModel, target: HFModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """The logits after drafting ``tokens`` one after the other."""
    row, _ = fed(head, target, prompt)
    for i, token in enumerate(tokens):
        logits = extended(head, [row], [Nodes([token], [i - 1])])[0, 0]
    head.close(row)
    return logits


def test_tree_logits_equal_chain_logits_along_each_path(target: HFModel) -> None:
    head = random_head(target)
    row, _ = fed(head, target, PROMPTS[0])
    first = extended(head, [row], [TREE])[0]
    logits = torch.cat([first, extended(head, [row], [BELOW])[0], extended(head, [row], [DEEPER])[0]])
    for node, tokens in PATHS.items():
        assert torch.allclose(logits[node], chain(head, target, PROMPTS[0], tokens), atol=1e-4), node


def test_rows_of_a_batch_do_not_see_each_other(target: HFModel) -> None:
    head, trees = random_head(target), [TREE, Nodes.chain([30]), Nodes([8, 9], [-1, -1])]
    alone = []
    for prompt, tree in zip(PROMPTS, trees, strict=True):
        row, after = fed(head, target, prompt)
        alone.append((after[0], extended(head, [row], [tree])[0]))
        head.close(row)
    opened = [prefill(target, p) for p in PROMPTS]
    rows = [head.open() for _ in PROMPTS]
    features = [feature_row(row).last_features()[:-1] for row in opened]
    after = head.advance(rows, [p[1:] for p in PROMPTS], features).tensor
    logits = extended(head, rows, trees)
    for b, (own_after, own) in enumerate(alone):
        size = len(head.vocabulary_of(rows[b]))
        assert torch.allclose(after[b, :size], own_after[:size], atol=1e-4)
        assert torch.allclose(logits[b, : len(own), :size], own[:, :size], atol=1e-4)
        assert bool((logits[b, : len(own), size:] == float("-inf")).all())


def test_tokens_in_pieces_equal_tokens_at_once(target: HFModel) -> None:
    head, prompt = random_head(target), PROMPTS[0]
    features = feature_row(prefill(target, prompt)).last_features()
    row = head.open()
    head.advance([row], [prompt[1:3]], [features[:2]])
    head.extend([row], [TREE])  # what was drafted is forgotten
    logits = head.advance([row], [prompt[3:]], [features[2:-1]]).tensor
    assert torch.allclose(logits, fed(head, target, prompt)[1], atol=1e-4)


@torch.no_grad()
def test_the_vocabulary_is_a_bijection_onto_its_image(target: HFModel) -> None:
    head = random_head(target)
    row, logits = fed(head, target, PROMPTS[0])
    tokens = head.vocabulary_of(row)
    assert tokens.tolist() == DRAFTED.tolist()  # the prompt's tokens are all in it
    features = row.predicted[0]
    full = target.model.get_output_embeddings()(features)
    assert torch.allclose(logits[0, : len(tokens)], full[tokens], atol=1e-4)
    row, logits = fed(head, target, PROMPTS[2])
    tokens = head.vocabulary_of(row)
    assert tokens.tolist() == [*DRAFTED.tolist(), 21, 23]
    assert bool((logits[0, len(tokens) :] == float("-inf")).all())
    full = target.model.get_output_embeddings()(row.predicted[0])
    assert torch.allclose(logits[0, : len(tokens)], full[tokens], atol=1e-4)


def test_committed_nodes_stay_as_they_were_drafted(target: HFModel) -> None:
    head = random_head(target)
    row, _ = fed(head, target, PROMPTS[0])
    head.extend([row], [TREE])
    wanted = extended(head, [row], [BELOW])[0, 2]
    head.commit(row, [2])
    assert row.length == len(PROMPTS[0])
    assert torch.allclose(extended(head, [row], [Nodes.chain([12])])[0, 0], wanted, atol=1e-4)


def test_a_fork_goes_its_own_way(target: HFModel) -> None:
    head = random_head(target)
    row, _ = fed(head, target, PROMPTS[0])
    wanted = extended(head, [row], [TREE])
    fork = head.fork(row)
    head.close(row)
    assert torch.allclose(extended(head, [fork], [TREE]), wanted, atol=1e-4)


def test_closing_a_row_leaves_the_others(target: HFModel) -> None:
    head = random_head(target)
    (first, _), (second, _) = fed(head, target, PROMPTS[0]), fed(head, target, PROMPTS[1])
    wanted = extended(head, [second], [Nodes.chain([30])])
    head.commit(second, [])
    head.close(first)
    assert torch.allclose(extended(head, [second], [Nodes.chain([30])]), wanted, atol=1e-4)
    with pytest.raises(CacheError, match="closed"):
        head.extend([first], [Nodes.chain([30])])


def test_a_parent_must_have_been_drafted_before(target: HFModel) -> None:
    head = random_head(target)
    row, _ = fed(head, target, PROMPTS[0])
    with pytest.raises(CacheError, match="predicted"):
        head.extend([row], [Nodes.chain([2, 4])])
    assert not len(row.parents)
    with pytest.raises(CacheError, match="node 0"):
        head.commit(row, [0])


def test_passes_can_be_measured_without_a_target(target: HFModel) -> None:
    head = random_head(target)
    made, logits = prefilled(head, [1, 2, 3])
    row = head.checked(made)
    assert row.length == 3
    tokens = head.vocabulary_of(row)
    assert bool(logits[: len(tokens)].isfinite().all())
    assert tokens.max() < VOCAB


def test_a_head_costs_what_its_own_weights_do(target: HFModel) -> None:
    """A backend of others may run targets with experts."""
    dense = random_head(target).capabilities
    target.capabilities = replace(target.capabilities, expert_bytes=10**9, expert_share=1 / 8)
    check_same_costs(dense, random_head(target).capabilities)

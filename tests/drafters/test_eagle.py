"""Decoding with a draft head: the output never changes, whatever the head says; a head that knows is believed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import CacheError
from draftree.models.base import Row, prefill
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.eagle_network import HeadPasses
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.auto import AutoTree
from draftree.policies.methods import METHODS
from draftree.request import Request
from draftree.scores import Scores
from draftree.text.detokenizer import NoText
from draftree.verify.schemes import SCHEMES, find_scheme

from ..heads import DRAFTED, PROMPTS, random_head, trained
from ..pairs import begun, mixed, policy
from ..tiny import VOCAB, tiny


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), self_test=False)


def engine(target: HFModel, head: HeadModel, method: str, nodes: int = 9, scheme: str = "match") -> Engine:
    drafter = TreeDrafter(policy(method), EagleSource(head, VOCAB))
    return Engine(target, Speculation(drafter, nodes, find_scheme(scheme)))


@pytest.mark.parametrize("method", METHODS)
def test_ids_equal_ar_decoding(method: str, target: HFModel) -> None:
    params = mixed(len(PROMPTS), 12)
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    made = engine(target, trained(target), method)
    assert [g.token_ids for g in made.generate(PROMPTS, params)] == plain
    assert made.generate(PROMPTS[:1], params[0])[0].token_ids == plain[0]


@pytest.mark.parametrize("method", METHODS)
def test_ids_equal_ar_decoding_in_an_ensemble(method: str, target: HFModel) -> None:
    params = mixed(len(PROMPTS), 12)
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    ensemble = EnsembleSource((NgramSource(shortest=1), EagleSource(trained(target), VOCAB)))
    made = Engine(target, Speculation(TreeDrafter(policy(method), ensemble), 9))
    assert [g.token_ids for g in made.generate(PROMPTS, params)] == plain
    assert made.generate(PROMPTS[1:2], params[1])[0].token_ids == plain[1]


def test_a_head_that_has_rested_catches_up(target: HFModel) -> None:
    params = SamplingParams(max_tokens=40)
    ensemble = EnsembleSource((NgramSource(shortest=6), EagleSource(trained(target), VOCAB)))
    made = Engine(target, Speculation(TreeDrafter(policy("chain"), ensemble), 4))
    request = begun(made.stepper, made.request(PROMPTS[0], params))
    accepted = []
    for step in range(8):
        ensemble.enable([True, not 2 <= step < 5])
        accepted.append(len(made.stepper.step([request])[0].path))
    made.stepper.close(request)
    assert min(accepted[:2] + accepted[5:]) > 2
    assert accepted[2:5] == [0] * 3
    assert request.output_ids == Engine(target).generate(PROMPTS[:1], params)[0].token_ids[: len(request.output_ids)]


def test_what_a_head_has_yet_to_read_is_known_before_it_drafts(
    target: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for nothing, so that ``auto`` let it read prompts before answers that could not pay for it."""
    head = trained(target)
    source, read = EagleSource(head, VOCAB), list[int]()
    ensemble = EnsembleSource((NgramSource(shortest=6), source))
    own = head.read

    def noted(rows: Sequence[Row], texts: Sequence[Sequence[int]], targets: Sequence[Row]) -> Scores:
        read.append(len(texts[0]))
        return own(rows, texts, targets)

    monkeypatch.setattr(head, "read", noted)
    made = Engine(target, Speculation(TreeDrafter(policy("chain"), ensemble), 4))
    request, expected = begun(made.stepper, made.request(PROMPTS[0], SamplingParams(max_tokens=40))), []
    for step in range(8):
        enabled = not 2 <= step < 5
        ensemble.enable([True, enabled])
        if enabled:
            expected += [count for _, count in source.unread(request)]
        made.stepper.step([request])
    made.stepper.close(request)
    assert read == expected and expected[0] >= len(PROMPTS[0]) - 1 and max(expected[1:]) >= 4


def test_a_text_that_is_read_in_portions_is_drafted_from_as_one_read_whole(target: HFModel) -> None:
    trees = []
    for reading in (None, 1):
        made = engine(target, trained(target), "eagle2")
        request = begun(made.stepper, made.request(PROMPTS[0] * 4, SamplingParams(max_tokens=40)))
        proposed = made.speculation.drafter.propose([request], [Budget(8)], reading=reading)
        while not len(proposed[-1]):
            proposed += made.speculation.drafter.propose([request], [Budget(8)], reading=reading)
        made.stepper.close(request)
        trees.append(proposed)
    (whole,), (*portions, last) = trees
    assert len(portions) > 3 and (last.tokens, last.parents) == (whole.tokens, whole.parents)


def test_a_head_that_knows_the_text_is_accepted(target: HFModel) -> None:
    result = engine(target, trained(target), "chain").generate(PROMPTS[:1], SamplingParams(max_tokens=40))[0]
    assert result.stats.mal > 4  # of 5


def test_only_the_draft_vocabulary_and_the_text_are_drafted(target: HFModel) -> None:
    made = engine(target, random_head(target), "static", nodes=30)
    request = begun(made.stepper, made.request([2, 5, 4], SamplingParams(max_tokens=40)))
    seen: set[int] = set()
    while request.finish_reason is None:
        allowed = {*DRAFTED.tolist(), *request.ids[1:]}
        drafted = set(made.stepper.step([request])[0].tree.tokens)
        assert drafted <= allowed
        seen |= drafted
    made.stepper.close(request)
    assert any(token % 2 for token in seen)  # the text's own tokens, which are not in the vocabulary


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in ("match", "relaxed")])
def test_drawn_children_are_the_same_alone_and_batched(scheme: str, target: HFModel) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=i) for i in range(len(PROMPTS))]
    made = engine(target, random_head(target), "static", scheme=scheme)
    together = [g.token_ids for g in made.generate(PROMPTS, params)]
    assert [made.generate([p], q)[0].token_ids for p, q in zip(PROMPTS, params, strict=True)] == together


def test_entropies_are_of_the_distribution_over_the_draft_vocabulary(target: HFModel) -> None:
    head = random_head(target)
    made = engine(target, head, "chain")
    request = begun(made.stepper, made.request(PROMPTS[0], SamplingParams(max_tokens=8)))
    tree = made.stepper.step([request])[0].tree
    made.stepper.close(request)
    row = head.open()
    ids = [*PROMPTS[0], request.output_ids[0]]
    opened = prefill(target, PROMPTS[0])
    distribution = head.advance([row], [ids[1:]], [feature_row(opened).last_features()]).tensor[0].softmax(-1)
    assert float(tree.entropies[0]) == pytest.approx(float(torch.special.entr(distribution).sum()), abs=1e-4)
    assert float(tree.path_logprobs[0]) == pytest.approx(float(distribution.max().log()), abs=1e-4)


def test_one_pass_for_each_layer(target: HFModel) -> None:
    made = engine(target, random_head(target), "chain")
    request = begun(made.stepper, made.request(PROMPTS[0], SamplingParams(max_tokens=20)))
    assert made.stepper.step([request])[0].step.draft_passes == 4
    made.stepper.close(request)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_loses_no_hidden_states(when: str, target: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(target).generate(PROMPTS[:1], SamplingParams(max_tokens=20))[0].token_ids
    made = engine(target, trained(target), "chain")
    request = begun(made.stepper, made.request(PROMPTS[0], SamplingParams(max_tokens=20)))
    while request.tokens_left > 5:

        def fail(*given: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            if when == "before":
                patch.setattr(HeadPasses, "forward", fail)  # the head's own pass
            else:
                patch.setattr(target._runner, "forward", fail)  # the target's, when the head has drafted
            made.stepper.step([request])
        assert made.stepper.step([request])[0].path
    made.stepper.close(request)
    assert request.output_ids == plain[: len(request.output_ids)]


def test_a_sequence_without_a_row_is_refused(target: HFModel) -> None:
    source = EagleSource(random_head(target), VOCAB)
    drafter = TreeDrafter(policy("chain"), source)
    made = Engine(target, Speculation(drafter))
    request = Request([1, 2, 3], SamplingParams(), 9, frozenset(), NoText())
    with pytest.raises(CacheError, match="open row"):
        made.speculation.drafter.propose([request], [Budget(made.speculation.nodes)])


def test_auto_measures_what_a_head_costs(target: HFModel) -> None:
    plain = Engine(target).generate(PROMPTS, SamplingParams(max_tokens=12))
    made = Engine(target, Speculation(TreeDrafter(AutoTree(), EagleSource(trained(target), VOCAB)), 8))
    found = made.generate(PROMPTS, SamplingParams(max_tokens=12))
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]


def test_drafting_leaves_the_hidden_states_of_the_targets_row(target: HFModel) -> None:
    """The source dropped them from the row, so that nobody else could read them."""
    made = engine(target, trained(target), "chain")
    request = begun(made.stepper, made.request(PROMPTS[0], SamplingParams(max_tokens=12)))
    for _ in range(3):
        made.stepper.step([request])
    assert request.row is not None
    states = feature_row(request.row).last_features()
    assert len(states) == request.row.length
    assert torch.equal(feature_row(request.row).last_features(5), states[-5:])
    with pytest.raises(CacheError):
        feature_row(request.row).last_features(len(states) + 1)
    made.stepper.close(request)

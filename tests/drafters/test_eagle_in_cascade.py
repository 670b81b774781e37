"""A draft head below a middle model reads what that model makes of the pending run, once, and follows the target."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.drafters.base import TokenSource
from draftree.drafters.cascade.stages import CascadeSource
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.heads.eagle import EagleSource
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import CacheError
from draftree.models.base import Nodes, Row, prefill
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.huggingface.features import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.protocols import HeadRow
from draftree.policies.fixed import StaticTree
from draftree.scores import Scores

from ..heads import PROMPTS, random_head, trained
from ..pairs import endless, relative
from ..tiny import VOCAB, tiny


@pytest.fixture(scope="module")
def target() -> HFModel:
    made = HFModel(tiny(), self_test=False)
    made.track_features()
    return made


@pytest.fixture(scope="module")
def middle() -> HFModel:
    """Often right, with hidden states of its own."""
    return HFModel(relative(), self_test=False)


def below(head: HeadModel, middle: HFModel, shape: StaticTree) -> CascadeSource:
    upper = ModelSource(middle.twin(), VOCAB)
    upper.model.track_features()  # type: ignore[attr-defined]
    return endless(CascadeSource(EagleSource(head, VOCAB, verifier=upper), upper, shape))


def engine(target: HFModel, source: TokenSource, depth: int = 8, nodes: int = 12) -> Engine:
    return Engine(target, Speculation(TreeDrafter(StaticTree(1, depth), source), nodes))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [StaticTree(1, 3), StaticTree(2, 3)])
def test_ids_are_those_of_ar_decoding(target: HFModel, middle: HFModel, shape: StaticTree, temperature: float) -> None:
    params = [SamplingParams(max_tokens=14, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    for tree in (StaticTree(1, 8), StaticTree(2, 3)):
        made = Engine(target, Speculation(TreeDrafter(tree, below(random_head(middle), middle, shape)), 12))
        assert [g.token_ids for g in made.generate(PROMPTS, params)] == plain
        assert made.generate(PROMPTS[:1], params[:1])[0].token_ids == plain[0]


def test_ids_are_those_of_ar_decoding_in_an_ensemble(target: HFModel, middle: HFModel) -> None:
    params = SamplingParams(max_tokens=14)
    upper = ModelSource(middle.twin(), VOCAB)
    upper.model.track_features()  # type: ignore[attr-defined]
    ensemble = EnsembleSource((NgramSource(shortest=1), EagleSource(random_head(middle), VOCAB, verifier=upper)))
    made = engine(target, endless(CascadeSource(ensemble, upper, StaticTree(2, 2))))
    want = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    assert [g.token_ids for g in made.generate(PROMPTS, params)] == want


def truth(model: HFModel, ids: list[int]) -> Tensor:
    """[n, H] the model's hidden states, of a pass of its own."""
    row = prefill(model, ids)
    states = feature_row(row).waiting_features().clone()
    model.close(row)
    return states


def test_what_is_fed_are_the_middle_models_states(
    target: HFModel, middle: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node that is fed with hidden states has that of the token before it, in the text that leads to it."""
    head, seen = random_head(middle), 0
    made = below(head, middle, StaticTree(1, 2))
    paths: dict[int, list[int]] = {}
    extend, advance = HeadModel.extend, HeadModel.advance
    drive = engine(target, made)
    request = drive.stepper.open(drive.request(PROMPTS[1], SamplingParams(max_tokens=30)))

    def restarted(model: HeadModel, rows: list[HeadRow], tokens: list[Tensor], features: list[Tensor]) -> Tensor:
        paths.clear()
        paths[-1] = list(request.ids)
        return advance(model, rows, tokens, features)

    def checked(model: HeadModel, rows: list[Row], nodes: list[Nodes], features: list[Tensor] | None = None) -> Scores:
        nonlocal seen
        start = len(rows[0].parents)
        for i, (token, parent) in enumerate(zip(nodes[0].tokens.tolist(), nodes[0].parents.tolist(), strict=True)):
            paths[start + i] = [*paths[parent], token]
            if features is not None:
                torch.testing.assert_close(features[0][i], truth(middle, paths[parent])[-1], rtol=1e-3, atol=1e-4)
                seen += 1
        return extend(model, rows, nodes, features)

    monkeypatch.setattr(HeadModel, "advance", restarted)
    monkeypatch.setattr(HeadModel, "extend", checked)
    while request.finish_reason is None:
        drive.stepper.step([request])
    drive.stepper.close(request)
    assert seen > 15


def test_a_head_that_knows_the_text_is_believed_beyond_the_first_round(target: HFModel) -> None:
    """Reading its own guesses of a pending run's states it is right less often, and never learns what was corrected."""
    params, shares = SamplingParams(max_tokens=36), []
    for reads in (True, False):
        made = below(trained(target), target, StaticTree(1, 2))
        if not reads:
            made = endless(CascadeSource(EagleSource(trained(target), VOCAB), made.upper, StaticTree(1, 2)))
        levels = [g.stats.stages[0] for g in engine(target, made, 10).generate(PROMPTS[:2], params)]
        shares.append(sum(x.accepted for x in levels) / sum(x.proposed for x in levels))
    assert shares[0] > 0.9
    assert shares[0] > shares[1]


@pytest.mark.parametrize(("name", "least"), [("target", 20), ("middle", 3)])
def test_what_the_target_accepts_stays_and_no_more(
    name: str, least: int, target: HFModel, middle: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's cache follows the target: accepted tokens that it has read are not fed again, others do not stay."""
    above = {"target": target, "middle": middle}[name]
    made = below(random_head(above), above, StaticTree(1, 2))
    again, committed, advance = [0], [0], HeadModel.advance

    def counting(model: HeadModel, rows: list[HeadRow], tokens: list[Tensor], features: list[Tensor]) -> Tensor:
        again.append(len(tokens[0]))
        return advance(model, rows, tokens, features)

    monkeypatch.setattr(HeadModel, "advance", counting)
    drive = engine(target, made)
    decoded = drive.stepper.open(drive.request(PROMPTS[1], SamplingParams(max_tokens=30)))
    lower = made.lower
    assert isinstance(lower, EagleSource)
    while (
        decoded.finish_reason is None and decoded.tokens_left > 2
    ):  # before the last tokens the lower level is not asked
        before = len(decoded.ids)
        drive.stepper.step([decoded])
        row = lower._states[decoded].row
        assert before - 1 <= row.length <= len(decoded.ids) - 1
        assert not len(row.parents)
        committed.append(row.length - before + 1)
    drive.stepper.close(decoded)
    assert sum(committed) > least
    assert sum(again) + sum(committed) <= len(decoded.ids)


def test_its_cache_holds_what_a_pass_over_the_text_would_leave(target: HFModel) -> None:
    head = random_head(target)
    made = below(head, target, StaticTree(1, 2))
    drive = engine(target, made)
    request = drive.stepper.open(drive.request(PROMPTS[2], SamplingParams(max_tokens=40)))
    for _ in range(4):
        drive.stepper.step([request])
    lower = made.lower
    assert isinstance(lower, EagleSource)
    own = head.own(lower._states[request].row)
    assert own.length > request.prompt_length
    ids = request.ids[: own.length + 1]
    fresh = head.open()
    head.advance([fresh], [torch.tensor(ids[1:])], [truth(target, ids[:-1])])
    torch.testing.assert_close(own.predicted, fresh.predicted, rtol=1e-3, atol=1e-3)
    head.close(fresh)
    drive.stepper.close(request)


def test_a_state_of_a_node_that_was_not_fed_is_refused(middle: HFModel) -> None:
    row = prefill(middle, [3, 4, 5])
    with pytest.raises(CacheError, match="no hidden state"):
        feature_row(row).pending_feature(0)
    middle.close(row)

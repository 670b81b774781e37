"""Fitting a head: it can learn a text by heart, and it may be interrupted anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.errors import ConfigError, RunError
from draftree.models.base import FeatureSpec
from draftree.models.heads.eagle_network import EagleNetwork
from draftree.models.heads.head_format import EagleConfig
from draftree.models.huggingface.hf_model import HFModel
from draftree.train import eagle_fit
from draftree.train.eagle_fit import DEPTH, RANKS, Batch, Fit, FitRecipe, evaluate
from draftree.train.eagle_training import draft_vocabulary
from draftree.train.head_architectures import new_eagle, regress
from draftree.train.rank_acceptance import TruePath, ranks_along
from draftree.train.responses import Response, replayed

from ..heads import frozen, responses, trained
from ..tiny import VOCAB, tiny


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), self_test=False)


@pytest.fixture(scope="module")
def learned(target: HFModel) -> list[Response]:
    return responses(target)


def made(target: HFModel, learned: Sequence[Response], steps: int, key: str = "key") -> Fit:
    network = new_eagle(EagleConfig.like(target), 0)
    parts = frozen(target, torch.arange(VOCAB))
    regress(network, parts, learned)
    return Fit(FitRecipe(batch=2), network, parts, learned, steps, key)


def test_a_small_text_is_learned_by_heart(target: HFModel, learned: list[Response]) -> None:
    head = trained(target)
    found = evaluate(head.network, frozen(target, torch.from_numpy(head.vocabulary)), learned[:2], 1)
    assert len(found) == DEPTH and all(0.8 < one <= two <= four <= 1 for one, two, four in found)
    both = evaluate(head.network, frozen(target, torch.from_numpy(head.vocabulary)), learned[:2], 2)
    assert np.allclose(both, found)


def test_acceptance_is_that_of_drafting_along_the_responses(target: HFModel, learned: list[Response]) -> None:
    """With the true tokens above, among the tokens that the head always drafts."""
    head, source, policy = trained(target), trained(target), TruePath()
    found = evaluate(head.network, frozen(target, torch.from_numpy(head.vocabulary)), learned[:3], 3)
    drafter, drafts = TreeDrafter(policy, EagleSource(source, VOCAB)), list[list[int | None]]()
    for response in learned[:3]:
        with replayed(drafter, response, 0, source) as replay:
            drafts += ranks_along(replay, policy, depth=DEPTH, stride=1)
    for depth, shares in enumerate(found):
        ranks = [layers[depth] for layers in drafts if len(layers) > depth]
        right = sum(rank is not None and rank < RANKS[-1] for rank in ranks) / len(ranks)
        assert shares[-1] == pytest.approx(right, abs=0.1), depth


def test_the_regression_is_the_best_linear_map(target: HFModel, learned: list[Response]) -> None:
    fit = made(target, learned, 1)
    network = fit.network
    assert network.fc is not None
    scale = network.config.embedding_scale
    inputs, truth = [], []
    for r in learned:
        p = r.prompt_length
        embedded = fit.frozen.embeddings[r.tokens[p - 1 : -1]] * scale
        inputs.append(torch.cat([embedded, r.features[p - 2 : -1].float()], dim=1))
        truth.append(r.features[p - 1 :].float())
    x, y = torch.cat(inputs), torch.cat(truth)
    with torch.no_grad():
        residual = y - network.fc(x)
        correlation = torch.cat([x, torch.ones_like(x[:, :1])], dim=1).T @ residual / len(x)
        assert float(correlation.abs().max()) < 0.05  # nothing linear is left
        before = float((y - y.mean(0)).square().mean())
        assert float(residual.square().mean()) < 0.8 * before


@pytest.mark.parametrize("stops", [(3,), (1, 4, 5)])
def test_resumed_equals_uninterrupted(
    stops: tuple[int, ...], target: HFModel, learned: list[Response], tmp_path: Path
) -> None:
    whole = made(target, learned, 7)
    assert list(whole.run()) == list(range(1, 8))
    for stop in stops:
        part = made(target, learned, 7)
        part.resume(tmp_path / "checkpoint.pt")
        for done in part.run():
            if done == stop:
                break
        part.save(tmp_path / "checkpoint.pt")
    last = made(target, learned, 7)
    assert last.resume(tmp_path / "checkpoint.pt")
    assert list(last.run()) == list(range(stops[-1] + 1, 8))
    for one, two in zip(whole.network.parameters(), last.network.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("stops", [(3,), (5, 7), (9, 10)])
def test_rounds_that_are_resumed_equal_uninterrupted_ones(
    stops: tuple[int, ...], target: HFModel, learned: list[Response], tmp_path: Path
) -> None:
    """Five steps on two responses, then five on all of them."""

    def rounds(fit: Fit, stop: int = 0) -> Fit:
        for _ in fit.run():
            if fit.done == stop:
                return fit
        if not fit.last:
            fit.go_on(fit.frozen, learned, last=True)
            fit.steps = 10
            return rounds(fit, stop)
        return fit

    def begun() -> Fit:
        fit = made(target, learned, 5)
        fit.responses, fit.last = learned[:2], False
        return fit

    whole, path = rounds(begun()), tmp_path / "checkpoint.pt"
    for stop in stops:
        part = made(target, learned, 5) if path.exists() else begun()
        part.resume(path)
        rounds(part, stop).save(path)
    last = made(target, learned, 5)
    assert last.resume(path) and last.responses == (learned[:2] if stops[-1] < 5 else learned)
    assert whole.done == rounds(last).done == 10
    for one, two in zip(whole.best.parameters(), last.best.parameters(), strict=True):
        assert torch.equal(one, two)


def test_before_the_last_round_the_best_network_is_a_mean_of_the_last_ones(
    target: HFModel, learned: list[Response]
) -> None:
    fit, weights = made(target, learned, 20), list[Tensor]()
    fit.last = False
    for _ in fit.run():
        weights.append(parameters_to_vector(fit.network.parameters()).detach())
    mean = parameters_to_vector(fit.best.parameters()).detach()
    away = [float((mean - w).norm()) for w in weights]
    assert 12 <= away.index(min(away)) < 19 and 0 < min(away) < 0.2 * away[0]
    fit.go_on(fit.frozen, learned, last=True)
    assert fit.best is fit.network


@pytest.mark.parametrize("stops", [(), (1, 4), (8,)])
def test_a_round_ends_with_its_time(
    stops: tuple[int, ...],
    target: HFModel,
    learned: list[Response],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of a second each, in a first round of 4 s and a last one until 14 s, with stops of an hour between them."""
    now, drafting, path = [0.0], list[int](), tmp_path / "checkpoint.pt"
    unrolled = eagle_fit.unrolled

    def slow(network: EagleNetwork, embeddings: Tensor, batch: Batch, steps: int) -> list[Tensor]:
        now[0] += 1
        drafting.append(steps)
        return unrolled(network, embeddings, batch, steps)

    monkeypatch.setattr(eagle_fit, "unrolled", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def rounds(fit: Fit, stop: int) -> None:
        for done in fit.run():
            if done == stop:
                fit.save(path)
                now[0] += 3600
                fit = made(target, learned, 1)
                fit.resume(path)
                return rounds(fit, next((s for s in stops if s > stop), 0))
        if not fit.last:
            fit.go_on(fit.frozen, learned, last=True)
            fit.until, fit.steps = 14.0, 1000
            return rounds(fit, stop)
        assert fit.seconds == 14 and fit._optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.0245, rel=1e-2)

    first = made(target, learned, 1000)
    first.until, first.last = 4.0, False
    rounds(first, stops[0] if stops else 0)
    assert drafting == [1, 1, 1, 3, *[1] * 7, 3, 3, 3]


def test_a_round_without_time_has_a_step(target: HFModel, learned: list[Response]) -> None:
    fit = made(target, learned, 1000)
    fit.until = -5.0
    assert list(fit.run()) == [1]


def test_every_response_has_its_turn(target: HFModel, learned: list[Response], monkeypatch: pytest.MonkeyPatch) -> None:
    fit, seen, batch = made(target, learned, 6), list[int](), Batch.of

    def noted(responses: Sequence[Response], device: torch.device, read: FeatureSpec) -> Batch:
        seen.extend(response.number for response in responses)
        return batch(responses, device, read)

    monkeypatch.setattr(Batch, "of", noted)
    assert list(fit.run())[-1] == 6
    rounds = [seen[at : at + 4] for at in range(0, 12, 4)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1


def test_a_checkpoint_of_another_fit_is_refused(target: HFModel, learned: list[Response], tmp_path: Path) -> None:
    made(target, learned, 7, "other").save(tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="other responses"):
        made(target, learned, 7).resume(tmp_path / "checkpoint.pt")


def test_a_fit_goes_on_without_responses_that_are_gone(
    target: HFModel, learned: list[Response], tmp_path: Path
) -> None:
    """A damaged file of responses had to be removed, as its message said, and the checkpoint was refused then."""
    made(target, learned, 7).save(tmp_path / "checkpoint.pt")
    fit = made(target, learned[1:], 7)
    assert fit.resume(tmp_path / "checkpoint.pt")
    assert [r.number for r in fit.responses] == [r.number for r in learned[1:]]
    assert list(fit.run()) == list(range(1, 8))
    fit = made(target, learned, 7)
    fit.responses = [replace(learned[0], number=99)]
    with pytest.raises(ConfigError, match="other responses"):
        fit.resume(tmp_path / "checkpoint.pt")


def test_a_fit_that_goes_on_weighs_embeddings_as_before(
    target: HFModel, learned: list[Response], tmp_path: Path
) -> None:
    """The weight is taken from the first responses that are there, which are others in a later round."""
    begun, later = made(target, learned, 7), made(target, learned, 7)
    begun.network.config = replace(begun.network.config, embedding_scale=2.5)
    begun.save(tmp_path / "checkpoint.pt")
    assert later.resume(tmp_path / "checkpoint.pt")
    assert later.best.config == begun.best.config


def test_a_truncated_checkpoint_is_refused(target: HFModel, learned: list[Response], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    fit = made(target, learned, 7)
    assert not fit.resume(path)
    fit.save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="is damaged"):
        fit.resume(path)


@pytest.mark.parametrize("part", ["key", "network", "optimizers", "steps"])
def test_a_checkpoint_without_a_part_is_refused(
    part: str, target: HFModel, learned: list[Response], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    fit = made(target, learned, 7)
    fit.save(path)
    state = torch.load(path, weights_only=True)
    torch.save({name: value for name, value in state.items() if name != part}, path)
    with pytest.raises(ConfigError, match="is damaged"):
        fit.resume(path)


def test_a_full_disk_leaves_the_last_checkpoint(
    target: HFModel, learned: list[Response], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fit = made(target, learned, 7)
    fit.save(tmp_path / "checkpoint.pt")
    request.getfixturevalue("full_disk")
    with pytest.raises(RunError, match="room there"):
        fit.save(tmp_path / "checkpoint.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"unroll": 0}, {"learning_rate": 0.0}, {"learning_rate": float("nan")}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FitRecipe(**wrong)  # type: ignore[arg-type]


def test_the_draft_vocabulary_is_of_the_most_frequent_tokens() -> None:
    tokens = torch.tensor([9, 9, 9, 9, 5, 5, 5, 7, 7, 2])
    learned = [Response(0, 0.0, 2, tokens, torch.zeros(9, 4))]
    found = draft_vocabulary(learned, 12, 4)
    assert found.tolist() == [2, 5, 7, 9]  # the prompt's two 9 do not count, 9 itself comes twice in the response
    assert draft_vocabulary(learned, 12, 6).tolist() == [0, 1, 2, 5, 7, 9]
    assert draft_vocabulary(learned, 12, 99).tolist() == list(range(12))
    known = torch.tensor([2, 3, 11])  # of the head that training starts from
    assert draft_vocabulary(learned, 12, 6, known).tolist() == [2, 3, 5, 7, 9, 11]
    assert draft_vocabulary(learned, 12, 3, known).tolist() == [5, 7, 9]

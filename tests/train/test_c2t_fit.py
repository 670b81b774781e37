"""Fitting: a known rule is learned, thinned negatives are made up for, and figures are those by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftree.errors import ConfigError, RunError
from draftree.papers.c2t import FEATURES, Classifier
from draftree.train.c2t_fit import ClassifierRecipe, best_of, evaluate, fit
from draftree.train.c2t_samples import Samples

NAMES = list(FEATURES)
QUICK = ClassifierRecipe(batch=128, learning_rate=0.01)
P, H, D = (NAMES.index(name) for name in ("probability", "entropy", "depth"))


def synthetic(count: int, seed: int = 0, prompts: int = 40) -> Samples:
    """Nodes of synthetic trees: acceptance is 0.9 P where the entropy is low, 0.3 P where it is high."""
    rng = torch.Generator().manual_seed(seed)
    given = torch.zeros(count, len(FEATURES))
    given[:, P] = torch.rand(count, generator=rng)
    given[:, H] = 4 * torch.rand(count, generator=rng)
    given[:, D] = torch.randint(0, 10, (count,), generator=rng).float()
    accepted = torch.rand(count, generator=rng) < truth(given)
    return Samples(given, accepted, torch.arange(count) % prompts)


def truth(given: torch.Tensor) -> torch.Tensor:
    return given[:, P] * torch.where(given[:, H] < 2, 0.9, 0.3)


def scores(net: Classifier, samples: Samples) -> torch.Tensor:
    return torch.from_numpy(net.scores(samples.columns(net.features).numpy()))


def test_the_net_learns_a_known_rule() -> None:
    net = fit(synthetic(8000), QUICK, negatives=1.0)
    held = synthetic(5000, seed=1)
    assert float((scores(net, held) - truth(held.features)).abs().mean()) < 0.04
    blind = fit(synthetic(8000), replace(QUICK, features=("probability", "depth")), negatives=1.0)
    assert float((scores(blind, held) - truth(held.features)).abs().mean()) > 0.1


def test_scores_are_probabilities_whatever_share_of_the_negatives_was_kept() -> None:
    whole = synthetic(40_000)
    kept = torch.rand(len(whole.accepted), generator=torch.Generator().manual_seed(2)) < 0.2
    some = whole.take(whole.accepted | kept)
    net = fit(some, QUICK, negatives=0.2)
    held = synthetic(5000, seed=1)
    assert float((scores(net, held) - truth(held.features)).abs().mean()) < 0.04
    assert float((scores(net, held) - truth(held.features)).mean()) == pytest.approx(0.0, abs=0.02)


def test_the_same_seed_gives_the_same_classifier_and_leaves_the_global_one_alone() -> None:
    samples, recipe = synthetic(3000), ClassifierRecipe(epochs=2, seed=4)
    state = torch.random.get_rng_state()
    one = fit(samples, recipe, 1.0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert fit(samples, recipe, 1.0) == one
    assert fit(samples, replace(recipe, seed=5), 1.0) != one


def test_epochs_are_reported() -> None:
    seen: list[int] = []
    fit(synthetic(2000), ClassifierRecipe(epochs=3), 1.0, progress=seen.append)
    assert seen == [1, 2, 3]


def test_the_net_with_the_best_recall_is_chosen_then_the_lowest_positive_rate_then_the_latest() -> None:
    assert best_of([(0.70, 0.01), (0.80, 0.09), (0.75, 0.01)]) == 1
    assert best_of([(0.800, 0.03), (0.795, 0.02), (0.789, 0.01)]) == 1  # the third recalls a hundredth less
    assert best_of([(0.8, 0.02), (0.8, 0.02), (0.8, 0.03)]) == 1
    assert best_of([(0.0, 0.0)]) == 0


def test_an_epoch_that_recalls_less_of_the_prompts_kept_apart_is_not_chosen() -> None:
    """The last epoch was kept, whatever came before it. Here the prompts kept apart follow the opposite rule, so that
    each epoch of learning the rule recalls less of them."""
    samples, held = (s._replace(accepted=s.features[:, P] > 0.5) for s in (synthetic(12_000), synthetic(2000, seed=1)))
    held = held._replace(accepted=~held.accepted)
    recipe = ClassifierRecipe(features=("probability",), epochs=3, batch=64)
    first, last = fit(samples, replace(recipe, epochs=1), 1.0), fit(samples, recipe, 1.0)
    found = [evaluate(net, held, 1.0).betas["0.05"] for net in (first, last)]
    assert found[0][1] > found[1][1] + 0.01
    assert fit(samples, recipe, 1.0, validation=held) == first
    assert fit(samples, recipe, 1.0, validation=held._replace(accepted=held.accepted & False)) == last


@pytest.mark.parametrize("label", [False, True])
def test_labels_that_are_all_equal_are_refused(label: bool) -> None:
    samples = synthetic(8)._replace(accepted=torch.full((8,), label))
    with pytest.raises(RunError, match=f"8 drafted nodes, .*{8 * label}"):
        fit(samples, ClassifierRecipe(), 1.0)


def test_no_samples_at_all_are_refused() -> None:
    with pytest.raises(RunError, match="0 drafted nodes"):
        fit(Samples.joined([]), ClassifierRecipe(), 1.0)


def test_one_prompt_in_twenty_is_kept_apart() -> None:
    learned, apart = synthetic(400, prompts=40).split(20)
    assert apart.numbers.unique().tolist() == [19, 39]
    assert len(learned.accepted) == 380


def test_figures_are_those_by_hand() -> None:
    # A net whose score is sigmoid(10 P - 5): P = 0.5 gives 0.5, P = 0.9 gives 0.982, P = 0 gives 0.007.
    net = Classifier(("probability",), ((10.0,),), (0.0,), (1.0,), -5.0)
    given = torch.zeros(4, len(FEATURES))
    given[:, P] = torch.tensor([0.5, 0.9, 0.9, 0.0])
    accepted = torch.tensor([True, True, False, False])
    samples = Samples(given, accepted, torch.tensor([19, 19, 39, 39]))
    found = evaluate(net, samples, negatives=0.5)  # each negative stands for two
    assert (found.prompts, found.nodes, found.accepted) == (2, 6, 2)
    precision, recall, rate = found.betas["0.3"]
    assert (precision, recall, rate) == pytest.approx((2 / 4, 2 / 2, 4 / 6))
    high, low = 1 / (1 + torch.tensor(-4.0).exp()), 1 / (1 + torch.tensor(5.0).exp())
    loss = -(torch.tensor(0.5).log() + high.log() + 2 * (1 - high).log() + 2 * (1 - low).log()) / 2
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    # Of the three nodes in the top bin one was accepted; the node of 0.5 was; that of 0.007 does not count.
    assert found.calibration_error == pytest.approx((0.5 + abs(3 * float(high) - 1)) / 4, rel=1e-5)


def test_no_prompts_apart_give_no_figures() -> None:
    net = Classifier(("probability",), ((10.0,),), (0.0,), (1.0,), -5.0)
    found = evaluate(net, Samples.joined([]), 0.5)
    assert (found.prompts, found.nodes, found.accepted, found.loss) == (0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 1025}, "hidden is 1025"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"features": ("P",)}, "'P': .*probability"),
        ({"features": ()}, "at least"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ClassifierRecipe(**change)  # type: ignore[arg-type]

"""What is learned of a drafter: how often its first candidates are right, beside what it says of them."""

from __future__ import annotations

import math
from random import Random

import pytest

from draftree.policies.accounts import AutoSettings
from draftree.policies.base import Candidates
from draftree.policies.gain import Trust


def says(probability: float) -> Candidates:
    return Candidates([1, 2], [math.log(probability), math.log((1 - probability) / 2)], 1.0)


def taught(probability: float, true: float, trials: int = 400) -> Trust:
    trust, rng = Trust(AutoSettings(keep=0.98)), Random(1)
    trust.learn([(0, rng.random() < true, math.log(probability)) for _ in range(trials)], 0)
    return trust


def test_it_starts_at_the_drafts_own_probabilities() -> None:
    assert Trust(AutoSettings()).acceptance(says(0.55)) == pytest.approx([0.55, 0.225])


@pytest.mark.parametrize(("probability", "true"), [(0.9, 0.3), (0.3, 0.8), (0.6, 0.6)])
def test_it_ends_at_the_truth(probability: float, true: float) -> None:
    trust = taught(probability, true)
    assert trust.acceptance(says(probability))[0] == pytest.approx(true, abs=0.12)
    assert trust.onward == pytest.approx(true, abs=0.12)


def test_no_candidate_is_likelier_than_its_parent() -> None:
    assert max(taught(0.2, 1.0).acceptance(says(0.9))) == 1.0

"""What a classifier is told of a candidate while a tree grows is what it is told of the finished tree."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from draftree.config import Budget
from draftree.drafters.grow import grow
from draftree.papers.c2t import FEATURES, features, of_frontier, of_tree
from draftree.policies.base import Child, Frontier
from draftree.policies.best_paths import Eagle2Tree
from draftree.tree import DraftTree, Floats

from ..toy import Path, ScriptedScorer

NAMES = tuple(FEATURES)


class Watched(Eagle2Tree):
    """Keeps the features of all candidates, layer by layer: all of them become nodes."""

    seen: list[Floats]

    def grow(self, frontier: Frontier) -> list[Child]:
        self.seen.append(features(of_frontier(frontier), NAMES))
        return super().grow(frontier)


def distribution(row: int, path: Path) -> tuple[list[int], list[float], float]:
    rng = Random(f"{row} {path}")
    weights = sorted((rng.random() + 0.01 for _ in range(4)), reverse=True)
    return [1, 2, 3, 4], [math.log(w / sum(weights)) for w in weights], rng.random()


def test_growing_and_finished_trees_have_the_same_features() -> None:
    policy = Watched(width=4, depth=3)
    object.__setattr__(policy, "seen", [])
    tree = grow(ScriptedScorer(distribution), policy, policy.plan([], [Budget(100)]))[0].tree
    assert len(tree) == 4 + 16 + 16
    assert np.allclose(np.concatenate(policy.seen), features(of_tree(tree), NAMES), atol=1e-6)


def test_each_feature_is_what_its_name_says() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    tree = DraftTree([7, 8, 9], [-1, -1, 0], [1, 1, 2], [half, quarter, 3 * half], [1.0, 1.0, 0.3])
    found = dict(zip(NAMES, features(of_tree(tree), NAMES).T, strict=True))
    want = {
        "probability": [0.5, 0.25, 0.125],
        "entropy": [1.0, 1.0, 0.3],
        "depth": [0, 0, 1],
        "log-probability": [half, quarter, 3 * half],
    }
    for name, values in want.items():
        assert found[name].tolist() == pytest.approx(values), name
    assert set(found) == set(want)


def test_the_empty_tree_has_no_features() -> None:
    assert features(of_tree(DraftTree.empty()), NAMES).shape == (0, len(NAMES))

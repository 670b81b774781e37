"""The net by hand, and its file: what is saved scores the same, and one line for each kind that cannot be used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree.errors import ConfigError, UnknownNameError
from draftree.papers.c2t import CLASSIFIER_FILE, DEFAULT, Classifier, ClassifierFile, read_classifier
from draftree.policies.base import Provenance

NET = Classifier(
    features=("probability", "depth"),
    hidden=((2.0, -1.0), (0.1, 1 / 3), (-4.0, 0.0)),
    bias=(0.0, -0.5, 1.0),
    output=(1.0, -2.0, 0.7),
    threshold=0.25,
)


MADE_FOR = Provenance(target="big", target_weights="0123", drafter="small", drafter_weights="4567")


def random_net(seed: int) -> Classifier:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(48, 3)).astype(np.float32).tolist()
    bias, output = rng.normal(size=(2, 48)).astype(np.float32).tolist()
    return Classifier(("probability", "entropy", "depth"), tuple(map(tuple, hidden)), tuple(bias), tuple(output), 0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = ClassifierFile(NET, MADE_FOR, {"samples": 3}, {"loss": 0.5})
    CLASSIFIER_FILE.write(tmp_path / "net.json", made)
    return tmp_path / "net.json"


def test_a_score_is_two_layers_by_hand() -> None:
    p, r = 0.5, 2.0
    units = [max(0.0, 2 * p - r), max(0.0, 0.1 * p + r / 3 - 0.5), max(0.0, -4 * p + 1)]
    want = 1 / (1 + math.exp(-(units[0] - 2 * units[1] + 0.7 * units[2] + 0.25)))
    assert float(NET.scores(np.array([[[p, r]]], np.float32))[0, 0]) == pytest.approx(want)


def test_the_published_net_has_241_parameters() -> None:
    assert random_net(0).parameters == 241


def test_scores_have_the_shape_of_their_candidates() -> None:
    assert NET.scores(np.ones((4, 5, 2), np.float32)).shape == (4, 5)
    assert NET.scores(np.ones((0, 5, 2), np.float32)).shape == (0, 5)


@pytest.mark.parametrize("seed", range(3))
def test_a_saved_classifier_scores_the_same(seed: int, tmp_path: Path) -> None:
    net, given = random_net(seed), np.random.default_rng(seed).random((100, 3), np.float32)
    CLASSIFIER_FILE.write(tmp_path / "net.json", ClassifierFile(net, MADE_FOR, {}, {}))
    again = read_classifier(str(tmp_path / "net.json"))
    assert np.array_equal(again.classifier.scores(given), net.scores(given))
    assert again.classifier == net
    CLASSIFIER_FILE.write(tmp_path / "again.json", again)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "net.json").read_bytes()


def test_what_it_was_trained_on_comes_back(path: Path) -> None:
    found = read_classifier(str(path))
    assert (found.made_for, found.trained_on, found.held_out) == (MADE_FOR, {"samples": 3}, {"loss": 0.5})


def test_the_one_that_ships_is_small_and_says_what_it_learned_from() -> None:
    found = read_classifier(DEFAULT)
    assert found.classifier.parameters < 1000
    assert found.trained_on["prompts"] and found.held_out["prompts"] > 0
    assert 0 < float(found.classifier.scores(np.zeros(len(found.classifier.features), np.float32))) < 1


def test_a_name_that_is_nothing_is_answered_with_those_that_ship(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="classifier '.*none': .*smollm2-head"):
        read_classifier(str(tmp_path / "none"))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no weights of the drafter": (lambda c: c.pop("drafter_weights"), "drafter_weights"),
    "no weights": (lambda c: c.pop("hidden"), "classifier.hidden: Field required"),
    "another feature set": (lambda c: c.update(features=["probability", "colour"]), "'colour'"),
    "a feature too few": (lambda c: c.update(features=["depth"]), "1 features"),
    "a feature twice": (lambda c: c.update(features=["depth", "depth"]), "each once"),
    "no features": (lambda c: c.update(features=[]), "at least"),
    "no units": (lambda c: c.update(hidden=[], bias=[], output=[]), "classifier.hidden"),
    "too many units": (lambda c: c.update(hidden=[[0, 0]] * 2000), "classifier.hidden: .*1024"),
    "a unit too few": (lambda c: c["bias"].pop(), "weights"),
    "weights that are truths": (lambda c: c.update(bias=[True, False, True]), "classifier.bias.0"),
    "beyond float32": (lambda c: c.update(threshold=1e300), "classifier.threshold"),
    "beyond float64": (lambda c: c.update(threshold=10**400), "corrupt"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_corrupt_file_is_refused_by_what_is_wrong_in_it(case: str, path: Path) -> None:
    change, named = CHANGES[case]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=named) as error:
        read_classifier(str(path))
    assert str(error.value).endswith("give a file that 'draftree train classifier' wrote")


def test_a_file_of_an_older_version_is_refused_with_a_way_out(path: Path) -> None:
    """Version 1 named its models but had no fingerprints of them."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": 1}))
    with pytest.raises(ConfigError, match="version 1, not 2: .*'draftree train classifier'"):
        read_classifier(str(path))

"""Learned widths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftree.cli.main import run
from draftree.config import Budget
from draftree.drafters.ngram import NgramSource
from draftree.drafters.registry import provenance
from draftree.errors import ConfigError
from draftree.policies.c2t import Classifier, ClassifierFile, LearnedTree, LearnedWidth
from draftree.policies.entropy import EntropyTree
from draftree.policies.methods import find_policy

from ..pairs import target
from ..tiny import save_tiny
from ..toy import Script, ScriptedScorer, trees_of

PATHS = Classifier(("probability", "entropy", "depth"), ((4.0, -0.2, 0.0),), (0.1,), (1.5,), -1.0)
WIDTHS = Classifier(("rank", "entropy"), ((-1.0, 1.0), (1.0, -1.0)), (0.0, 0.0), (1.0, -1.0), 0.0, given_parent=True)
"""C = sigmoid(H - rank): at least one half for ranks up to H."""
MADE_FOR = provenance(target(), NgramSource(), "lookup")


def test_a_learned_width_is_the_number_of_ranks_that_are_worth_it() -> None:
    entropies = np.array([0.0, 0.9, 2.5, 100.0], np.float32)
    assert LearnedWidth(WIDTHS, 0.5)(entropies).tolist() == [1, 1, 3, 64]
    assert LearnedWidth(WIDTHS, 0.9)(entropies).tolist() == [0, 0, 1, 64]
    script: Script = lambda row, path: ([1, 2, 3, 4], [-1.0] * 4, 1.5 - len(path))  # noqa: E731
    tree = trees_of(ScriptedScorer(script), EntropyTree(LearnedWidth(WIDTHS, 0.5), depth=3), [Budget(20)])[0]
    assert tree.depths.tolist() == [1, 1, 2, 2]  # entropies 1.5, 0.5, -0.5: two children, one each, none


@pytest.mark.parametrize(
    ("net", "beta", "named"),
    [
        (PATHS, 0.5, "sees probability,entropy,depth: for a width train one with .* entropy,rank --given-parent"),
        (replace(WIDTHS, given_parent=False), 0.5, "sees rank,entropy: for a width"),
        (WIDTHS, 0.0, "beta is 0"),
    ],
)
def test_what_is_no_width_function_is_refused(net: Classifier, beta: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LearnedWidth(net, beta)


def saved(net: Classifier, path: Path) -> str:
    ClassifierFile(net, MADE_FOR, {}, {}).save(path)
    return str(path)


def test_a_width_is_learned_from_a_file(tmp_path: Path) -> None:
    file = saved(WIDTHS, tmp_path / "net.json")
    policy = find_policy("learned-width", {"classifier": file, "beta": "0.5", "depth": "3"})
    assert policy == LearnedTree(LearnedWidth(WIDTHS, 0.5), None, 7, 3, MADE_FOR)
    assert policy.made_for == MADE_FOR


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


def test_the_command_line_drafts_by_a_width_and_gives_the_targets_text(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "the cat in the hat the cat in", "--target", model, "--max-tokens", "20", "--json"]
    assert run([*asked, "--drafter", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    file = tmp_path / "net.json"
    ClassifierFile(WIDTHS, MADE_FOR, {}, {}).save(file)
    assert run([*asked, "--method", "learned-width", "--set", f"classifier={file}"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["token_ids"] == plain["token_ids"]
    assert "learned from" not in printed.err


def test_a_classifier_of_whole_paths_is_refused(tmp_path: Path) -> None:
    file = saved(PATHS, tmp_path / "net.json")
    with pytest.raises(ConfigError, match="train one with 'draftree train classifier .*--given-parent"):
        find_policy("learned-width", {"classifier": file})

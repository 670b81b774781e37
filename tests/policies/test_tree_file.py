"""Tree files: what is written comes back, and one line for each kind of file that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftree.config import SamplingParams
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine, load_engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError, UnknownNameError
from draftree.policies.base import Provenance
from draftree.policies.fixed import TREE_FILE, RankTree, read_tree
from draftree.policies.methods import find_policy

from ..pairs import TREE, save_tree, target
from ..tiny import save_tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_tree(tmp_path / "tree.json", "big", "small")


def test_what_is_saved_comes_back(path: Path, tmp_path: Path) -> None:
    found = read_tree(str(path))
    assert found.made_for == Provenance("big", "small")
    assert found.tree == TREE
    assert found.counts.acceptance[1].tolist() == [0.5, pytest.approx(1 / 6), 0.0, 0.0]
    TREE_FILE.write(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_the_expected_acceptance_length_is_that_of_the_table(path: Path) -> None:
    a = [[0.5, 0.2, 0.1, 0.1], [1 / 2, 1 / 6], [2 / 3]]
    want = 1 + sum(a[0]) + a[0][0] * (a[1][0] + a[1][1] + a[1][0] * a[2][0]) + a[0][1] * a[1][0]
    assert read_tree(str(path)).expected_acceptance_length == pytest.approx(want)


def test_the_file_is_short_and_has_a_line_for_each_field(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + 12
    assert '  "accepted": [[5, 2, 1, 1], [3, 1, 0, 0], [2, 0, 0, 0]],' in lines


def test_the_method_is_the_tree_for_its_models(path: Path) -> None:
    assert find_policy("sequoia", {"tree": str(path)}) == RankTree(TREE, Provenance("big", "small"))


def test_a_drafter_is_not_loaded_for_a_tree_of_other_models(path: Path) -> None:
    policy = find_policy("sequoia", {"tree": str(path)})
    with pytest.raises(ConfigError, match="target 'big', not "):
        load_drafter("lookup", target(), policy)


def test_without_the_file_there_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="tree file '.*none.json': .*'draftree calibrate'"):
        read_tree(str(tmp_path / "none.json"))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no tree": (lambda c: c.pop("tree"), "tree: Field required"),
    "no table": (lambda c: c.pop("accepted"), "counts.accepted: Field required"),
    "a name that is none": (lambda c: c.update(drafter=3), "made_for.drafter"),
    "infinitely many prompts": (lambda c: c.update(prompts=float("inf")), "finite number"),
    "more than is counted": (lambda c: c.update(tree=[[10**20]]), "corrupt"),
    "no nodes": (lambda c: c.update(tree=[]), "0 nodes"),
    "nodes that are none": (lambda c: c.update(tree=[1]), "corrupt"),
    "an orphan": (lambda c: c.update(tree=[[0], [1, 0]]), r"node \[1, 0\] .*\[1\]"),
    "counts that are none": (lambda c: c.update(accepted=[["a"]] * 3), "corrupt"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_corrupt_file_is_refused_by_what_is_wrong_in_it(case: str, path: Path) -> None:
    change, named = CHANGES[case]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=named) as error:
        read_tree(str(path))
    assert str(error.value).endswith("give a file that 'draftree calibrate' wrote")


def test_an_engine_is_made_from_names_and_a_file(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    tree = save_tree(tmp_path / "tree.json", "elsewhere/tiny", "self")
    engine = load_engine(
        str(model), SpeculationParams(drafter="self", method="sequoia", settings={"tree": str(tree)}, nodes=8)
    )
    prompt, params = [3, 14, 15, 9], SamplingParams(max_tokens=20)
    result = engine.generate([prompt], params)[0]
    assert result.token_ids == Engine(target()).generate([prompt], params)[0].token_ids
    assert result.stats.drafted[0] == 4 * result.stats.steps

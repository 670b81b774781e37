"""Growth policies of a user on the command line, as MODULE:ATTRIBUTE."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from draftree.bench.entries import entries
from draftree.bench.results import read_results
from draftree.cli.main import run
from draftree.engine.speculation import SpeculationParams
from draftree.errors import UnknownNameError
from draftree.policies.methods import read_method

Captured = pytest.CaptureFixture[str]
MINE = """
from dataclasses import dataclass
import draftree
from draftree_test_helper import FURTHER

@dataclass
class Mine(draftree.GrowthPolicy):
    width: int = 2
    steep: float = 0.5
    name: str = "mine"
    text: str = "a setting may have any name"
    flag: bool = False

    def grow(self, frontier):
        return frontier.likeliest([self.width] * len(frontier.requests), [FURTHER] * len(frontier.requests))

class Abstract(draftree.GrowthPolicy):
    pass

ready = Mine(3)
number = 4

def made(width=1):
    return Mine(width)

def none():
    return None

def needs(width):
    return Mine(width)
"""
MODULES = {
    "draftree_test_mine": MINE,
    "draftree_test_helper": "FURTHER = False",
    "draftree_test_raises": "1 / 0",
    "draftree_test_ends": "raise SystemExit(0)",
    "draftree_test_syntax": "def (",
    "draftree_test_lacks": "import draftree_test_not_there",
}


def with_modules(modules: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write modules into a folder, which is the working folder from now on; none of them is imported yet."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return with_modules(MODULES, tmp_path, monkeypatch)


def _bench(model: str, out: Path, methods: str, *more: str) -> list[str]:
    (out.parent / "suite.jsonl").write_text('{"prompt": "the cat in the hat"}\n{"prompt": "a b a b a b"}\n')
    words = ["bench", "--suite", str(out.parent / "suite.jsonl"), "--target", model, "--drafters", "self"]
    return [*words, "--max-tokens", "6", "--methods", methods, "--out", str(out), *more]


LARGEST = {"Mine": 2, "Mine:width=4": 4, "ready": 3, "made": 1, "made:width=5": 5, "Mine:width=4:nodes=3": 3}
"""The trees' nodes, of which all are below the root."""


def test_policies_of_ones_own_take_part_with_their_settings(model: str, folder: Path) -> None:
    nodes = {f"draftree_test_mine:{name}": most for name, most in LARGEST.items()}
    assert run(_bench(model, folder / "out", ",".join(nodes), "--limit", "1")) == 0
    steps = {r.method: turn.steps for r in read_results(folder / "out") for turn in r.turns if turn.steps}
    assert {name: max(steps[name].nodes) for name in nodes} == nodes
    rows = json.loads((folder / "out" / "summary.json").read_text())["methods"]
    assert {rows[name]["all"]["ids_equal"] for name in nodes} == {1.0}


def test_a_run_goes_on_with_the_same_policy_alone(model: str, folder: Path, capsys: Captured) -> None:
    """Half of the answers would be another policy's."""
    asked = _bench(model, folder / "out", "draftree_test_mine:Mine")
    assert run(asked) == 0
    results = folder / "out" / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole[: whole.index(b"\n") + 1])
    assert run(asked) == 0
    assert results.read_bytes().count(b"\n") == whole.count(b"\n")
    module = folder / "draftree_test_mine.py"
    module.write_text(MINE + "\n")
    capsys.readouterr()
    assert run(asked) == 2
    assert str(module) in capsys.readouterr().err


def test_a_report_needs_no_module(model: str, folder: Path, capsys: Captured) -> None:
    assert run(_bench(model, folder / "out", "draftree_test_mine:Mine")) == 0
    (folder / "draftree_test_mine.py").unlink()
    del sys.modules["draftree_test_mine"]
    capsys.readouterr()
    assert run(["report", str(folder / "out")]) == 0
    assert "draftree_test_mine:Mine" in capsys.readouterr().out


def test_generate_grows_by_it(model: str, capsys: Captured) -> None:
    words = ["generate", "the cat", "--target", model, "--max-tokens", "6", "--drafter", "self", "--json", "--compare"]
    assert run([*words, "--method", "draftree_test_mine:Mine", "--set", "width=3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ar"]["same_tokens"]
    (drafted,) = report["stats"]["drafted"]
    assert drafted and drafted % 3 == 0


def test_each_contestant_has_a_policy_of_its_own() -> None:
    """What one of them learned would shape the other's trees."""
    both = entries(["draftree_test_mine:ready"], ["lookup", "self"], [0.0])[1:]
    one, other = (entry.speculation("lookup").method for entry in both)
    assert one == other and one is not other


BAD = {
    "draftree_test_none:Mine": "No module named 'draftree_test_none'",
    "draftree_test_mine.inner:Mine": "No module named 'draftree_test_mine.inner'",
    "./draftree_test_mine.py:Mine": "importing ./draftree_test_mine.py raised",
    ":Mine": "importing raised ValueError: Empty module name: write MODULE:NAME",
    "draftree_test_raises:Mine": "importing draftree_test_raises raised ZeroDivisionError: division by zero",
    "draftree_test_ends:Mine": "importing draftree_test_ends raised SystemExit",
    "draftree_test_syntax:Mine": "importing draftree_test_syntax raised SyntaxError",
    "draftree_test_lacks:Mine": "raised ModuleNotFoundError: No module named 'draftree_test_not_there'",
    "draftree_test_mine:Other": "draftree_test_mine.py has no 'Other'",
    "draftree_test_mine:": "draftree_test_mine.py has no ''",
    "draftree_test_mine:number": "raised TypeError: 'int' object is not callable",
    "draftree_test_mine:none": "returned None: return a GrowthPolicy",
    "draftree_test_mine:needs": "missing 1 required positional argument: 'width'",
    "draftree_test_mine:Abstract": "raised TypeError: Can't instantiate abstract class Abstract",
    "builtins:int": "returned 0: return a GrowthPolicy",
    "draftree_test_mine:Mine:width=wide": "width is 'wide'",
    "draftree_test_mine:Mine:height=2": "no setting 'height': it has width, steep, name, text",
    "draftree_test_mine:ready:width=2": "no setting 'width': it has none",
    "chain:depth": "chain:depth",
    "beams:width": "beams:width",
}


@pytest.mark.parametrize("method", BAD)
def test_what_is_no_policy_is_refused_in_one_line(method: str, model: str, folder: Path, capsys: Captured) -> None:
    assert run(_bench(model, folder / "out", method)) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert BAD[method] in line and line.startswith("draftree: ")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("method", [method for method in BAD if method.count(":") == 1 and "beams" not in method])
def test_so_it_is_by_generate(method: str, capsys: Captured) -> None:
    assert run(["generate", "the cat", "--target", "not-loaded", "--method", method]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert BAD[method] in line and line.startswith("draftree: ")


def test_nothing_but_a_command_line_imports() -> None:
    """A request over HTTP names its method too."""
    default = SpeculationParams(drafter="lookup", method=read_method("draftree_test_mine:Mine"))
    with pytest.raises(UnknownNameError, match="draftree_test_raises"):
        replace(default, method="draftree_test_raises:Mine")
    assert "draftree_test_raises" not in sys.modules

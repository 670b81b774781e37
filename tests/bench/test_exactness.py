"""``draftree bench --check-exact``: nothing is found on exact engines, and what is not exact is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from draftree.bench.contestants import Models
from draftree.bench.entries import entries
from draftree.bench.exactness import NODES, REQUESTS, ExactnessCheck, Finding, one_thread, ways
from draftree.cli import bench as command
from draftree.cli.main import run
from draftree.engine.replay import Difference
from draftree.errors import RunError
from draftree.models.base import Nodes, Row
from draftree.scores import Scores

from ..tiny import save_tiny
from ..tiny_gguf import write
from ..toy import ToyModel

Captured = pytest.CaptureFixture[str]
PROMPTS = ["the cat in the hat", "a b a b a b a b", "one the other one"]
WAYS = len(NODES) + len(REQUESTS)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suites") / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return str(path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "tiny.gguf", weights="Q8_0"))


def check(target: str, suite: str, *more: str) -> list[str]:
    return ["bench", "--check-exact", "--suite", suite, "--target", target, "--max-tokens", "12", *more]


def rows(printed: str) -> list[list[str]]:
    """Cells of the table."""
    lines = [line.strip("|").split("|") for line in printed.splitlines()[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


@pytest.mark.parametrize(("backend", "drafter"), [("native", "self"), ("llama.cpp", "lookup")])
def test_nothing_is_found_on_an_exact_engine(
    backend: str, drafter: str, gguf: str, suite: str, capsys: Captured
) -> None:
    assert run(check(gguf, suite, "--drafters", drafter, "--backend", backend, "--threads", "2")) == 0
    found = rows(capsys.readouterr().out)
    ways = [
        (1, *([1] * len(NODES)), *(min(count, 3) for count in REQUESTS), 1),
        (0, *NODES, *[NODES[-1]] * len(REQUESTS), 0),
    ]
    assert [(int(row[2]), int(row[1] or 0)) for row in found] == [*zip(*ways, strict=True)]
    assert [row[3] for row in found] == ["2"] * (1 + WAYS) + ["1"]
    assert all(row[4:] == ["0 of 3", "0", ""] for row in found)


def test_models_of_transformers_are_checked(model: str, suite: str, capsys: Captured) -> None:
    assert run(check(model, suite, "--drafters", "lookup")) == 0
    assert [row[4] for row in rows(capsys.readouterr().out)] == ["0 of 3"] * (1 + WAYS)


def test_a_lossy_scheme_is_found(model: str, suite: str, tmp_path: Path, capsys: Captured) -> None:
    draft, relaxed = str(save_tiny(tmp_path / "draft", seed=1)), "static:verify=relaxed"
    assert run(check(model, suite, "--drafters", draft, "--methods", f"static,{relaxed}")) == 1
    printed = capsys.readouterr()
    found = {name: [row for row in rows(printed.out) if row[0] == name] for name in ("ar", "static", relaxed)}
    assert [len(found[name]) for name in found] == [1, WAYS, WAYS]
    assert all(row[4] == "0 of 3" for name in ("ar", "static") for row in found[name])
    others = [int(row[4].partition(" ")[0]) for row in found[relaxed]]
    assert sum(others) > WAYS and {row[5] for row in found[relaxed]} == {"0"}
    assert [0 < int(row[6] or 0) <= 12 for row in found[relaxed]] == [count > 0 for count in others]
    assert f"{sum(others)} answers" in printed.err.splitlines()[-1]


class WideToy(ToyModel):
    """Its logits change once a pass scores several nodes of a row, as kernels do that round by their width."""

    nodes = 1

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        self.nodes = max(new.scored for new in nodes)
        return super().extend(rows, nodes)

    def after(self, ids: Sequence[int]) -> torch.Tensor:
        return super().after(ids).roll(int(self.nodes > 1))


@pytest.mark.parametrize(("kind", "others"), [(ToyModel, [0] * (1 + WAYS)), (WideToy, [0, *[2] * WAYS])])
def test_a_pass_that_changes_with_its_width_is_found(kind: type[ToyModel], others: list[int]) -> None:
    target, notified = kind(vocab=7), list[int]()
    models = cast(Models, Stub(target))
    contestants = entries(["opt-tree:delta=0.001"], ["lookup"], [0.0])[1:]
    exact = ExactnessCheck([[1, 2, 3, 1, 2], [4, 2, 4, 2]], 40, notified.append)
    findings = list(exact.compare(models, contestants))
    assert [len(finding.differences) for finding in findings] == others
    assert sum(finding.unexplained for finding in findings) == sum(others)
    assert notified == [*range(1, ways(contestants, target.capabilities) * 2 + 1)]


class Stub:
    """In place of ``Models``: one target, and drafters by their names."""

    def __init__(self, target: ToyModel) -> None:
        self.target = target

    def drafter(self, name: str) -> str:
        return name


def test_an_answer_fits_the_model() -> None:
    models = cast(Models, Stub(ToyModel(max_length=20)))
    findings = list(ExactnessCheck([[1] * 18, [2] * 4], 64, lambda _: None).compare(models, []))
    assert [finding.answers for finding in findings] == [2]


@pytest.mark.parametrize(("exact", "unexplained"), [(True, 3), (False, 2)])
def test_an_exact_engine_has_no_near_ties(exact: bool, unexplained: int) -> None:
    """The gap of a near-tie is 0 where two logits are equal, and an exact engine breaks even those as AR decoding."""
    differences = [Difference(4, 0.0, near_tie=True), Difference(2, 1.0, near_tie=False), Difference(9, None, False)]
    finding = Finding("static", 8, 1, 2, 20, differences, exact)
    assert (finding.unexplained, finding.near_ties) == (unexplained, 3 - unexplained)
    assert finding.cells == ["static", "8", "1", "2", "3 of 20", str(3 - unexplained), "3"]


def test_torch_has_one_thread_for_a_while() -> None:
    can, before = ToyModel().capabilities, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread({"dtype": "float32"}, can) as options:
            assert (torch.get_num_threads(), options) == (1, {"dtype": "float32"})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with one_thread({"backend": "native"}, replace(can, tier="avx2")) as options:
        assert options == {"backend": "native", "threads": 1}


def test_what_was_found_is_printed_where_the_model_cannot_be_loaded_again(
    gguf: str, suite: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of hours was lost where memory did not hold the model that runs on one thread."""
    load = Models

    def loaded(target: str, **options: Any) -> Models:
        if options["threads"] == 1:
            raise RunError("no memory")
        return load(target, **options)

    monkeypatch.setattr(command, "Models", loaded)
    assert run(check(gguf, suite, "--drafters", "self", "--backend", "native", "--threads", "2")) == 1
    printed = capsys.readouterr()
    assert len(rows(printed.out)) == 1 + WAYS and "no memory" in printed.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--methods peer:hf-generate", "peer:hf-generate"),
        ("--methods beams:width=2", "beams:width=2"),
        ("--methods opt-tree:nodes=16", "opt-tree:nodes=16"),
        ("--methods auto:credit=2", "credit"),
        ("--temperature 0.5", "leave out --temperature"),
        ("--out runs/one", "--out"),
        ("--nodes 4", "--nodes"),
    ],
)
def test_what_does_not_go_with_it_is_a_line(words: str, named: str, model: str, suite: str, capsys: Captured) -> None:
    assert run(check(model, suite, *words.split())) == 2
    printed: Any = capsys.readouterr().err
    assert len(printed.splitlines()) == 1 and named in printed

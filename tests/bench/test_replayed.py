"""``draftree bench --replay``: trees and acceptance are those of decoding, and no pass verifies a tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftree.bench.results import AnswerRecord, read_results
from draftree.cli.main import run
from draftree.models.cost_profile import kept_or_measured
from draftree.models.loading import load

from ..tiny import save_tiny

Captured = pytest.CaptureFixture[str]
METHODS = {
    "draft": "chain,early-stop,dynamic-width-budget,opt-tree:delta=0.1,eagle2,hsddw",
    "lookup+recycle": "static,naive-width,eagle2",
    "lookup>draft": "chain,dynamic-width-budget,hsddw",
}
COLUMNS = ("gained", "accepted", "nodes", "depth", "expected", "drafted_by_depth", "accepted_by_depth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model, and prompts."""
    made = tmp_path_factory.mktemp("replay")
    save_tiny(made / "target")
    save_tiny(made / "draft", seed=5)
    rows = [{"turns": ["a b a b a b a b", "and again"]}, {"prompt": "the cat in the hat"}]
    (made / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def asked(folder: Path, out: Path, *more: str, methods: str) -> list[str]:
    words = ["bench", "--suite", str(folder / "own.jsonl"), "--target", str(folder / "target"), "--max-tokens", "12"]
    return [*words, "--methods", methods, "--temperature", "0,1", "--out", str(out), *more]


@pytest.mark.parametrize("drafter", METHODS)
def test_steps_are_those_of_decoding(folder: Path, drafter: str, tmp_path: Path) -> None:
    named = drafter.replace("draft", str(folder / "draft"))
    for name, more in (("real", ()), ("told", ("--replay",))):
        assert run(asked(folder, tmp_path / name, "--drafters", named, *more, methods=METHODS[drafter])) == 0
    real, told = ({r.key: r for r in read_results(tmp_path / name)} for name in ("real", "told"))
    assert real.keys() == told.keys() and len(real) == 2 * 2 * (1 + len(METHODS[drafter].split(",")))
    for key, record in real.items():
        for one, other in zip(record.turns, told[key].turns, strict=True):
            assert (one.ids, one.text, one.finish, one.passes) == (other.ids, other.text, other.finish, other.passes)
            assert one.drafted == other.drafted and one.pieces == other.pieces
            assert one.steps is not None and other.steps is not None
            for column in COLUMNS:
                assert getattr(one.steps, column) == pytest.approx(getattr(other.steps, column)), (key, column)
            assert one.steps.accepted_entropies == pytest.approx(other.steps.accepted_entropies, abs=1e-5)
            assert one.steps.rejected_entropies == pytest.approx(other.steps.rejected_entropies, abs=1e-5)


def test_a_pass_takes_what_the_profile_says(folder: Path, tmp_path: Path) -> None:
    assert run(asked(folder, tmp_path / "out", "--drafters", "lookup", "--replay", methods="chain")) == 0
    costs = kept_or_measured(load(str(folder / "target")))

    def verify(record: AnswerRecord) -> float:
        found = 0.0
        for turn in record.turns:
            context = turn.prompt_tokens + 1
            assert turn.steps is not None
            for nodes, gained in zip(turn.steps.nodes, turn.steps.gained, strict=True):
                found, context = found + costs.seconds(1 + nodes, context), context + gained
        return found

    for record in read_results(tmp_path / "out"):
        assert sum(t.seconds.verify or 0.0 for t in record.turns) == pytest.approx(verify(record), rel=1e-4)


@pytest.mark.parametrize(
    "method", ["peer:hf-generate", "beams:width=2", "chain:verify=multi-round", "static:verify=relaxed"]
)
def test_what_ar_answers_do_not_tell_is_refused(folder: Path, method: str, tmp_path: Path, capsys: Captured) -> None:
    assert run(asked(folder, tmp_path / "out", "--drafters", "lookup", "--replay", methods=method)) == 2
    assert "cannot be replayed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_is_replayed_or_not(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    words = asked(folder, tmp_path / "out", "--drafters", "lookup", methods="chain")
    assert run(words) == 0
    capsys.readouterr()
    assert run([*words, "--replay"]) == 2
    assert "replay False" in capsys.readouterr().err

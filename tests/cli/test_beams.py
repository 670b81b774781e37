"""Beams on the command line: what is printed, and one line for each kind of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.models.huggingface import inspection

from ..tiny import save_tiny

Captured = pytest.CaptureFixture[str]


def report(capsys: Captured, model: str, *arguments: str) -> dict[str, Any]:
    assert run(["generate", "the cat", "--target", model, "--max-tokens", "9", "--json", *arguments]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def test_json_has_the_best_sequences_with_scores_best_first(model: str, capsys: Captured) -> None:
    made = report(capsys, model, "--beams", "3", "-n", "2")
    assert set(made) == {"text", "token_ids", "finish_reason", "seed", "beams", "peak_slots", "stats"}
    assert [set(b) for b in made["beams"]] == [{"text", "token_ids", "score", "logprob", "finish_reason"}] * 2
    assert made["beams"][0]["score"] >= made["beams"][1]["score"]
    assert made["text"] == made["beams"][0]["text"]


def test_text_is_the_best_beams_and_figures_go_to_standard_error(model: str, capsys: Captured) -> None:
    text = report(capsys, model, "--beams", "3")["text"]
    assert run(["generate", "the cat", "--target", model, "--max-tokens", "9", "--beams", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{text}\n"
    assert "3 beams searched, 9 layers" in printed.err


def test_several_sequences_are_numbered(model: str, capsys: Captured) -> None:
    assert run(["generate", "the cat", "--target", model, "--max-tokens", "9", "--beams", "3", "-n", "3"]) == 0
    assert [line[:9] for line in capsys.readouterr().out.splitlines() if ". score" in line] == [
        "1. score ",
        "2. score ",
        "3. score ",
    ]


def test_every_option_reaches_the_beams(model: str, capsys: Captured) -> None:
    asked = ["--beams", "3", "--draft-beams", "5", "--depth", "2", "--width-threshold", "0.7", "--min-beams", "2"]
    asked += ["--length-penalty", "0", "--single-cache", "--temperature", "1", "--seed", "4", "--drafter", "self"]
    made = report(capsys, model, *asked)
    assert made == {**report(capsys, model, *asked), "stats": made["stats"]}
    assert len(made["stats"]["drafted"]) == 2
    assert made["stats"]["drafted_layers"] >= 2
    assert made["beams"][0]["score"] == made["beams"][0]["logprob"]


def test_a_drafter_changes_no_searched_beam(model: str, capsys: Captured) -> None:
    plain = report(capsys, model, "--beams", "4", "-n", "4", "--drafter", "none")["beams"]
    for drafter in ("self", "auto", model):
        made = report(capsys, model, "--beams", "4", "-n", "4", "--drafter", drafter)["beams"]
        assert [b["token_ids"] for b in made] == [b["token_ids"] for b in plain]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--beams", "0"], "--beams is 0: use at least 1"),
        (["--beams", "two"], "'two' is not a whole number"),
        (["--beams", "4", "-n", "5"], "5 best sequences of 4 beams: use at most 4"),
        (["--beams", "4", "--draft-beams", "3"], "3 draft beams are fewer than the 4 beams: draft at least 4"),
        (
            [
                "--beams",
                "2",
                "--draft-beams",
                "3",
                "--min-beams",
                "4",
                "--width-threshold",
                "0.9",
                "--temperature",
                "1",
            ],
            "at least 4 of 2 beams: use at most 2",
        ),
        (["--beams", "2", "--min-beams", "3", "--width-threshold", "0.9"], "at least 3 of 2 beams: use at most 2"),
        (["--beams", "4", "--min-beams", "2"], "say nothing of a fixed width: give a width threshold"),
        (["--beams", "4", "--width-threshold", "1.5"], "--width-threshold is 1.5: use at most 1"),
        (["--beams", "4", "--width-threshold", "0.9"], "is for sampled beams, the temperature is 0"),
        (["--single-cache"], "--single-cache True goes with --beams"),
        (["--beams", "4", "--single-cache"], "single cache True is for sampled beams, the temperature is 0"),
        (
            ["--beams", "4", "--early-stopping", "yes", "--temperature", "1"],
            "is for beam search, the temperature is 1",
        ),
        (["--beams", "4", "--length-penalty", "1000"], "--length-penalty is 1000.0: use at most 20"),
        (["--beams", "4", "--length-penalty", "nan"], "--length-penalty is nan"),
        (["--beams", "4", "--early-stopping", "soon"], "--early-stopping soon: use one of yes, no, never"),
        (["--beams", "4", "--depth", "600"], "8 draft beams in 600 layers are 4800 nodes: use at most 4096"),
        (["--beams", "4", "--drafter", "lookup"], "drafter lookup drafts one sequence, not beams"),
        (["--beams", "4", "--drafter", "lookup+self"], "drafts one sequence, not beams"),
        (["--beams", "4", "--drafter", "head>lookup"], "drafts one sequence, not beams"),
        (["--beams", "4", "--drafter", "lookup>self:pending=1"], "drafts one sequence, not beams"),
        (["--beams", "4", "--stop", "x"], "beams take no stop"),
        (["--beams", "4", "--method", "chain"], "--beams and --method exclude each other"),
        (["--beams", "4", "--compare"], "--beams and --compare exclude each other"),
        (["--draft-beams", "4"], "--draft-beams 4 goes with --beams"),
        (["--beams", "4", "--max-tokens", "500"], "max_tokens is 500 but"),
        (["--beams", "4", "--drafter", "./nobody"], "no drafter './nobody'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str, model: str, capsys: Captured) -> None:
    assert run(["generate", "the cat", "--target", model, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert said in printed.err


def test_beams_beyond_the_memory_are_refused_with_their_tokens(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "free_bytes", lambda device: 10_000)
    assert run(["generate", "the", "--raw", "--target", model, "--max-tokens", "50", "--beams", "4"]) == 2
    said = capsys.readouterr().err
    assert f"{1 + 4 * 50 + 8 * 3} tokens" in said
    assert len(said.splitlines()) == 1


def test_the_same_request_fits_where_there_is_room(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, float
    monkeypatch.setattr(
        inspection, "free_bytes", lambda device: 2 * 256 * slot
    )  # 241 tokens, to the grain; half is used
    assert run(["generate", "the", "--raw", "--target", model, "--max-tokens", "50", "--beams", "4"]) == 0


def test_a_folder_is_named_by_its_path(tmp_path: Path, capsys: Captured, model: str) -> None:
    other = save_tiny(tmp_path / "a+b", seed=0)
    made = report(capsys, model, "--beams", "2", "--depth", "2", "--drafter", str(other))
    assert made["stats"]["draft_passes"] > 0

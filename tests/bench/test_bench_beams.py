"""Beams in ``draftree bench``: their names, and their answers beside transformers'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftree.beams.forest import BeamParams
from draftree.bench.contestants import Models
from draftree.bench.entries import entries
from draftree.bench.results import RECORD_LINE, AnswerRecord
from draftree.cli.main import run
from draftree.config import SamplingParams
from draftree.errors import DraftreeError

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]
PEER = "peer:hf-beam-search:width=3"


def test_beams_have_settings_and_a_drafter_of_their_own() -> None:
    text = "beams:width=3:draft=5:depth=2:threshold=0.7:least=2:single=yes:drafter=self"
    _, entry, plain = entries([text, "beams:drafter=none"], ["lookup+self"], [1.0], 8)
    assert entry.beams == BeamParams(
        width=3,
        draft_width=5,
        depth=2,
        threshold=0.7,
        min_width=2,
        single_cache=True,
    )
    assert (entry.label, entry.drafter, plain.drafter) == (text, "self", None)
    assert not entry.draws_as_ar


@pytest.mark.parametrize(
    ("method", "temperature", "why"),
    [
        ("beams:speed=1", 0.0, "no setting 'speed': choose from width, draft"),
        ("beams:width=x", 0.0, "width is 'x'"),
        ("beams:width", 0.0, "KEY=VALUE"),
        ("beams:width=4:draft=2", 0.0, "2 draft beams are fewer than the 4 beams"),
        ("beams:threshold=0.9", 0.0, "is for sampled beams"),
        ("beams:drafter=lookup+self", 0.0, "one sequence, not beams"),
        ("peer:hf-beam-search:speed=1", 0.0, "no setting 'speed'"),
        ("peer:hf-beam-search:single=yes", 1.0, "no setting 'single': choose from width"),
        ("peer:hf-generate:width=4", 0.0, "peer:hf-generate has no setting 'width'"),
    ],
)
def test_bad_beams_are_one_line(method: str, temperature: float, why: str) -> None:
    with pytest.raises(DraftreeError) as error:
        entries([method], ["lookup"], [temperature], 8)
    assert why in str(error.value)


@pytest.mark.parametrize("drafter", ["none", "self"])
def test_the_best_beam_is_that_of_the_peer(drafter: str, model: str) -> None:
    _, ours, theirs = entries([f"beams:width=3:drafter={drafter}", PEER], ["lookup"], [0.0], 8)
    models, params = Models(model), SamplingParams(max_tokens=12)
    want = models.contestant(theirs).decode(PROMPT, params)
    assert models.contestant(ours).decode(PROMPT, params).ids == want.ids
    assert want.seconds.prefill is None


def test_a_run_with_beams_is_compared_with_ar_decoding(model: str, tmp_path: Path) -> None:
    suite = tmp_path / "own.jsonl"
    suite.write_text(json.dumps({"turns": ["the cat"], "id": "p", "category": "a"}) + "\n")
    asked = ["bench", "--suite", str(suite), "--target", model, "--max-tokens", "6", "--out", str(tmp_path / "out")]
    assert run([*asked, "--methods", "beams:width=2,peer:hf-beam-search:width=2"]) == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]
    assert set(rows) == {"ar", "beams:width=2", "peer:hf-beam-search:width=2"}
    verdicts = rows["beams:width=2"]["all"]["verdicts"]
    assert set(verdicts) <= {"equal", "beams"}


@pytest.mark.parametrize("method", ["beams:width=3:drafter=none", "beams:width=3:drafter=self", PEER])
def test_passes_are_counted_against_layers_of_beams(method: str, model: str) -> None:
    """The best request may have ended long before the search: its own length would give less than one for a pass."""
    (_, entry) = entries([method], ["lookup"], [0.0], 8)
    turn = Models(model).contestant(entry).decode(PROMPT, SamplingParams(max_tokens=12, seed=1))
    short = AnswerRecord("p", "c", "m", None, 0.0, 1, [replace(turn, ids=turn.ids[:3])])
    assert turn.layers is not None and turn.passes
    assert short.gained == turn.layers - (not entry.is_peer)  # passes of a peer are those of its prefill too
    assert short.gained / turn.passes >= 1.0


@pytest.mark.parametrize("drafter", ["none", "self"])
def test_drafted_layers_are_recorded(drafter: str, model: str) -> None:
    """What a report calls DSBD depends on them."""
    (_, entry) = entries([f"beams:width=2:depth=2:drafter={drafter}"], ["lookup"], [1.0], 8)
    turn = Models(model).contestant(entry).decode(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=1))
    record = AnswerRecord("p", "c", "m", None, 1.0, 1, [turn])
    found = RECORD_LINE.validate_json(RECORD_LINE.dump_json(record))
    (kept,) = found.turns
    assert kept.drafted_layers == turn.drafted_layers is not None
    assert (turn.drafted_layers >= 2) is (drafter == "self")


@pytest.mark.parametrize(("temperature", "verified"), [(0.0, False), (1.0, True)])
def test_accepted_widths_are_those_of_the_verified_layers(temperature: float, verified: bool, model: str) -> None:
    """A layer that accepts all of its beams gives the next one: passes and accepted layers give the layers."""
    (_, entry) = entries(["beams:width=2:draft=4:depth=2:drafter=self"], ["lookup"], [temperature], 8)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True)
    turn = Models(model).contestant(entry).decode(PROMPT, params)
    assert turn.accepted_widths is not None and turn.layers is not None and turn.passes is not None
    assert bool(turn.accepted_widths) is verified
    if verified:
        assert {0, 1, 2} >= {*turn.accepted_widths}
        assert turn.accepted_widths.count(2) >= turn.layers - 1 - turn.passes > 0

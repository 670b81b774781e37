"""A drafter whose context ends before the target's: it stops, the log says so once, and each answer's figures do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from draftree import BeamEngine, BeamParams, Engine, SamplingParams, SpeculationParams
from draftree.cli.main import run
from draftree.drafters.draft_model import ModelSource

from .. import tiny_gguf
from ..server.running import posted, running, streamed
from ..tiny import tiny_tokenizer
from ..toy import ToyModel

SHORT, LONG = 24, 60
PROMPT = [1, 2, 3, 4] * 3
END = {"toy": SHORT}


def toy(most: int) -> Any:
    model: Any = ToyModel(64, spread=12.0, max_length=most)
    model.tokenizer = tiny_tokenizer()
    return model


def short(**more: Any) -> SpeculationParams:
    return SpeculationParams(drafter=toy(SHORT), **more)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("draftree") and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("method", ["chain", "static", "opt-tree"])
def test_the_log_says_it_once_and_statistics_for_each_answer(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """A drafter of 64 tokens drafted nothing for the last 96 of 160, and nobody said why."""
    target = toy(LONG)
    engine = Engine(target, short(method=method))
    within, beyond, again = (engine.generate([PROMPT], SamplingParams(max_tokens=tokens))[0] for tokens in (5, 40, 40))
    assert [found.stats.out_of_context for found in (within, beyond, again)] == [{}, END, END]
    assert beyond.token_ids == Engine(target).generate([PROMPT], SamplingParams(max_tokens=40))[0].token_ids
    (line,) = lines(caplog)
    assert "toy" in line and str(SHORT) in line


def test_a_drafter_that_reaches_as_far_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(toy(LONG), SpeculationParams(drafter=toy(LONG), method="chain"))
    (found,) = engine.generate([PROMPT])
    assert found.finish_reason == "length" and len(found.token_ids) == LONG - len(PROMPT)
    assert found.stats.out_of_context == {} and not lines(caplog)


def test_beams_say_it_too(caplog: pytest.LogCaptureFixture) -> None:
    engine = BeamEngine(toy(LONG), ModelSource(toy(SHORT), 64))
    (found,) = engine.generate([PROMPT], SamplingParams(max_tokens=40), BeamParams(width=2, depth=3))
    assert found.stats.out_of_context == END
    assert len(lines(caplog)) == 1


def test_answers_of_a_server_say_it(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    with running(toy(LONG), short(method="chain")) as served:
        whole = posted(served, "/v1/completions", body)[1]
        *_, last = streamed(served, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        brief = posted(served, "/v1/completions", {**body, "max_tokens": 4})[1]
    for answer, found in ((whole, END), (last, END), (brief, {})):
        assert answer["metrics"]["speculative_decoding"]["out_of_context"] == found
    assert len(lines(caplog)) == 1


def test_the_command_line_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_gguf.write(tmp_path / "target.gguf", weights="Q8_0")
    draft = tiny_gguf.write(tmp_path / "draft.gguf", weights="Q8_0", context=64)
    command = ["generate", "a b c d", "--target", str(target), "--drafter", str(draft), "--method", "chain"]
    assert run([*command, "--max-tokens", "80", "--ignore-eos", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["out_of_context"] == {str(draft): 64}
    assert len(lines(caplog)) == 1

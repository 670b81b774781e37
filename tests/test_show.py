"""``draftree.show``: what is drawn from what, and what is refused; ``server/test_page.py`` looks at the pages."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import draftree
from draftree.engine.trace import VERSION, Trace
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_model import HFModel

from .tiny import tiny, tiny_tokenizer

PARAMS = draftree.SamplingParams(max_tokens=12)
PROMPTS = ["the cat in the hat the cat in", "a b a b a b"]


def _engine(*observers: draftree.Observer) -> draftree.Engine:
    speculation = draftree.SpeculationParams(drafter="lookup", method="static")
    target = HFModel(tiny(), tiny_tokenizer(), name="tiny", self_test=False)
    return draftree.Engine(target, speculation, observers=observers)


def _records(page: draftree.TracePage) -> list[dict[str, Any]]:
    """The lines that a page holds."""
    held = page.html.split('<script type="text/plain" id="trace">')[1].split("</script>")[0]
    return [json.loads(line) for line in held.splitlines()]


def test_results_hold_the_records_of_a_trace_file(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        found = _engine(trace).generate(PROMPTS, PARAMS, trace=True)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    for number, generation in enumerate(found):
        assert generation.trace == [line for line in lines if line.get("request", number) == number]
        assert _records(draftree.show(generation)) == generation.trace
    assert _records(draftree.show(tmp_path / "t.jsonl")) == lines
    assert sorted(map(str, _records(draftree.show(found)))) == sorted(map(str, lines))


def test_records_spell_every_token_once() -> None:
    engine = _engine()
    (found,) = engine.generate(PROMPTS[:1], PARAMS, trace=True)
    texts: dict[int, str] = {}
    for record in found.trace[1:-1]:
        new = {int(token): text for token, text in record["texts"].items()}
        assert not new.keys() & texts.keys()
        texts |= new
        assert {*record.get("prompt", ()), *record.get("tokens", ()), record.get("root", record.get("first"))} <= {
            *texts
        }
    assert engine.inputs.tokenizer is not None
    assert texts == {token: engine.inputs.tokenizer.decode([token]) for token in texts}


def test_a_notebook_gets_the_page_in_a_frame_that_can_reach_nothing() -> None:
    page = draftree.show(_engine().generate(PROMPTS, PARAMS, trace=True))
    frame = page._repr_html_()
    assert 'sandbox="allow-scripts"' in frame
    assert unescape(frame.split('srcdoc="')[1].split('"')[0]) == page.html
    assert "default-src 'none'" in page.html


def test_a_text_of_a_token_cannot_end_the_script_that_holds_it(tmp_path: Path) -> None:
    (found,) = _engine().generate(PROMPTS[:1], PARAMS, trace=True)
    run, request, *others = found.trace
    evil = {**request, "texts": {"1": "</script><script>alert(1)</script><!--"}}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (run, evil, *others)))
    page = draftree.show(path)
    assert _records(page)[1] == evil
    assert page.html.count("<script") == draftree.show(found).html.count("<script")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "be read"),
        ("", "no trace"),
        ("text\n", "no trace"),
        ('{"kind":"run"}\n', "no trace"),
        ("[" * 100_000, "no trace"),
        (
            f'{{"kind":"run","format":"draftree-trace","version":{VERSION + 1}}}\n',
            f"version {VERSION + 1}, not {VERSION}",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        draftree.show(tmp_path / "t.jsonl")
    assert str(tmp_path / "t.jsonl") in str(caught.value) and "\n" not in str(caught.value)


def test_results_without_a_trace_are_refused() -> None:
    engine = _engine()
    without = engine.generate(PROMPTS[:1], PARAMS)
    for wrong in (without, without[0], [*engine.generate(PROMPTS[:1], PARAMS, trace=True), *without], []):
        with pytest.raises(ConfigError, match="trace=True"):
            draftree.show(wrong)
    for other in (engine, 7, None, ["t.jsonl"]):
        with pytest.raises(ConfigError, match="be drawn"):
            draftree.show(other)  # type: ignore[arg-type]

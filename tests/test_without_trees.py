"""A target whose rows cannot branch decodes without drafts, whatever is asked of it, and says so once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from draftree import Engine, SamplingParams, SpeculationParams, load
from draftree.beams.beam_engine import BeamEngine
from draftree.cli.main import run
from draftree.drafters.registry import load_source
from draftree.engine.scheduler import SchedulerParams
from draftree.errors import DraftreeWarning, NoTreesError
from draftree.models.base import LanguageModel
from draftree.models.loading import load_llama

from . import tiny_gguf
from .server.running import running

Captured = pytest.CaptureFixture[str]
PROMPTS = ["the cat in the hat", "one two one two one two", "a"]
KINDS = ("mamba", "lfm2")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf", architecture=request.param)


@pytest.fixture
def model(path: Path) -> LanguageModel:
    return load_llama(str(path), threads=1)


def texts_alone(model: LanguageModel, params: SamplingParams) -> list[list[int]]:
    """Tokens of each prompt decoded by itself."""
    engine = Engine(model)
    return [engine.generate([prompt], params)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, frequency_penalty=0.5, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.7, seed=5, prompt_logprobs=1, stop=("zq",), repetition_penalty=1.2),
    ],
)
def test_any_drafter_gives_the_text_of_ar_decoding(model: LanguageModel, params: SamplingParams) -> None:
    expected, scheduling = texts_alone(model, params), SchedulerParams(rows=3, chunk=3, prefixes=2)
    with pytest.warns(DraftreeWarning, match="without drafts: .* recurrent state") as said:
        for drafter, method in (("auto", "auto"), ("lookup", "opt-tree"), ("lookup+head", "static"), ("none", "auto")):
            speculation = SpeculationParams(drafter=drafter, method=method)
            engine = Engine(model, speculation, scheduling=scheduling)
            for generation, ids in zip(engine.generate(PROMPTS, params, speculation), expected, strict=True):
                assert generation.token_ids == ids
                assert not generation.stats.drafted
    assert len(said) == 1


def test_without_a_drafter_nothing_is_said(model: LanguageModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(model, SpeculationParams(drafter="none")).generate(["a"], SamplingParams(max_tokens=2))


def test_a_grammar_holds(model: LanguageModel) -> None:
    engine = Engine(model)
    params = SamplingParams(max_tokens=12, constraint=engine.grammars.regex("(ab|c){3,5}d"))
    text = engine.generate(["the cat"], params)[0].text
    assert set(text) <= set("abcd") and text.endswith("d")


def test_a_cancelled_request_leaves_a_row_that_goes_on(model: LanguageModel) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (alone,) = Engine(model).generate([PROMPTS[0]], params)
    engine = Engine(model, scheduling=SchedulerParams(prefixes=2))
    stream = engine.stream(PROMPTS[0], params)
    for _ in range(20):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    ids = engine.inputs.encode(PROMPTS[0])
    (found,) = engine.generate([[*ids, *alone.token_ids[:22]]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert found.stats.reused >= len(ids) + 18
    assert found.token_ids == alone.token_ids[22:]


def test_it_grows_neither_trees_of_drafts_nor_beams(model: LanguageModel, path: Path) -> None:
    with pytest.raises(NoTreesError, match="beams: .* recurrent state"):
        BeamEngine(model)
    target = load(str(tiny_gguf.write(path.with_name("target.gguf"))), threads=1)
    for drafter in (model, str(path)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(NoTreesError, match="grow trees: .* recurrent state"):
                load_source(drafter, target)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("said", [["--drafter", "auto", "--explain"], ["--drafter", "lookup"], ["--compare"]])
def test_generate_says_why_in_one_line(path: Path, said: list[str], capsys: Captured) -> None:
    assert run(["generate", "the cat", "--target", str(path), "--max-tokens", "4", "--threads", "1", *said]) == 0
    err = capsys.readouterr().err
    assert err.count("decodes without drafts") == 1
    assert ("nothing is drafted" in err) == ("--explain" in said)


def test_info_and_profile(path: Path, cache: None, capsys: Captured) -> None:
    assert run(["info", str(path), "--threads", "1"]) == 0
    out = capsys.readouterr().out
    unknown = f"the native engine does not know architecture '{path.stem}'"
    assert f"llama.cpp, without drafts: {unknown}" in out
    assert "drafter auto      none: " in out and "recurrent state" in out
    assert "state  " in out and "compactable" not in out
    assert run(["profile", str(path), "--threads", "1"]) == 0
    assert "milliseconds a pass" in capsys.readouterr().out


def test_the_command_refuses_beams_in_one_line(path: Path, capsys: Captured) -> None:
    assert run(["generate", "the cat", "--target", str(path), "--beams", "2", "--threads", "1"]) == 2
    assert "leave the beams out" in capsys.readouterr().err


def test_chat_goes_on_from_its_row(path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["the cat", "in the hat"])

    def line(_: str) -> str:
        if (found := next(lines, None)) is None:
            raise EOFError
        return found

    monkeypatch.setattr("builtins.input", line)
    assert run(["chat", str(path), "--max-tokens", "6", "--threads", "1"]) == 0
    assert capsys.readouterr().err.count("decodes without drafts") == 1


@pytest.fixture
def client(path: Path) -> Iterator[openai.OpenAI]:
    model = load_llama(str(path), threads=1)
    with pytest.warns(DraftreeWarning, match="without drafts"), running(model, SpeculationParams()) as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_a_server_answers(client: openai.OpenAI, model: LanguageModel) -> None:
    """Choices of one prompt, two requests at once, and a turn that goes on from a row that is kept."""
    name = client.models.list().data[0].id
    options: dict[str, Any] = {"model": name, "max_tokens": 12, "temperature": 0}
    texts = [each.text for each in Engine(model).generate(PROMPTS, SamplingParams(max_tokens=12))]
    both = client.completions.create(prompt=PROMPTS[0], n=2, **options)
    assert [choice.text for choice in both.choices] == 2 * texts[:1]
    streams = [client.completions.create(prompt=prompt, stream=True, **options) for prompt in PROMPTS[:2]]
    for text, stream in zip(texts, streams, strict=False):
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text
    chosen = client.completions.create(
        prompt="the cat", logprobs=2, extra_body={"draftree": {"method": "eagle2", "nodes": 4}}, **options
    )
    assert chosen.choices[0].logprobs is not None
    longer = client.completions.create(prompt=PROMPTS[0] + texts[0] + " and a hat", **options)
    assert longer.usage is not None and longer.usage.prompt_tokens_details is not None

"""Texts drafted by models of other vocabularies are those of AR decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draftree import METHODS
from draftree.beams.beam_engine import BeamEngine
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.fitting import fitted
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.spec import DrafterSpec, StageSpec
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import RunError, VocabularyError
from draftree.models.base import LanguageModel
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.native.native_model import NativeModel
from draftree.request import Generation
from draftree.sampling.grammar import Grammars

from ..pairs import policy
from ..server.running import posted, running, streamed
from ..tiny import bytes_tokenizer, tiny, tiny_tokenizer
from ..tiny_gguf import Vocabulary, byte_level, write
from .vocabularies import PAIRS, VOCABULARIES, models_in, tokenizer_of

PARAMS = SamplingParams(max_tokens=10, seed=3)
PROMPTS: list[str] = ["the thé 🙂 in", "a\n\nb", "<think>他说：“好”。</think> the or er"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    return models_in(tmp_path_factory.mktemp("models"))


def decoded(
    target: LanguageModel,
    params: SamplingParams,
    prompts: Sequence[str] = PROMPTS,
    scheduling: SchedulerParams | None = None,
    **speculation: object,
) -> list[Generation]:
    engine = Engine(target, SpeculationParams(**speculation), scheduling=scheduling or SchedulerParams())  # type: ignore[arg-type]
    return engine.generate(prompts, params)


def drafted(generations: Sequence[Generation]) -> int:
    return sum(sum(each.stats.drafted) for each in generations)


def accepted(generations: Sequence[Generation]) -> int:
    return sum(sum(each.stats.accepted) for each in generations)


def ids(generations: Sequence[Generation]) -> list[list[int]]:
    return [each.token_ids for each in generations]


Alone = Callable[[str, float], list[list[int]]]


@pytest.fixture(scope="module")
def alone(models: dict[str, LanguageModel]) -> Alone:
    """Tokens of AR decoding by a target at a temperature."""

    @cache
    def found(of_target: str, temperature: float) -> list[list[int]]:
        return ids(decoded(models[of_target], replace(PARAMS, temperature=temperature), drafter="none"))

    return found


COMPLETE = [method for method in METHODS if method not in ("sequoia", "c2t")]
"""Those that need nothing that is made for two models."""
TRIED = [(method, *PAIRS[i % len(PAIRS)], 0.8 * (i % 2)) for i, method in enumerate([*COMPLETE] * 2)]
"""Methods at both temperatures, each pair of vocabularies."""


@pytest.mark.parametrize(("method", "of_target", "of_drafter", "temperature"), TRIED)
def test_texts_are_those_of_ar_decoding(
    models: dict[str, LanguageModel], alone: Alone, of_target: str, of_drafter: str, method: str, temperature: float
) -> None:
    params = replace(PARAMS, temperature=temperature)
    found = decoded(models[of_target], params, drafter=models[of_drafter], method=method)
    assert ids(found) == alone(of_target, temperature)
    assert method == "auto" or drafted(found) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["sequoia", "c2t"])
def test_trees_that_were_made_for_other_models(
    models: dict[str, LanguageModel], alone: Alone, method: str, temperature: float
) -> None:
    target = models["bytes"]
    source = ModelSource(fitted(models["tags"], target), target.capabilities.vocab_size)
    engine = Engine(target, Speculation(TreeDrafter(policy(method), source), 6))
    found = engine.generate(PROMPTS, replace(PARAMS, temperature=temperature))
    assert ids(found) == alone("bytes", temperature)
    assert drafted(found) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("candidates", ["coupled", "plain"])
@pytest.mark.parametrize(("of_target", "of_drafter"), PAIRS[::3])
def test_candidates_of_both_kinds(
    models: dict[str, LanguageModel],
    alone: Alone,
    of_target: str,
    of_drafter: str,
    candidates: str,
    temperature: float,
) -> None:
    found = decoded(
        models[of_target],
        replace(PARAMS, temperature=temperature),
        drafter=models[of_drafter],
        method="static",
        candidates=candidates,
    )
    assert ids(found) == alone(of_target, temperature)
    assert drafted(found) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stages", [("lookup+tags",), ("lookup", "pieces"), ("bytes", "tags"), ("tags", "clashing")])
def test_ensembles_and_cascades(
    models: dict[str, LanguageModel], alone: Alone, stages: Sequence[str], temperature: float
) -> None:
    """Of drafters of the target's vocabulary and of others."""
    spec = DrafterSpec(tuple(StageSpec(tuple(models.get(n, n) for n in stage.split("+"))) for stage in stages))
    found = decoded(models["bytes"], replace(PARAMS, temperature=temperature), drafter=spec, method="chain")
    assert ids(found) == alone("bytes", temperature)
    assert drafted(found) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_come_and_go(models: dict[str, LanguageModel], temperature: float) -> None:
    """Of a batch whose prompts are read in pieces, begin alike, and go on where others ended."""
    prompts = [text for text in PROMPTS for text in (text, text + " the in" * 12, text + " the in" * 9 + "é", text)]
    params = [replace(PARAMS, max_tokens=3 + i % 7, temperature=temperature, seed=i) for i in range(len(prompts))]
    scheduling = SchedulerParams(rows=3, chunk=8, prefixes=3)
    wanted = Engine(models["tags"], None).generate(prompts, params)
    for of_drafter in ("pieces", "clashing"):
        speculation = SpeculationParams(drafter=models[of_drafter], method="opt-tree")
        found = Engine(models["tags"], speculation, scheduling=scheduling).generate(prompts, params)
        assert ids(found) == ids(wanted)
        assert drafted(found) > 0


def test_what_is_kept_of_a_text_is_right(models: dict[str, LanguageModel]) -> None:
    """The same model with other ids is always right, in each turn of a conversation, and where it goes on otherwise."""
    scheduling, params = SchedulerParams(prefixes=2, chunk=8), replace(PARAMS, ignore_eos=True)
    speculation = SpeculationParams(drafter=models["same"], method="chain", nodes=3)
    engine, prompt = Engine(models["bytes"], speculation, scheduling=scheduling), PROMPTS[0] * 3
    for turn in (" the or", " in\n", " é", " the or"):
        (found,) = engine.generate([prompt], params)
        assert ids([found]) == ids(decoded(models["bytes"], params, [prompt], drafter="none"))
        assert accepted([found]) == drafted([found]) > 0
        prompt = prompt[: len(prompt) // 2] + turn + found.text * (turn != " é")


@pytest.mark.parametrize("of_drafter", ["pieces", "tags"])
def test_beams_are_those_without_drafts(models: dict[str, LanguageModel], of_drafter: str) -> None:
    target, params = models["bytes"], replace(PARAMS, max_tokens=8)
    source = ModelSource(fitted(models[of_drafter], target), target.capabilities.vocab_size)
    prompt, beams = tokenizer_of(target).encode(PROMPTS[0]), BeamParams(width=3, depth=3)
    found, wanted = (BeamEngine(target, each).generate([prompt], params, beams)[0] for each in (source, None))
    assert [each.token_ids for each in found.hypotheses] == [each.token_ids for each in wanted.hypotheses]
    assert source.own_passes > 0


def small(folder: Path, words: Vocabulary, context: int) -> LanguageModel:
    return NativeModel(write(folder / "small.gguf", layers=1, context=context, vocabulary=words, seed=3), threads=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("context", [16, 64])
@pytest.mark.parametrize(("of_target", "of_drafter"), [("tags", "pieces"), ("pieces", "bytes"), ("bytes", "tags")])
def test_a_text_beyond_the_drafters_context_goes_on_with_its_end(
    models: dict[str, LanguageModel], tmp_path: Path, of_target: str, of_drafter: str, context: int, temperature: float
) -> None:
    """Where tokens of the target are many of the drafter's, too: the last are drafted for as the first are."""
    target, drafter = models[of_target], small(tmp_path, VOCABULARIES[of_drafter](), context)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    prompts = ["🙂🙂" * 12 + " the" * 20, "他" * 30]
    found = decoded(target, params, prompts, drafter=drafter, method="chain", nodes=8)
    assert ids(found) == ids(decoded(target, params, prompts, drafter="none"))
    assert all(sum(each.stats.drafted) >= 30 for each in found)
    assert not any(each.stats.out_of_context for each in found)


def test_a_step_that_fails_in_the_drafter_costs_no_later_request(
    models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, params = models["same"], replace(PARAMS, ignore_eos=True)
    speculation = SpeculationParams(drafter=drafter, method="chain", nodes=3)
    engine = Engine(models["bytes"], speculation, scheduling=SchedulerParams(prefixes=2))
    extend, calls, prompt = drafter.extend, list[int](), PROMPTS[0] * 3

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise ArithmeticError
        return extend(*args)

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "extend", failing)
        with pytest.raises(RunError, match="ArithmeticError"):
            engine.generate([prompt], params)
    (found,) = engine.generate([prompt], params)
    assert ids([found]) == ids(decoded(models["bytes"], params, [prompt], drafter="none"))
    assert accepted([found]) == drafted([found]) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_models_of_all_backends(models: dict[str, LanguageModel], tmp_path: Path, temperature: float) -> None:
    """llama.cpp and transformers with the native engine, as targets and as drafters, with tokenizers of their own."""
    path = write(tmp_path / "m.gguf", layers=1, context=256, vocabulary=byte_level(shift=True), seed=2)
    others = [LlamaModel(path, threads=1), HFModel(tiny("llama_bytes"), bytes_tokenizer(), self_test=False)]
    others.append(HFModel(tiny(), tiny_tokenizer(), self_test=False))
    params = replace(PARAMS, max_tokens=8, temperature=temperature)
    pairs = [(others[0], models["pieces"]), (models["pieces"], others[0]), (others[1], models["tags"])]
    pairs += [(models["pieces"], others[1]), (others[2], models["bytes"]), (models["bytes"], others[2])]
    for target, drafter in pairs:
        found = decoded(target, params, ["the or in", "a the a"], drafter=drafter, method="static")
        assert ids(found) == ids(decoded(target, params, ["the or in", "a the a"], drafter="none"))
        assert drafted(found) > 0


def test_answers_of_a_server(models: dict[str, LanguageModel]) -> None:
    """Of conversations, two answers at once, and as a stream."""
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 12, "temperature": 0.8, "seed": 3}
    answers = list[object]()
    for drafter in ("none", models["pieces"]):
        speculation = SpeculationParams(drafter=drafter, method="opt-tree")
        with running(models["tags"], speculation) as served:
            status, found = posted(served, "/v1/chat/completions", {**body, "n": 2})
            assert status == 200, found
            deltas = [event["choices"][0]["delta"] for event in streamed(served, "/v1/chat/completions", body)]
            told = "".join(delta.get("content") or "" for delta in deltas)
            answers.append(([choice["message"]["content"] for choice in found["choices"]], told))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_model_with_other_ids_is_always_right(models: dict[str, LanguageModel], temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    (same, wrong) = (
        decoded(models["bytes"], params, drafter=models[name], method="chain", nodes=3) for name in ("same", "wrong")
    )
    assert ids(same) == ids(wrong) == ids(decoded(models["bytes"], params, drafter="none"))
    assert accepted(same) == drafted(same) > 0
    assert accepted(wrong) < 0.2 * drafted(wrong)


@pytest.mark.parametrize(
    ("of_target", "of_drafter", "changes"),
    [
        ("bytes", "pieces", {"constraint": "(the|[a-z]{3}|é+|🙂)*"}),
        ("pieces", "tags", {"constraint": "[a-z ]+", "temperature": 1.0, "bad_words": ("the",)}),
        ("pieces", "tags", {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {40: 3.0}}),
        ("bytes", "pieces", {"stop": ("e", "\n"), "temperature": 1.0}),
        ("tags", "pieces", {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_parameters_act_as_without_drafts(
    models: dict[str, LanguageModel], of_target: str, of_drafter: str, changes: dict[str, object]
) -> None:
    target = models[of_target]
    if isinstance(pattern := changes.get("constraint"), str):
        can = target.capabilities
        assert target.tokenizer is not None
        changes = changes | {"constraint": Grammars(target.tokenizer, can.vocab_size, can.eos_ids).regex(pattern)}
    params = replace(SamplingParams(max_tokens=20, seed=7), **changes)  # type: ignore[arg-type]
    found = decoded(target, params, drafter=models[of_drafter], method="opt-tree")
    assert ids(found) == ids(decoded(target, params, drafter="none"))
    assert drafted(found) > 0


def test_a_model_of_bare_ids_is_refused(
    models: dict[str, LanguageModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = Vocabulary("none", byte_level().tokens[:-1], byte_level().types[:-1])
    path = write(tmp_path_factory.mktemp("bare") / "bare.gguf", layers=1, vocabulary=words)
    with pytest.raises(VocabularyError, match="bare"):
        decoded(models["bytes"], SamplingParams(max_tokens=2), drafter=NativeModel(path, threads=1))

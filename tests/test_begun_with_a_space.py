"""Tokenizers that put a space in front of a text: it is none of the text that goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.beams.beam_engine import BeamEngine
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.base import LanguageModel
from draftree.sampling.constraint import ConstraintState, followed
from draftree.text.encoding import Tokenizer
from draftree.text.spelling import InnerSpelling

from .server.test_token_bytes import (
    byte_fallback_by_llama,
    byte_fallback_gguf,
    byte_fallback_of_transformers,
    byte_level_gguf,
    byte_level_of_transformers,
)

SPACED = [byte_fallback_gguf, byte_fallback_by_llama, byte_fallback_of_transformers]
PLAIN = [byte_level_gguf, byte_level_of_transformers]


def tokenizer_of(model: LanguageModel) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


def behind_a_bracket(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text behind a token that is merged with nothing."""
    ids = tokenizer.encode(f"({text}", add_special_tokens=False)
    bracket = tokenizer.encode("(", add_special_tokens=False)[-1]
    return ids[ids.index(bracket) + 1 :]


@pytest.fixture(scope="module", params=SPACED)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    made: LanguageModel = request.param(tmp_path_factory.mktemp("model"))
    return made


@pytest.mark.parametrize("made", [*SPACED, *PLAIN])
def test_a_text_is_spelt_as_it_stands_behind_another(made: Callable[[Path], LanguageModel], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(made(tmp_path))
    spelt = InnerSpelling(tokenizer)
    for text in ("t", "th", "the", " t", " the", "  the", "the th", "é", "\n", "他", ""):
        assert spelt(text) == behind_a_bracket(tokenizer, text)


@pytest.mark.parametrize("word", ["t", "th", "the", "he", "at\n", "é"])
def test_a_bad_word_comes_neither_behind_a_space_nor_without(target: LanguageModel, word: str) -> None:
    """Without one, as behind a bracket or a new line, it came: texts were spelt with the space that begins them."""
    tokenizer, engine = tokenizer_of(target), Engine(target)
    biases = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    constraint = engine.request("e", SamplingParams(bad_words=(word,))).params.constraint
    assert constraint is not None
    for text in (word.strip(), f" {word.strip()}"):
        *before, last = spelling = behind_a_bracket(tokenizer, text)
        state: ConstraintState = followed(constraint.start(), before)
        assert not state.allows(last)
        wanted = replace(biases, logit_bias=dict.fromkeys(spelling, 40.0))
        ids = engine.generate(["e"], [replace(wanted, bad_words=(word,))])[0].token_ids
        ends = range(len(spelling), len(ids) + 1)
        assert not any(ids[end - len(spelling) : end] == spelling for end in ends)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_the_text_of_a_beam_goes_on_behind_the_prompt_as_any_text_does(
    target: LanguageModel, skip: bool, ended: bool
) -> None:
    """It lacked the space in front of it, and an end token that is shown stood in it."""
    tokenizer = tokenizer_of(target)
    prompt, end = tokenizer.encode("the"), min(target.capabilities.eos_ids)
    unknown = tokenizer.get_vocab()["<unk>"]
    script = [*behind_a_bracket(tokenizer, " the he é"), unknown, *behind_a_bracket(tokenizer, " th"), end]

    def scripted(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        following = script[len(ids) - len(prompt)]
        return np.where(np.arange(len(logits)) == following, logits, np.float32(-1e5))

    tokens = len(script) - (not ended)
    params = SamplingParams(max_tokens=tokens, processors=(scripted,), skip_special_tokens=skip)
    (want,) = Engine(target).generate([prompt], params)
    (found,) = BeamEngine(target).generate([prompt], params, BeamParams(width=1))
    assert found.hypotheses[0].token_ids == want.token_ids == script[:tokens]
    assert found.hypotheses[0].finish_reason == want.finish_reason == ("eos" if ended else "length")
    assert found.hypotheses[0].text == want.text
    assert want.text == f" the he é{'' if skip else '<unk>'} th"

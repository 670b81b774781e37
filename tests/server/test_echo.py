"""Prompts that are echoed with log-probabilities: what harnesses score choices by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from gguf import Keys
from tokenizers import processors

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.base import LanguageModel
from draftree.models.native.native_model import NativeModel
from draftree.openai.answers import places
from draftree.openai.batches import COMPLETIONS
from draftree.openai.choices import decoded

from .. import tiny_gguf
from ..tiny import bytes_tokenizer, causal_logits, tiny
from .running import NAME, TEXT, posted, running, streamed
from .test_token_bytes import byte_fallback_gguf, byte_fallback_of_transformers, of_transformers


def _told(client: openai.OpenAI, **asked: Any) -> list[Any]:
    create: Any = client.completions.create
    return list(create(model=NAME, temperature=0, echo=True, **asked).choices)


@pytest.mark.parametrize("most", [1, 5])
def test_a_prompt_has_the_log_probabilities_of_a_causal_pass(client: openai.OpenAI, alone: Engine, most: int) -> None:
    prompts = [alone.inputs.encode(TEXT), alone.inputs.encode("the cat in the hat")]
    choices = _told(client, prompt=prompts, max_tokens=most, logprobs=2)
    whole = _told(client, prompt=prompts, max_tokens=most)
    for prompt, choice, plain in zip(prompts, choices, whole, strict=True):
        told = choice.logprobs
        assert choice.text == plain.text and plain.logprobs is None
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(prompt) + most
        logprobs = causal_logits(tiny(), prompt)[:-1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(own.tolist(), abs=1e-4)
        for best, row in zip(told.top_logprobs[1 : len(prompt)], logprobs, strict=True):
            assert max(best.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert "".join(told.tokens[: len(prompt)]) == choice.text[: told.text_offset[len(prompt)]]


def test_a_token_that_is_the_best_has_the_very_number_of_the_best(client: openai.OpenAI, alone: Engine) -> None:
    """lm-eval compares the two to see whether a choice is what greedy decoding gives."""
    prompt = alone.inputs.encode(TEXT)
    (greedy,) = alone.generate([prompt], SamplingParams(max_tokens=12))
    (choice,) = _told(client, prompt=[*prompt, *greedy.token_ids], max_tokens=1, logprobs=1)
    own, best = choice.logprobs.token_logprobs[len(prompt) :], choice.logprobs.top_logprobs[len(prompt) :]
    assert own == [max(each.values()) for each in best] and len(own) == 13


def byte_level_gguf_with_a_beginning(folder: Path) -> LanguageModel:
    """As Llama 3's."""
    words = replace(tiny_gguf.byte_level(), flags={Keys.Tokenizer.ADD_BOS: True})
    return NativeModel(tiny_gguf.write(folder / "tiny.gguf", vocabulary=words))


def byte_level_of_transformers_with_a_beginning(folder: Path) -> LanguageModel:
    tokenizer = bytes_tokenizer()
    begin = str(tokenizer.bos_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    return of_transformers(tokenizer)


BEGINNINGS = {
    byte_level_gguf_with_a_beginning: 1,
    byte_level_of_transformers_with_a_beginning: 1,
    byte_fallback_gguf: 1,
    byte_fallback_of_transformers: 0,
}
"""Models, and how many tokens begin each of their texts; the last two begin them with a space too."""
TEXTS = ["the é€ in", " the", "<|im_end|>the 😀", "a\n\nb", "</s> the"]


@pytest.mark.parametrize(("make", "begin"), BEGINNINGS.items())
def test_a_text_is_echoed_as_it_was_sent(tmp_path: Path, make: Callable[[Path], LanguageModel], begin: int) -> None:
    """The token that begins each text stood in front of it, and behind that a space."""
    asked = {"prompt": TEXTS, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with running(make(tmp_path)) as served:
        answers = [choice["text"] for choice in posted(served, COMPLETIONS, asked)[1]["choices"]]
        wholes = [text + answer for text, answer in zip(TEXTS, answers, strict=True)]
        choices = posted(served, COMPLETIONS, {**asked, "echo": True})[1]["choices"]
        assert [choice["text"] for choice in choices] == wholes
        pieces = [event["choices"][0] for event in streamed(served, COMPLETIONS, {**asked, "echo": True})]
        for index, whole in enumerate(wholes):
            assert "".join(piece["text"] for piece in pieces if piece["index"] == index) == whole
        every = [served.engine.inputs.encode(text) for text in TEXTS]
        choices = posted(served, COMPLETIONS, {**asked, "echo": True, "logprobs": 0})[1]["choices"]
        for text, whole, ids, choice in zip(TEXTS, wholes, every, choices, strict=True):
            told, offsets = choice["logprobs"], choice["logprobs"]["text_offset"]
            assert choice["text"] == whole
            assert len(told["tokens"]) == len(told["token_logprobs"]) == len(offsets) == len(ids) + 4
            assert offsets[: begin + 1] == [0] * (begin + 1) and offsets[len(ids)] == len(text)
            assert offsets == sorted(offsets)
            for token, at in zip(told["tokens"][begin : len(ids)], offsets[begin:], strict=False):
                assert token.startswith("bytes:") or text[at:].startswith((token, token.lstrip()))
        (echoed,) = posted(served, COMPLETIONS, {**asked, "prompt": every[0], "echo": True})[1]["choices"]
        assert echoed["text"] == decoded(served.engine, every[0]) + answers[0]


@pytest.mark.parametrize(
    ("text", "pieces", "wanted"),
    [
        ("a b", ["a", " b"], [0, 1]),
        ("<x>a b", ["<x>", " a", " b"], [0, 3, 4]),
        ("<x>\n\na", ["<x>", "a"], [0, 5]),
        ("é b", ["", "é", " b"], [0, 0, 1]),
        ("a", ["<unk>", " b"], [0, 1]),
    ],
)
def test_pieces_of_a_text_are_found_in_it(text: str, pieces: list[str], wanted: list[int]) -> None:
    """Also where the tokenizer puts white space in front of a word, takes it away behind a tag, or has no token."""
    assert places(text, pieces) == wanted


def test_tokenize_adds_what_begins_a_text_as_the_names_of_its_fields_have_it(tmp_path: Path) -> None:
    """vLLM's by default, and llama.cpp's only where it is asked for."""
    with running(byte_level_gguf_with_a_beginning(tmp_path)) as served:

        def ids(body: dict[str, Any]) -> list[int]:
            found: list[int] = posted(served, "/tokenize", body)[1]["tokens"]
            return found

        bare, whole = (ids({"prompt": "the", "add_special_tokens": special}) for special in (False, True))
        assert whole[1:] == bare and ids({"prompt": "the"}) == whole
        assert ids({"content": "the"}) == ids({"content": "the", "add_special": False}) == bare
        assert ids({"content": "the", "add_special": True}) == whole

"""A token that is part of a character has its own bytes in logprobs, so that a client can join them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftree.engine.engine import Engine
from draftree.models.base import LanguageModel
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.native.native_model import NativeModel
from draftree.openai.batches import CHAT, COMPLETIONS, RESPONSES, Answering, BatchLine

from .. import tiny_gguf
from ..tiny import BYTES_VOCAB, bytes_tokenizer, tiny
from .running import LOOKUP, NAME, Running, posted, running

ANSWER = "the é€ 😀 жh"
BEST = 20


def byte_level_gguf(folder: Path) -> LanguageModel:
    return NativeModel(tiny_gguf.write(folder / "tiny.gguf"))


def byte_fallback_gguf(folder: Path) -> LanguageModel:
    return NativeModel(tiny_gguf.write(folder / "tiny.gguf", vocabulary=tiny_gguf.with_byte_fallback()))


def byte_fallback_by_llama(folder: Path) -> LanguageModel:
    return LlamaModel(tiny_gguf.write(folder / "tiny.gguf", vocabulary=tiny_gguf.with_byte_fallback()))


def byte_fallback_of_transformers(folder: Path) -> LanguageModel:
    """As Llama 2's: a space is a letter of its own, and the one in front of a text is removed."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁the", "th", "▁th"]
    ids, merges = {token: i for i, token in enumerate(tokens)}, [("t", "h"), ("▁", "th")]
    backend = Tokenizer(BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template=tiny_gguf.TEMPLATE
    )
    return of_transformers(tokenizer)


def byte_level_of_transformers(folder: Path) -> LanguageModel:
    return of_transformers(bytes_tokenizer())


def of_transformers(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """Each token of the model has a text."""
    tokenizer.add_tokens([f"more{i}" for i in range(BYTES_VOCAB - len(tokenizer))])
    model = tiny("llama_bytes")
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return HFModel(model, tokenizer, name=NAME, self_test=False)


MODELS = [
    byte_level_of_transformers,
    byte_level_gguf,
    byte_fallback_gguf,
    byte_fallback_by_llama,
    byte_fallback_of_transformers,
]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LanguageModel]:
    """Makes a model."""
    return lambda: request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(made: Callable[[], LanguageModel]) -> LanguageModel:
    return made()


@pytest.fixture(scope="module")
def served(made: Callable[[], LanguageModel]) -> Iterator[Running]:
    """A server with a model of its own: where it is idle it measures what passes cost."""
    with running(made()) as found:
        yield found


FORCED = {"structured_outputs": {"choice": [ANSWER]}}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "e"}], "logprobs": True, "top_logprobs": BEST},
    COMPLETIONS: {"prompt": "e", "logprobs": BEST, "max_tokens": 64},
    RESPONSES: {"input": "e", "top_logprobs": BEST, "max_output_tokens": 64},
}


def scored(path: str, answers: list[dict[str, Any]]) -> list[tuple[bytes, list[bytes]]]:
    """The bytes of each token of an answer, whole or in events, and of the most probable ones beside it."""
    if path == RESPONSES:
        found = [one for each in answers for one in logprobs_of_response(each)]
    elif path == CHAT:
        of_choices = [choice["logprobs"] for each in answers for choice in each["choices"]]
        found = [one for logprobs in of_choices if logprobs for one in logprobs["content"]]
    else:
        columns = [choice["logprobs"] for each in answers for choice in each["choices"] if choice["logprobs"]]
        pairs = [pair for c in columns for pair in zip(c["tokens"], c["top_logprobs"], strict=True)]
        return [(read(token), list(map(read, best))) for token, best in pairs]
    for one in found:
        for each in (one, *one["top_logprobs"]):
            assert each["token"] == bytes(each["bytes"]).decode(errors="replace")
    return [(bytes(one["bytes"]), [bytes(best["bytes"]) for best in one["top_logprobs"]]) for one in found]


def events(served: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(served.url + path, json={"model": NAME, "stream": True, **body})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    # The end of a response has all of it again.
    return [event for event in map(json.loads, lines) if path != RESPONSES or "logprobs" in event and "delta" in event]


def logprobs_of_response(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a whole one, or of an event that brings text."""
    parts = [answer] if "delta" in answer else [part for item in answer["output"] for part in item["content"]]
    return [one for part in parts for one in part["logprobs"]]


def read(token: str) -> bytes:
    """A completion names tokens by their texts, parts of characters by their bytes, as OpenAI's did."""
    named = re.fullmatch(r"bytes:((\\x[0-9a-f]{2})+)", token)
    return bytes.fromhex(named[1].replace("\\x", "")) if named else token.encode()


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("how", ["whole", "streamed", "batch"])
def test_they_join_to_the_answer(target: LanguageModel, served: Running, path: str, how: str) -> None:
    body = ASKED[path] | FORCED | {"temperature": 0}
    if how == "streamed":
        answers = events(served, path, body)
    elif how == "whole":
        status, answer = posted(served, path, body)
        assert status == 200
        answers = [answer]
    else:
        line = {"custom_id": "a", "method": "POST", "url": path, "body": {"model": NAME, **body}}
        (record,) = Answering(Engine(target), LOOKUP, NAME, 1).records([BatchLine(1, json.dumps(line).encode())])
        answers = [record["response"]["body"]]
    found = scored(path, answers)
    parts = [token for token, _ in found if "�" in token.decode(errors="replace")]
    assert len(parts) > 4, "no character came in parts"
    *own, _ = found  # the last one ends the answer
    assert b"".join(token for token, _ in own).decode().removeprefix(" ") == ANSWER
    beside = [[token for token in best if "�" in token.decode(errors="replace")] for _, best in found]
    assert max(map(len, beside)) > 1 and all(len(set(parts)) == len(parts) for parts in beside)

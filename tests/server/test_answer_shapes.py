"""Shapes of answers: defaults that fit the context, usage of each event, places of tokens in the text."""

from __future__ import annotations

import http.client
import json

import pytest

from draftree.models.huggingface.hf_model import HFModel
from draftree.text.encoding import user

from ..tiny import MAX_LENGTH, bytes_tokenizer, tiny
from .running import NAME, TEXT, Running, fetched, posted, running, streamed

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize("left", [1, 5, 16, 17])
def test_a_completions_default_fits_what_the_context_leaves(served: Running, left: int) -> None:
    status, found = posted(served, COMPLETION, {"prompt": [5] * (MAX_LENGTH - left)})
    assert status == 200 and found["usage"]["completion_tokens"] == min(left, 16)


@pytest.mark.parametrize("left", [1, 5])
def test_so_do_those_of_chats_and_responses(served: Running, left: int) -> None:
    ids = posted(served, "/tokenize", {"messages": user("a")})[1]["count"]
    text = "a" * (MAX_LENGTH - left - ids + 1)
    assert posted(served, "/tokenize", {"messages": user(text)})[1]["count"] == MAX_LENGTH - left
    for path, body in ((CHAT, {"messages": user(text)}), (RESPONSE, {"input": text})):
        assert posted(served, path, body)[0] == 200


def test_what_the_client_has_sent_is_not_clamped(served: Running) -> None:
    for path, body in (
        (COMPLETION, {"prompt": TEXT, "max_tokens": MAX_LENGTH}),
        (CHAT, {"messages": user(TEXT), "max_tokens": MAX_LENGTH}),
        (CHAT, {"messages": user(TEXT), "max_completion_tokens": MAX_LENGTH}),
        (RESPONSE, {"input": TEXT, "max_output_tokens": MAX_LENGTH}),
    ):
        status, found = posted(served, path, body)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


def test_a_completions_default_follows_what_was_sent(served: Running) -> None:
    status, found = posted(served, COMPLETION, {"prompt": TEXT, "min_tokens": 20, "ignore_eos": True})
    assert status == 200 and found["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("include", [True, False])
def test_events_before_the_last_have_no_usage_yet(served: Running, include: bool) -> None:
    for path, body in ((CHAT, {"messages": user(TEXT)}), (COMPLETION, {"prompt": TEXT, "echo": True})):
        options = {"include_usage": include, "include_trace": True}
        events = streamed(served, path, {**body, "max_tokens": 4, "n": 2, "stream_options": options})
        *before, last = events
        assert len(before) > 8
        if include:
            assert all(event["usage"] is None for event in before) and last["usage"]["completion_tokens"] == 8
        else:
            assert not any("usage" in event for event in events)


@pytest.mark.parametrize("answer", ["né-€uro-😀-end", "plain", "😀😀"])
@pytest.mark.parametrize("prompt", ["a: ", "é€😀 "])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_offsets_are_where_tokens_begin_in_the_text(
    spelling: Running, answer: str, prompt: str, echo: bool, skip: bool
) -> None:
    """Each token of a character that is split over several has the place of the character."""
    body = {"prompt": prompt, "max_tokens": 40, "logprobs": 0, "echo": echo, "skip_special_tokens": skip}
    status, found = posted(spelling, COMPLETION, body | {"structured_outputs": {"choice": [answer]}})
    assert status == 200
    (choice,) = found["choices"]
    text, scored = choice["text"], choice["logprobs"]
    assert text.startswith(prompt if echo else answer)
    # the model spells byte by byte
    expected = [at for at, character in enumerate(text.removesuffix("</s>")) for _ in character.encode()]
    assert scored["text_offset"][: len(expected)] == expected
    for token, at in zip(scored["tokens"], scored["text_offset"], strict=True):
        assert text[at:].startswith(token) or token.startswith("bytes:") or at == len(text)


def test_a_stream_has_the_same_offsets(spelling: Running) -> None:
    body = {"prompt": "a: ", "max_tokens": 40, "logprobs": 0, "structured_outputs": {"choice": ["né-€uro-😀-end"]}}
    whole = posted(spelling, COMPLETION, body)[1]["choices"][0]["logprobs"]["text_offset"]
    pieces = [event["choices"][0]["logprobs"] for event in streamed(spelling, COMPLETION, body)]
    assert [at for piece in pieces if piece for at in piece["text_offset"]] == whole


def test_text_that_waits_for_a_stop_string_moves_no_offset(spelling: Running) -> None:
    body = {"prompt": "a: ", "max_tokens": 40, "logprobs": 0, "stop": ["uroX"]}
    found = posted(spelling, COMPLETION, body | {"structured_outputs": {"choice": ["né-€uro-end"]}})[1]["choices"][0]
    assert found["text"] == "né-€uro-end"
    expected = [at for at, character in enumerate(found["text"]) for _ in character.encode()]
    assert found["logprobs"]["text_offset"][: len(expected)] == expected


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}])
def test_no_character_ends_a_line_of_a_stream(spelling: Running, more: dict[str, int]) -> None:
    """Clients that split lines as ``str.splitlines`` does, as httpx, got half an event."""
    said = "a\u2028b\u2029c\x85d"
    asked = {"model": NAME, "prompt": "a: ", "max_tokens": 40, "stream": True, **more}
    body = {**asked, "structured_outputs": {"choice": [said]}}
    connection = http.client.HTTPConnection(spelling.url.removeprefix("http://"))
    connection.request("POST", COMPLETION, json.dumps(body), {"Content-Type": "application/json"})
    sent = [each for each in connection.getresponse().read().decode().splitlines() if each]
    connection.close()
    assert all(each.startswith((": ", "data: ")) for each in sent)
    events = [json.loads(each.removeprefix("data: ")) for each in sent if each.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == said


def test_a_seed_of_minus_one_is_none(served: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 2, "n": 4}
    texts = [posted(served, COMPLETION, {**body, "seed": -1})[1]["choices"] for _ in range(2)]
    assert len({choice["text"] for choices in texts for choice in choices}) == 8


def test_what_a_remote_tokenizer_asks(spelling: Running) -> None:
    """lm-eval asks for /tokenizer_info, and for ids without special tokens."""
    connection = http.client.HTTPConnection(spelling.url.removeprefix("http://"))
    connection.request("GET", "/tokenizer_info")
    info = json.loads(connection.getresponse().read())
    connection.close()
    assert {"tokenizer_class", "eos_token", "bos_token", "pad_token", "chat_template"} <= set(info)
    ids = posted(spelling, "/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})[1]["tokens"]
    assert len(ids) == 1 and posted(spelling, "/detokenize", {"tokens": ids})[1]["prompt"] == info["eos_token"]
    assert isinstance(info["chat_template"], str)


def test_special_tokens_are_those_that_the_tokenizer_names() -> None:
    """lm-eval scores whole texts behind the first of them: it was the lowest id that ends a text, and no beginning."""
    model, tokenizer = tiny("llama_bytes"), bytes_tokenizer()
    assert model.generation_config is not None and tokenizer.eos_token_id > 0
    model.generation_config.eos_token_id = [0, tokenizer.eos_token_id]
    with running(HFModel(model, tokenizer, name=NAME, self_test=False)) as served:
        info = json.loads(fetched(served, "/tokenizer_info")[1])
    named = {name: info[name] for name in ("bos_token", "eos_token", "pad_token") if info[name] is not None}
    assert named == {name: tokenizer.special_tokens_map[name] for name in named}
    assert {"bos_token", "eos_token"} <= named.keys()

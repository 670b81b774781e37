"""Parameters that vLLM's users send: each is the engine's, and what cannot be is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.openai.chat_api import ChatRequest
from draftree.text.encoding import user

from .running import NAME, TEXT, Running, ending_target, posted, running, streamed

QUESTION = user("the cat in the hat the cat in the hat")


@pytest.fixture(scope="module")
def ending() -> Engine:
    return Engine(ending_target())


@pytest.fixture(scope="module")
def ending_served() -> Iterator[Running]:
    with running(ending_target()) as found:
        yield found


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 20},
        {"min_tokens": 16, "ignore_eos": True},
        {"stop_token_ids": [20, 30, 40, 50]},
        {"stop_token_ids": [20, 30, 40, 50], "include_stop_str_in_output": True, "min_tokens": 3},
        {"stop": ["a", "e"], "include_stop_str_in_output": True},
        {"stop": ["a", "e"], "min_tokens": 6},
        {"bad_words": ["a", "th", "o"]},
        {"allowed_token_ids": [5, 9, 11, 20, 33]},
        {"skip_special_tokens": False},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {"7": 3, "9": -100}},
        {"top_k": 3},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_parameters_are_the_engines(ending: Engine, ending_served: Running, fields: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): float(bias) for token, bias in values["logit_bias"].items()}
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, **values)
    expected = ending.generate([TEXT], params)[0]
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 1.0, "seed": 3, **fields}
    status, found = posted(ending_served, "/v1/completions", body)
    assert status == 200 and found["choices"][0]["text"] == expected.text
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)
    assert found["usage"]["prompt_tokens"] == len(ending.request(TEXT, params).ids)
    pieces = streamed(ending_served, "/v1/completions", body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_all_endpoints_take_them(served: Running, path: str) -> None:
    more = {"messages": QUESTION} if "chat" in path else {"input": QUESTION[0]["content"]}
    body = {**more, "seed": 1, "allowed_token_ids": [5], "min_tokens": 4, "stop": "never", "bad_words": ["never"]}
    limit = "max_tokens" if "chat" in path else "max_output_tokens"
    status, found = posted(served, path, {**body, limit: 6})
    assert status == 200
    text = found["choices"][0]["message"]["content"] if "chat" in path else found["output"][0]["content"][0]["text"]
    assert len(text) == 6 and len(set(text)) == 1


def test_what_leaves_nothing_to_come_is_the_clients_error(served: Running) -> None:
    token = posted(served, "/tokenize", {"prompt": "t"})[1]["tokens"][0]
    body = {"prompt": TEXT, "max_tokens": 4, "allowed_token_ids": [token], "bad_words": ["t"]}
    status, found = posted(served, "/v1/completions", body)
    assert status == 400 and "no token may come next" in found["error"]["message"]
    assert posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 1})[0] == 200


def test_a_prediction_changes_the_drafter_alone() -> None:
    """Its request was verified as no other one of the server, within any number of nodes."""
    sent: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "how?"}]}
    sent["prediction"] = {"type": "content", "content": "so"}
    own = SpeculationParams(drafter="self", nodes=4, verification="relaxed")
    found = ChatRequest.model_validate(sent).speculation(own)
    assert found is not None and (str(found.spec), found.nodes, found.verification) == ("lookup", 4, "relaxed")
    drawn = SpeculationParams(drafter="self", method="static", verification="multi-round")
    assert ChatRequest.model_validate(sent).speculation(drawn) is None, "what it verifies is drawn, not looked up"
    matched = ChatRequest.model_validate(sent | {"draftree": {"verification": "match"}}).speculation(drawn)
    assert matched is not None and (str(matched.spec), matched.verification) == ("lookup", "match")
    asked = ChatRequest.model_validate(sent | {"draftree": {"method": "chain"}}).speculation(own)
    assert asked is not None and (str(asked.spec), asked.method, asked.verification) == ("lookup", "chain", "relaxed")

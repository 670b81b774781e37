"""``/v1/responses`` under the official client: the text of the engine, whole and as events."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine

from .running import NAME, Running, posted

QUESTION = "the cat in the hat the cat in the hat"


INPUTS: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"input": QUESTION}, [{"role": "user", "content": QUESTION}]),
    (
        {
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a b"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "c d"}]},
                {"role": "developer", "content": "now"},
                {"role": "user", "content": "e f"},
            ],
        },
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a b"},
            {"role": "assistant", "content": "c d"},
            {"role": "system", "content": "now"},
            {"role": "user", "content": "e f"},
        ],
    ),
]


@pytest.mark.parametrize(("asked", "conversation"), INPUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_has_the_text_of_the_engine(
    client: openai.OpenAI,
    alone: Engine,
    asked: dict[str, Any],
    conversation: list[dict[str, str]],
    temperature: float,
) -> None:
    expected = alone.generate([conversation], SamplingParams(max_tokens=20, temperature=temperature, seed=6))[0]
    options: Any = {
        "model": NAME,
        "max_output_tokens": 20,
        "temperature": temperature,
        "extra_body": {"seed": 6},
        **asked,
    }
    found: Any = client.responses.create(**options)
    assert found.output_text == expected.text
    ended = expected.finish_reason == "length"
    assert found.status == ("incomplete" if ended else "completed")
    assert not ended or found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens

    events: Any = list(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == f"response.{found.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text == events[-1].response.output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_logprobs_are_there_where_they_are_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "input": QUESTION, "max_output_tokens": 6}
    found: Any = client.responses.create(**options, top_logprobs=2)
    told = found.output[0].content[0].logprobs
    assert len(told) == found.usage.output_tokens and all(len(one.top_logprobs) == 2 for one in told)
    plain: Any = client.responses.create(**options)
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),  # the model has no end-of-sequence token
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(served: Running, more: dict[str, Any], field: str) -> None:
    status, found = posted(served, "/v1/responses", {"input": QUESTION, **more})
    assert status == 400 and found["error"]["param"].startswith(field), found
    assert served.idle

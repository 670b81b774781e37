"""Usage means the same on every route: chats, completions and responses, whole, streamed, and in batches."""

from __future__ import annotations

import http.client
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.openai.batches import BODIES, CHAT, COMPLETIONS, RESPONSES, Answering, BatchLine

from .running import LOOKUP, NAME, Running, posted, running, streamed, target

ONE_BY_ONE = SchedulerParams(rows=1, prefixes=4)
"""Of choices that begin when the one before has ended, each finds the row of the one before."""
WAYS = ("whole", "streamed", "batch")


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(scheduling=ONE_BY_ONE) as found:
        yield found


@pytest.fixture(scope="module")
def batch() -> Answering:
    return Answering(Engine(target(), LOOKUP, scheduling=ONE_BY_ONE), LOOKUP, NAME, 1)


def asked(served: Running, batch: Answering, way: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer."""
    body = {"max_output_tokens" if url == RESPONSES else "max_tokens": 6, "temperature": 0, **body}
    if way == "batch":
        line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": NAME, **body}}
        (record,) = batch.records([BatchLine(1, json.dumps(line).encode())])
        found: dict[str, Any] = record["response"]["body"]
    elif way == "whole":
        status, found = posted(served, url, body)
        assert status == 200, found
    elif url == RESPONSES:
        found = last_event(served, body)
    else:
        body["stream_options"] = {"include_usage": True}
        found = [event for event in streamed(served, url, body) if event.get("usage")][-1]
    usage: dict[str, Any] = found["usage"]
    return usage


def last_event(served: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The response in the last event of a stream, which ends without [DONE]."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    content = json.dumps({"model": NAME, "stream": True, **body})
    connection.request("POST", RESPONSES, content, {"Content-Type": "application/json"})
    *_, last, _ = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    found: dict[str, Any] = json.loads(last.split("data: ")[1])["response"]
    return found


def prompts_of(url: str, texts: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fields of a body that give prompts; the same prompts as /tokenize takes them."""
    if url == COMPLETIONS:
        return {"prompt": texts}, [{"prompt": text} for text in texts]
    (text,) = texts
    messages = [{"role": "user", "content": text}]
    return {"messages": messages} if url == CHAT else {"input": text}, [{"messages": messages}]


CASES = [
    *((url, ("{} the first of all prompts is read once",), 1) for url in BODIES),
    *((url, ("{} a prompt of three choices is read once",), 3) for url in (CHAT, COMPLETIONS)),
    (COMPLETIONS, ("{} one of two prompts is this one", "{} and the other is a longer one by far"), 2),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("url", "texts", "n"), CASES)
def test_usage_counts_each_prompt_once(
    served: Running, batch: Answering, url: str, texts: tuple[str, ...], n: int, way: str
) -> None:
    """Of three choices of a prompt two found what the first had read, so that more of it was cached than it had."""
    begin = f"{zlib.crc32(repr((url, texts, n, way)).encode()):x}"  # nothing that was read before begins so
    fields, prompts = prompts_of(url, [text.format(f"{i}{begin}") for i, text in enumerate(texts)])
    counts = [posted(served, "/tokenize", prompt)[1]["count"] for prompt in prompts]
    fields = fields if n == 1 else {"n": n, **fields}
    first, again = (asked(served, batch, way, url, fields) for _ in range(2))
    given, taken = ("input", "output") if url == RESPONSES else ("prompt", "completion")
    for usage, cached in ((first, 0), (again, sum(counts) - len(counts))):
        assert usage[f"{given}_tokens"] == sum(counts)
        assert usage[f"{taken}_tokens"] == 6 * n * len(texts)
        assert usage["total_tokens"] == sum(counts) + 6 * n * len(texts)
        written = {"cache_write_tokens": 0} if url == RESPONSES else {}  # OpenAI's client requires it there
        assert usage[f"{given}_tokens_details"] == {"cached_tokens": cached, **written}

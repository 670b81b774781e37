"""The server under real clients: the texts of the engine, streams, limits, keys, and clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from typing import Any

import openai
import pytest

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams

from .running import HEAD, NAME, TEXT, GatedModel, Running, fetched, posted, running, slow_target, until

QUESTION: list[Any] = [{"role": "user", "content": "the cat in the hat the cat in the hat"}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_is_answered_as_the_engine_alone_would(client: openai.OpenAI, alone: Engine, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5)
    expected = alone.generate([QUESTION], params)[0]
    found = client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        max_completion_tokens=24,
        temperature=temperature,
        seed=5,
    )
    (choice,) = found.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == {"eos": "stop", "length": "length"}[expected.finish_reason]
    assert found.usage is not None and found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert (found.system_fingerprint or "").startswith("draftree-")
    assert found.model == NAME and found.object == "chat.completion" and found.id.startswith("chatcmpl-")


def test_a_stream_has_the_same_text_piece_by_piece(client: openai.OpenAI, alone: Engine) -> None:
    expected = alone.generate([QUESTION], SamplingParams(max_tokens=24))[0]
    stream = client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    texts = [e.choices[0].delta.content or "" for e in events if e.choices]
    assert "".join(texts) == expected.text
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"
    assert events[-1].choices == [] and events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 24
    assert len({e.id for e in events}) == 1


def test_the_token_of_a_pass_is_sent_before_the_next_pass() -> None:
    """No token waits for others. Those that come while the server is busy are one event, so the model waits here."""
    model = GatedModel()
    with running(model) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        model.gate.release()  # it reads the prompt
        extra = {"draftree": {"drafter": "none"}, "ignore_eos": True}
        stream = client.completions.create(
            model=NAME, prompt=TEXT, max_tokens=6, logit_bias={"5": 100}, stream=True, extra_body=extra
        )
        pieces = list[str]()
        for event in stream:
            if event.choices[0].text:
                pieces.append(event.choices[0].text)
                model.gate.release()
    assert len(pieces) == 6 and len(set(pieces)) == 1


def test_a_stream_ends_with_done(served: Running) -> None:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    body = json.dumps({"model": NAME, "prompt": TEXT, "max_tokens": 4, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    lines = answer.read().decode().split("\n\n")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    connection.close()


def lines(served: Running, **body: Any) -> list[str]:
    """What a stream sends, line by line."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    content = json.dumps({"model": NAME, "prompt": TEXT, "stream": True, "ignore_eos": True, **body})
    connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
    try:
        return connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()


def test_the_tokens_of_a_step_come_as_one_event(served: Running, alone: Engine) -> None:
    body = {"max_tokens": 24, "logit_bias": {"5": 100}, "temperature": 0, "stream_options": {"include_usage": True}}
    *events, last = [json.loads(line[6:]) for line in lines(served, **body) if line.startswith("data: {")]
    params = SamplingParams(max_tokens=24, logit_bias={5: 100.0}, ignore_eos=True)
    (expected,) = alone.generate([TEXT], params)
    assert "".join(event["choices"][0]["text"] for event in events) == expected.text
    steps = last["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert len(events) <= 1 + steps + 1 < 12, "its first token, its steps, its end"


def test_a_stream_begins_before_its_first_token() -> None:
    with running(slow_target(), scheduling=SchedulerParams(rows=1)) as served:
        before = threading.Thread(target=lines, args=(served,), kwargs={"max_tokens": 60})
        before.start()
        served.get_busy()
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
        body = json.dumps({"model": NAME, "input": TEXT, "stream": True, "max_output_tokens": 2})
        connection.request("POST", "/v1/responses", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline() == b"event: response.created\n"
        assert not served.idle and before.is_alive(), "the request before it has ended"
        assert b"response.incomplete" in answer.read()
        connection.close()
        before.join()


def test_a_stream_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.server.streams.QUIET", 0.004)
    model = GatedModel()
    with running(model) as served:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
        body = json.dumps({"model": NAME, "prompt": TEXT, "stream": True, "max_tokens": 4})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        until(lambda: answer.readline() == b": waiting\n")
        model.gate.release(4)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()


def test_completions_take_texts_lists_and_ids(client: openai.OpenAI, served: Running, alone: Engine) -> None:
    expected = alone.generate([TEXT], SamplingParams(max_tokens=8))[0]
    ids = posted(served, "/tokenize", {"prompt": TEXT})[1]["tokens"]
    for prompt in (TEXT, [TEXT, TEXT], ids, [ids]):
        found = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
        assert {choice.text for choice in found.choices} == {expected.text}
        assert len(found.choices) == (2 if prompt == [TEXT, TEXT] else 1)
    echoed = client.completions.create(model=NAME, prompt=TEXT, max_tokens=8, temperature=0, echo=True)
    assert echoed.choices[0].text == TEXT + expected.text


def test_each_choice_has_a_seed_of_its_own(client: openai.OpenAI, alone: Engine) -> None:
    expected = [
        alone.generate([TEXT], SamplingParams(max_tokens=12, temperature=1.0, seed=seed))[0].text
        for seed in (9, 10, 11)
    ]
    found = client.completions.create(model=NAME, prompt=TEXT, max_tokens=12, temperature=1, seed=9, n=3)
    assert [choice.text for choice in found.choices] == expected
    streamed = client.completions.create(
        model=NAME, prompt=TEXT, max_tokens=12, temperature=1, seed=9, n=3, stream=True
    )
    texts = ["", "", ""]
    for event in streamed:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_logprobs_are_the_engines_whole_and_streamed(client: openai.OpenAI, alone: Engine) -> None:
    expected = alone.generate([QUESTION], SamplingParams(max_tokens=12, logprobs=2))[0]
    options: Any = {"model": NAME, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 2}
    found: Any = client.chat.completions.create(**options)
    whole = found.choices[0].logprobs.content
    events: Any = client.chat.completions.create(**options, stream=True)
    logged = [e.choices[0].logprobs for e in events if e.choices and e.choices[0].logprobs]
    pieces = [one for logprobs in logged for one in logprobs.content]
    for content in (whole, pieces):
        assert len(content) == len(expected.chunks)
        for one, chunk in zip(content, expected.chunks, strict=True):
            assert chunk.logprobs is not None
            assert one.logprob == pytest.approx(chunk.logprobs.token, abs=1e-4)
            assert [b.logprob for b in one.top_logprobs] == pytest.approx([v for _, v in chunk.logprobs.best], abs=1e-4)
            assert bytes(one.bytes).decode() == one.token
    ids = alone.inputs.encode(QUESTION)
    text: Any = client.completions.create(model=NAME, prompt=ids, max_tokens=12, temperature=0, logprobs=2)
    column = text.choices[0].logprobs
    assert column.token_logprobs == pytest.approx([c.logprobs.token for c in expected.chunks if c.logprobs], abs=1e-4)
    assert len(column.tokens) == len(column.text_offset) == len(column.top_logprobs) == 12
    assert column.text_offset[:2] == [0, len(column.tokens[0])]


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, alone: Engine) -> None:
    whole = alone.generate([TEXT], SamplingParams(max_tokens=32))[0].text
    stop = whole[5:8]
    found = client.completions.create(model=NAME, prompt=TEXT, max_tokens=32, temperature=0, stop=stop)
    assert found.choices[0].text == whole[: whole.index(stop)] and found.choices[0].finish_reason == "stop"


def test_a_request_chooses_how_it_is_drafted_for(served: Running, alone: Engine) -> None:
    expected = alone.generate([TEXT], SamplingParams(max_tokens=24))[0].text
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0}
    choices: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"draftree": {"method": "static", "nodes": 6}}, True),
        ({"draftree": {"method": "opt-tree", "settings": {"delta": 0.1}}}, True),
        ({"draftree": {"drafter": "none"}}, False),
    ]
    for more, drafts in choices:
        status, found = posted(served, "/v1/completions", body | more)
        assert status == 200 and found["choices"][0]["text"] == expected
        figures = found["metrics"]["speculative_decoding"]
        assert (figures["num_draft_tokens"] > 0) is drafts
        assert figures["num_accepted_draft_tokens"] == sum(figures["accepted_by_depth"])
        gained = figures["mean_acceptance_length"] * figures["num_spec_steps"]
        assert round(gained) == found["usage"]["completion_tokens"] - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stream", [True, False])
def test_a_predicted_output_saves_passes_and_changes_no_text(
    client: openai.OpenAI, alone: Engine, temperature: float, stream: bool
) -> None:
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=4)
    expected = alone.generate([QUESTION], params)[0]
    words, ids = expected.text, expected.token_ids
    figures = []
    for content in (words, "nothing of the kind!", [{"type": "text", "text": words[:9]}]):
        create: Any = client.chat.completions.create
        found = create(
            model=NAME,
            messages=QUESTION,
            max_tokens=32,
            temperature=temperature,
            seed=4,
            prediction={"type": "content", "content": content},
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
        if stream:
            events = list(found)
            text, last = "".join(e.choices[0].delta.content or "" for e in events if e.choices), events[-1]
        else:
            text, last = found.choices[0].message.content, found
        assert text == words
        details = last.usage.completion_tokens_details
        figures.append((last.metrics["speculative_decoding"]["num_spec_steps"], details))
        assert last.usage.completion_tokens == len(ids)
    (right, agreed), (wrong, other), _ = figures
    assert right < wrong
    assert agreed.accepted_prediction_tokens > other.accepted_prediction_tokens
    assert other.rejected_prediction_tokens > 0


def test_a_prompt_that_begins_as_one_before_says_what_was_there(client: openai.OpenAI) -> None:
    prompt = "0123456789 " * 6
    first, again = (client.completions.create(model=NAME, prompt=prompt, max_tokens=2) for _ in range(2))
    for found, reused in ((first, False), (again, True)):
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        cached = found.usage.prompt_tokens_details.cached_tokens or 0
        assert (cached > 0) is reused and cached < found.usage.prompt_tokens


def test_without_a_prediction_usage_has_no_details(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=2)
    assert found.usage is not None and found.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": 4}, "model"),
        ({"logprobs": 1, "echo": True, "stream": True}, "stream"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"draftree": {"drafter": "head"}}, "draftree.drafter"),
        ({"draftree": {"speed": 9}}, "draftree.speed"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_refused(served: Running, body: dict[str, Any], field: str) -> None:
    status, found = posted(served, "/v1/completions", {"prompt": TEXT, **body})
    assert status == 400 and found["error"]["param"] == field and field in found["error"]["message"]
    assert served.idle


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": [{"type": "audio"}]}}, "prediction.content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_what_would_change_a_chat_is_refused_by_name(served: Running, more: dict[str, Any], field: str) -> None:
    status, found = posted(served, "/v1/chat/completions", {"messages": QUESTION, **more})
    assert status == 400 and found["error"]["param"] == field


def test_a_prediction_that_no_answer_can_have_is_refused(served: Running) -> None:
    prediction = {"type": "content", "content": "a b " * 200}
    status, found = posted(served, "/v1/chat/completions", {"messages": QUESTION, "prediction": prediction})
    assert status == 400 and "the prediction has" in found["error"]["message"]


def test_content_may_be_parts_and_unknown_fields_do_no_harm(served: Running) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat"}, {"type": "text", "text": "in the hat"}]}]
    plain = [{"role": "user", "content": "the cat\nin the hat"}]
    texts = [
        posted(served, "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0, **more})[1]
        for messages, more in ((parts, {"user": "me", "service_tier": "auto", "tools": None}), (plain, {}))
    ]
    assert texts[0]["choices"][0]["message"] == texts[1]["choices"][0]["message"]


def test_models_health_version_and_tokens(client: openai.OpenAI, served: Running) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.completions.create(model="gpt-9", prompt=TEXT)
    assert fetched(served, "/health")[0] == fetched(served, "/ready")[0] == fetched(served, "/version")[0] == 200
    ids = posted(served, "/tokenize", {"messages": QUESTION})[1]
    assert ids["count"] == len(ids["tokens"])
    spelt = posted(served, "/detokenize", {"tokens": ids["tokens"]})[1]
    assert "the cat in the hat" in spelt["prompt"] == spelt["content"]  # vLLM's name, and llama.cpp's
    assert json.loads(fetched(served, "/v1/models")[1])["data"][0]["root"] == NAME  # which vLLM's benchmark reads
    assert posted(served, "/detokenize", {"tokens": [99999]})[0] == 400
    assert fetched(served, "/v1/models/..%2f..%2fetc%2fpasswd")[0] == 404
    assert fetched(served, "/nothing")[0] == 404


def test_metrics_count_what_was_decoded(served: Running) -> None:
    def counted(name: str) -> float:
        page = fetched(served, "/metrics")[1]
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    before = {name: counted(name) for name in ("draftree:generation_tokens_total", "vllm:spec_decode_num_drafts_total")}
    found = posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 24, "temperature": 0})[1]
    served.settle()
    assert counted("draftree:generation_tokens_total") - before["draftree:generation_tokens_total"] == 24
    assert counted("vllm:spec_decode_num_drafts_total") > before["vllm:spec_decode_num_drafts_total"]
    assert counted("vllm:spec_decode_num_accepted_tokens_total") <= counted("vllm:spec_decode_num_draft_tokens_total")
    assert counted('draftree:draft_tokens_total{accepted="yes"') == counted(
        "vllm:spec_decode_num_accepted_tokens_total"
    )
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert counted("draftree:requests_running") == 0
    assert counted("draftree:time_to_first_token_seconds_count") >= counted("draftree:requests_total") > 0


def test_a_client_that_leaves_frees_its_row() -> None:
    """In a stream, and while it waits for a whole answer."""
    with running(slow_target()) as served:
        host, port = served.url.removeprefix("http://").split(":")
        for number, stream in enumerate((True, False), start=1):
            asked = {"model": NAME, "prompt": TEXT, "max_tokens": 100, "stream": stream, "ignore_eos": True}
            body = json.dumps(asked | {"draftree": {"drafter": "none"}}).encode()
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                if stream:
                    assert b"200 OK" in connection.recv(4096)
                served.get_busy()
            served.settle()
            line = f'draftree:requests_total{{finish_reason="cancelled"}} {number}.0'
            until(lambda: line in fetched(served, "/metrics")[1])  # noqa: B023 - it is counted a moment later
        assert posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 2})[0] == 200


def test_many_at_once_get_what_each_gets_alone(served: Running, alone: Engine) -> None:
    bodies: list[dict[str, Any]] = [
        {
            "prompt": TEXT[: 6 + i % 5],
            "max_tokens": 8 + i % 9,
            "temperature": float(i % 2),
            "seed": i,
            "draftree": [{}, {"method": "static"}, {"drafter": "none"}][i % 3],
        }
        for i in range(24)
    ]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = posted(served, "/v1/completions", bodies[i])[1]["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, body in enumerate(bodies):
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=i)
        assert found[i] == alone.generate([str(body["prompt"])], params)[0].text, body

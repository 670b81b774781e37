"""The client libraries that people have: what each can do works against the server.

Each is a class whose methods are abilities, the same for all; one that a library lacks is left out. Texts are those of
the model without a server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal, TypeVar

import agents
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from llm.default_plugins.openai_models import Chat
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from draftree.config import SamplingParams
from draftree.engine.engine import Engine

from ..scripted import THINKING, ScriptedModel, thinking_tokenizer
from .running import NAME, Running, bytes_target, fetched, running, slow_target, until

QUESTION = "how is it in oslo?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
MOST = 24

T = TypeVar("T")
Spent = tuple[int, int]
"""Tokens of the prompt and of the answer."""
Called = tuple[str, dict[str, Any]]
"""Name and arguments of a function."""


class Answer(BaseModel):
    """What a schema wants."""

    colour: Literal["red", "blue"]
    warm: bool


def get_weather(city: Literal["oslo", "rome"]) -> str:
    """Get the weather."""
    return f"fine in {city}"


PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["oslo", "rome"]}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class OpenAI:
    """openai"""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self._ask = {"model": NAME, "messages": MESSAGES, "max_tokens": MOST, "temperature": 0}

    def _asked(self, **more: Any) -> Any:
        return self._client.chat.completions.create(**{**self._ask, **more})

    def plain(self) -> tuple[str, Spent]:
        found = self._asked()
        return found.choices[0].message.content, (found.usage.prompt_tokens, found.usage.completion_tokens)

    def stream(self) -> tuple[str, Spent]:
        *events, last = self._asked(stream=True, stream_options={"include_usage": True})
        text = "".join(event.choices[0].delta.content or "" for event in events)
        return text, (last.usage.prompt_tokens, last.usage.completion_tokens)

    def tools(self) -> Called:
        (call,) = self._asked(tools=[TOOL], tool_choice="required", max_tokens=200).choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def schema(self) -> Answer | None:
        asked: dict[str, Any] = {**self._ask, "max_tokens": 200}
        found: Any = self._client.chat.completions.parse(**asked, response_format=Answer)
        parsed: Answer | None = found.choices[0].message.parsed
        return parsed

    def logprobs(self) -> list[float]:
        return [one.logprob for one in self._asked(logprobs=True, top_logprobs=2).choices[0].logprobs.content]

    def several(self) -> list[str]:
        return [choice.message.content for choice in self._asked(n=3, temperature=1, seed=5).choices]

    def stop(self, text: str) -> str:
        return str(self._asked(stop=[text]).choices[0].message.content)

    def leave(self) -> None:
        with self._asked(stream=True, max_tokens=90) as events:
            next(events)


class LangChain:
    """langchain-openai"""

    def __init__(self, url: str, responses: bool = False) -> None:
        own: dict[str, Any] = {"model": NAME, "base_url": url, "api_key": "none", "max_retries": 0}
        self._made = {**own, "stream_usage": True, "temperature": 0, "use_responses_api": responses}

    def _model(self, most: int = MOST, **more: Any) -> ChatOpenAI:
        return ChatOpenAI(**{**self._made, "max_tokens": most, **more})

    def plain(self) -> tuple[str, Spent]:
        found = self._model().invoke(QUESTION)
        return found.text, _langchain_usage(found)

    def stream(self) -> tuple[str, Spent]:
        first, *others = self._model().stream(QUESTION)
        whole: Any = first
        for other in others:
            whole += other
        return whole.text, _langchain_usage(whole)

    def tools(self) -> Called:
        found: Any = self._model(200).bind_tools([TOOL], tool_choice="required").invoke(QUESTION)
        (call,) = found.tool_calls
        return call["name"], call["args"]

    def schema(self) -> Answer | None:
        found: Any = self._model(200).with_structured_output(Answer, method="json_schema").invoke(QUESTION)
        answer: Answer | None = found
        return answer

    def leave(self) -> None:
        events = self._model(90).stream(QUESTION)
        next(events)
        events.close()  # type: ignore[attr-defined]


class LangChainChats(LangChain):
    """langchain-openai over chats"""

    def logprobs(self) -> list[float]:
        found = self._model(logprobs=True, top_logprobs=2).invoke(QUESTION)
        return [one["logprob"] for one in found.response_metadata["logprobs"]["content"]]

    def several(self) -> list[str]:
        (choices,) = self._model(n=3, temperature=1, seed=5).generate([[HumanMessage(QUESTION)]]).generations
        return [choice.text for choice in choices]

    def stop(self, text: str) -> str:
        return str(self._model().invoke(QUESTION, stop=[text]).text)


class LangChainResponses(LangChain):
    """langchain-openai over responses"""

    def __init__(self, url: str) -> None:
        super().__init__(url, responses=True)


def _langchain_usage(message: Any) -> Spent:
    return message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]


def closing(url: str, act: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    """What is done with a client that ends with its event loop."""

    async def done() -> T:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await act(client)

    return asyncio.run(done())


class PydanticAI:
    """pydantic-ai over chats"""

    model: Any = OpenAIChatModel

    def __init__(self, url: str) -> None:
        self._url = url

    def _agent(self, client: openai.AsyncOpenAI, output: Any = str, most: int = MOST, **more: Any) -> Agent[None, Any]:
        settings: Any = {"max_tokens": most, "temperature": 0.0, **more}
        model = self.model(NAME, provider=OpenAIProvider(openai_client=client))
        return Agent(model, output_type=output, model_settings=settings, retries=0)

    def _asked(self, *output: Any, **more: Any) -> Any:
        return closing(self._url, lambda client: self._agent(client, *output, **more).run(QUESTION))

    def plain(self) -> tuple[str, Spent]:
        found = self._asked()
        return found.output, (found.usage.input_tokens, found.usage.output_tokens)

    def stream(self) -> tuple[str, Spent]:
        async def streamed(client: openai.AsyncOpenAI) -> tuple[str, Spent]:
            async with self._agent(client).run_stream(QUESTION) as found:
                text = "".join([piece async for piece in found.stream_text(delta=True, debounce_by=None)])
                return text, (found.usage.input_tokens, found.usage.output_tokens)

        return closing(self._url, streamed)

    def tools(self) -> Called:
        messages = self._asked(ToolOutput(get_weather, name="get_weather"), 200).all_messages()
        (call,) = [part for message in messages for part in message.parts if part.part_kind == "tool-call"]
        return call.tool_name, call.args_as_dict()

    def schema(self) -> Answer | None:
        found: Answer = self._asked(NativeOutput(Answer), 200).output
        return found

    def leave(self) -> None:
        async def left(client: openai.AsyncOpenAI) -> None:
            async with self._agent(client, most=90).run_stream(QUESTION) as found:
                async for _ in found.stream_text(debounce_by=None):
                    break

        closing(self._url, left)


class PydanticAIChats(PydanticAI):
    """pydantic-ai over chats"""

    def logprobs(self) -> list[float]:
        details = self._asked(openai_logprobs=True, openai_top_logprobs=2).all_messages()[-1]
        return [one["logprob"] for one in details.provider_details["logprobs"]]

    def stop(self, text: str) -> str:
        return str(self._asked(stop_sequences=[text]).output)


class PydanticAIResponses(PydanticAI):
    """pydantic-ai over responses"""

    model = OpenAIResponsesModel


class Agents:
    """openai-agents over chats"""

    def __init__(self, url: str) -> None:
        agents.set_tracing_disabled(True)
        self._url = url

    def _agent(self, client: openai.AsyncOpenAI, most: int = MOST, output: Any = None, **more: Any) -> Any:
        settings = agents.ModelSettings(temperature=0, max_tokens=most, include_usage=True, **more)
        return agents.Agent(
            name="asked",
            model=agents.OpenAIChatCompletionsModel(NAME, client),
            model_settings=settings,
            tools=[agents.function_tool(get_weather)] if settings.tool_choice else [],
            output_type=output,
            tool_use_behavior="stop_on_first_tool",
        )

    def _asked(self, *arguments: Any, **more: Any) -> Any:
        return closing(self._url, lambda client: agents.Runner.run(self._agent(client, *arguments, **more), QUESTION))

    def plain(self) -> tuple[str, Spent]:
        found = self._asked()
        return found.final_output, _agents_usage(found)

    def stream(self) -> tuple[str, Spent]:
        async def streamed(client: openai.AsyncOpenAI) -> tuple[str, Spent]:
            found = agents.Runner.run_streamed(self._agent(client), QUESTION)
            events: list[Any] = [event async for event in found.stream_events() if _is_text(event)]
            return "".join(event.data.delta for event in events), _agents_usage(found)

        return closing(self._url, streamed)

    def tools(self) -> Called:
        items = self._asked(200, tool_choice="required").new_items
        (call,) = [item.raw_item for item in items if item.type == "tool_call_item"]
        return call.name, json.loads(call.arguments)

    def schema(self) -> Answer | None:
        found: Answer = self._asked(200, Answer).final_output
        return found

    def stop(self, text: str) -> str:
        return str(self._asked(extra_args={"stop": [text]}).final_output)

    def leave(self) -> None:
        async def left(client: openai.AsyncOpenAI) -> None:
            found = agents.Runner.run_streamed(self._agent(client, 90), QUESTION)
            async for event in found.stream_events():
                if _is_text(event):
                    found.cancel()

        closing(self._url, left)


def _is_text(event: Any) -> bool:
    return bool(event.type == "raw_response_event" and event.data.type == "response.output_text.delta")


def _agents_usage(found: Any) -> Spent:
    usage = found.context_wrapper.usage
    return usage.input_tokens, usage.output_tokens


class LLM:
    """llm"""

    def __init__(self, url: str) -> None:
        self._model = Chat("own", model_name=NAME, api_base=url, supports_schema=True)
        self._model.needs_key = None  # type: ignore[assignment]

    def _asked(self, stream: bool = False, **more: Any) -> Any:
        return self._model.prompt(QUESTION, stream=stream, **{"max_tokens": MOST, "temperature": 0, **more})

    def plain(self) -> tuple[str, Spent]:
        found = self._asked()
        return found.text(), (found.usage().input, found.usage().output)

    def stream(self) -> tuple[str, Spent]:
        found = self._asked(stream=True)
        return "".join(found), (found.usage().input, found.usage().output)

    def schema(self) -> Answer | None:
        return Answer.model_validate_json(self._asked(schema=Answer, max_tokens=200).text())

    def stop(self, text: str) -> str:
        return str(self._asked(stop=text).text())


CLIENTS: list[Any] = [
    OpenAI,
    LangChainChats,
    LangChainResponses,
    PydanticAIChats,
    PydanticAIResponses,
    Agents,
    LLM,
]


def able(ability: str) -> list[Any]:
    return [client for client in CLIENTS if hasattr(client, ability)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(bytes_target(tags=True)) as served:
        yield f"{served.url}/v1"


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine(bytes_target(tags=True))


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(slow_target()) as served:
        yield served


def text_of(alone: Engine, **params: Any) -> str:
    return alone.generate([MESSAGES], SamplingParams(max_tokens=MOST, **params))[0].text


@pytest.mark.parametrize("way", ["plain", "stream"])
@pytest.mark.parametrize("client", CLIENTS)
def test_text_and_usage_are_the_models(client: Any, way: str, url: str, alone: Engine) -> None:
    text, spent = getattr(client(url), way)()
    assert text == text_of(alone)
    assert spent == (len(alone.inputs.encode(MESSAGES)), MOST)


@pytest.mark.parametrize("client", able("tools"))
def test_a_function_is_called_with_valid_arguments(client: Any, url: str) -> None:
    name, arguments = client(url).tools()
    assert name == "get_weather" and arguments["city"] in ("oslo", "rome") and len(arguments) == 1


@pytest.mark.parametrize("client", able("schema"))
def test_an_answer_has_the_schema(client: Any, url: str) -> None:
    assert isinstance(client(url).schema(), Answer)


@pytest.mark.parametrize("client", able("logprobs"))
def test_log_probabilities_are_the_models(client: Any, url: str, alone: Engine) -> None:
    (found,) = alone.generate([MESSAGES], SamplingParams(max_tokens=MOST, logprobs=2))
    expected = [chunk.logprobs.token for chunk in found.chunks if chunk.logprobs]
    assert client(url).logprobs() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("client", able("several"))
def test_each_choice_has_the_text_of_its_seed(client: Any, url: str, alone: Engine) -> None:
    assert client(url).several() == [text_of(alone, temperature=1.0, seed=5 + i) for i in range(3)]


@pytest.mark.parametrize("client", able("stop"))
def test_a_text_ends_before_a_stop_string(client: Any, url: str, alone: Engine) -> None:
    whole = text_of(alone)
    stop = next(whole[at : at + 2] for at in range(4, len(whole) - 2) if "�" not in whole[at : at + 2])
    assert client(url).stop(stop) == whole[: whole.index(stop)]


@pytest.mark.parametrize("client", able("leave"))
def test_an_answer_that_is_left_is_made_no_further(client: Any, slow: Running) -> None:
    def cancelled() -> int:
        page = fetched(slow, "/metrics")[1]
        return page.count('draftree:requests_total{finish_reason="cancelled"}') and int(
            float(page.split('draftree:requests_total{finish_reason="cancelled"} ')[1].split()[0])
        )

    before = cancelled()
    client(f"{slow.url}/v1").leave()
    slow.settle()
    until(lambda: cancelled() == before + 1)  # it is counted a moment later


def test_thoughts_come_apart_from_the_answer() -> None:
    """As clients know them: a field of messages and of deltas, and a part of pydantic-ai's."""
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0}
    with running(ScriptedModel("<think>so</think>yes", thinking_tokenizer(THINKING, False))) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            message: Any = client.chat.completions.create(**asked).choices[0].message
            deltas: list[Any] = [e.choices[0].delta for e in client.chat.completions.create(**asked, stream=True)]
        assert (message.reasoning_content, message.content) == ("so", "yes")
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "so"
        assert "".join(delta.content or "" for delta in deltas) == "yes"
        for kind in (PydanticAIChats, PydanticAIResponses):
            found = kind(f"{served.url}/v1")._asked()
            (response,) = [each for each in found.new_messages() if each.kind == "response"]
            assert found.output == "yes" and [part.part_kind for part in response.parts] == ["thinking", "text"]

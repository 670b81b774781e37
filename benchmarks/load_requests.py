"""Requests of many kinds, as clients of a server send them, stay, leave, and read slowly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx2 as httpx

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
PROMPTS = (
    "Count from one to twenty.",
    "Name three colours, and say of each what has it.",
    "Write a function in Python that returns the area of a rectangle.",
    "the cat in the hat the cat in the hat the cat",
    "What is the capital of France?",
    "Say the alphabet. Then say it again.",
    "Give me a recipe for bread, in five steps.",
    "Sum up this list in a sentence. "
    + " ".join(f"Item {i}: a box of {i % 7} apples from place {i}." for i in range(40)),
    "How many boxes are there? " + " ".join(f"Box {i} came from place {i % 11}." for i in range(150)),
)
DRAFTED: Sequence[dict[str, Any]] = (
    {},
    {"drafter": "none"},
    {"method": "chain"},
    {"method": "static", "nodes": 12},
    {"method": "opt-tree", "nodes": 24},
    {"method": "dynamic-width-budget", "nodes": 16},
    {"method": "eagle2"},
)
SHAPED: Sequence[dict[str, Any]] = (
    {},
    {},
    {"stop": ["\n\n", "ten"]},
    {"repetition_penalty": 1.2, "min_p": 0.02},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {"198": -5}},
    {"min_tokens": 4, "bad_words": ["the", "and"], "top_k": 40},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[A-Z][a-z ]{4,30}[.]"}},
    {"structured_outputs": {"choice": ["yes, of course", "yes", "no, never"]}},
)


@dataclass(slots=True)
class Asked:
    """A request.

    Attributes:
        chat: of the chat endpoint.
        body: without how it is drafted for.
        speculation: that; of load alone.
        leaves: after so many events its client leaves; None: it stays.
        slow: it reads an event in so many seconds.
        text: that came, of all answers.
        began, times: when it was sent, and when its events with text came; seconds.
        reason: why it ended; empty: its client has left.
    """

    chat: bool
    body: dict[str, Any]
    speculation: dict[str, Any]
    leaves: int | None
    slow: float = 0.0
    text: str = ""
    reason: str = field(default="", repr=False)
    began: float = field(default=0.0, repr=False)
    times: list[float] = field(default_factory=list, repr=False)

    @property
    def alone(self) -> Asked:
        """The same without load and drafts, whole."""
        body = {key: value for key, value in self.body.items() if key not in ("stream", "priority", "prediction")}
        return replace(self, body=body, speculation={"drafter": "none"}, leaves=None, slow=0.0, text="", reason="")

    @property
    def anew(self) -> Asked:
        """The same, not sent yet."""
        return replace(self, text="", reason="", times=[])

    def fits(self, alone: str) -> bool:
        """Its text is the one of the request alone; of a client that left, the beginning of that."""
        return self.text == alone if self.reason else alone.startswith(self.text)

    async def send(self, client: httpx.AsyncClient, server: str = "") -> None:
        """Send it and read its answer.

        Args:
            server: its address; empty: the client knows it.

        Raises:
            RuntimeError: it was refused or failed.
        """
        path = server + ("/v1/chat/completions" if self.chat else "/v1/completions")
        body = self.body | ({"draftree": self.speculation} if self.speculation else {})
        self.began = time.perf_counter()
        if not body.get("stream"):
            answer = await client.post(path, json=body)
            if answer.status_code != 200:
                raise RuntimeError(f"{body}: {answer.text}")
            choices = answer.json()["choices"]
            self.text = "\0".join(c["message"]["content"] if self.chat else c["text"] for c in choices)
            self.reason = choices[0]["finish_reason"]
            return
        async with client.stream("POST", path, json=body) as answer:
            number = 0
            async for event in _events(answer):
                if "error" in event:
                    raise RuntimeError(f"{body}: {event}")
                (choice,) = event["choices"]
                text = (choice["delta"].get("content") or "") if self.chat else choice["text"]
                if text:  # a chat's first event has none
                    self.times.append(time.perf_counter())
                await asyncio.sleep(self.slow)
                self.text += text
                self.reason, number = choice["finish_reason"] or "", number + 1
                if number == self.leaves and not self.reason:
                    return


async def _events(answer: httpx.Response) -> AsyncIterator[Any]:
    if answer.status_code != 200:
        raise RuntimeError((await answer.aread()).decode())
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def made(number: int, rng: Random, model: str, tokens: int) -> Asked:
    """A request of some kind."""
    chat, prompt = rng.random() < 0.6, rng.choice(PROMPTS)
    body: dict[str, Any] = {"model": model, "max_tokens": tokens + number % 9, "seed": number}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"temperature": rng.choice((0.0, 0.7, 1.0)), "priority": rng.choice((0, 0, -2, 3))} | rng.choice(SHAPED)
    speculation = rng.choice(DRAFTED)
    if chat and rng.random() < 0.15:
        body["prediction"], speculation = {"type": "content", "content": f"{prompt} One, two, three, four, five."}, {}
    leaves = rng.randrange(1, 12) if rng.random() < 0.1 else None
    if leaves or rng.random() < 0.5:
        body["stream"] = True
    elif rng.random() < 0.2:
        body["n"] = 3
    return Asked(chat, body, speculation, leaves, 0.05 if rng.random() < 0.1 else 0.0)

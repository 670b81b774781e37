"""Bodies of answers in OpenAI's shape, whole or as events, and the figures in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import accumulate, zip_longest
from typing import Any, Protocol

from ..engine.engine import Engine
from ..request import Chunk, Logprobs, Request, Stats
from ..text.detokenizer import Detokenizer
from .bad_bodies import failure
from .choices import Choices, tokenizer_of
from .schema import CompletionRequest, StreamOptions
from .tools import Parsed, Parser

Scored = tuple[int, Logprobs | None]
"""A token with its log-probabilities; the first of a prompt has none."""


@cache
def _version() -> str:
    return version("draftree")


def system_fingerprint(engine: Engine) -> str:
    """Identify version and weights: with equal fingerprints a seed gives the same text."""
    return f"draftree-{_version()}-{engine.target.capabilities.fingerprint}"


def speculative_decoding(stats: Sequence[Stats]) -> dict[str, object]:
    """Summarize the drafting of an answer by vLLM's names; positions are depths of trees."""
    steps, tokens = sum(s.steps for s in stats), sum(s.tokens for s in stats) - len(stats)
    columns = ([s.drafted for s in stats], [s.accepted for s in stats])
    drafted, accepted = (list(map(sum, zip_longest(*rows, fillvalue=0))) for rows in columns)
    drafts = sum(drafted)
    return {
        "mean_acceptance_length": tokens / steps if steps else 1.0,
        "draft_acceptance_rate": sum(accepted) / drafts if drafts else 0.0,
        "num_spec_steps": steps,
        "num_draft_tokens": drafts,
        "num_accepted_draft_tokens": sum(accepted),
        "drafted_by_depth": drafted,
        "accepted_by_depth": accepted,
        "by_drafter": {
            name: {"drafted": sum(d.drafted for d in parts), "accepted": sum(d.accepted for d in parts)}
            for name in dict.fromkeys(name for s in stats for name in s.drafters)
            if (parts := [s.drafters[name] for s in stats if name in s.drafters])
        },
        "out_of_context": {name: most for s in stats for name, most in s.out_of_context.items()},
    }


def agreement(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Count the tokens of a predicted output that the output has, in order: the longest common subsequence.

    A bit of ``rises`` is a token of the prediction: 0 where the longest one with the output so far grows by it (Hyyrö
    2004, "Bit-parallel LCS-length computation revisited"). So each token of the output costs few operations, whatever
    the texts have in common.
    """
    places = dict.fromkeys(output, 0)
    for at, token in enumerate(prediction):
        if token in places:
            places[token] |= 1 << at
    every = (1 << len(prediction)) - 1
    rises = every
    for token in output:
        matches = rises & places[token]
        rises = ((rises + matches) | (rises - matches)) & every
    return len(prediction) - rises.bit_count()


def usage_of(requests: Sequence[Request], n: int = 1) -> dict[str, Any]:
    """Count the tokens of an answer, in the same way on every route.

    Each prompt counts once, however many choices it has; its cached tokens are those that no choice had to read.

    Args:
        n: choices of each prompt.
    """
    generated = sum(len(request.chunks) for request in requests)  # the tokens that ended them included
    prompt = sum(request.prompt_length for request in requests[::n])
    cached = sum(min(r.stats.reused for r in requests[at : at + n]) for at in range(0, len(requests), n))
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def named_logprobs(chunks: Sequence[Chunk], spell: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """List the log-probabilities of tokens, by their texts, with those of the most probable alternatives."""

    def named(token: int, value: float) -> dict[str, Any]:
        spelt = spell(token)
        return {"token": spelt.decode(errors="replace"), "logprob": value, "bytes": list(spelt)}

    return [
        {**named(chunk.token, scored.token), "top_logprobs": [named(*pair) for pair in scored.best]}
        for chunk in chunks
        if (scored := chunk.logprobs) is not None
    ]


def text_offsets(stream: Detokenizer, tokens: Sequence[int], begin: int) -> list[int]:
    """Compute where tokens begin in a text, and where the last ends; a token inside a character begins with it.

    Args:
        stream: of the text, without stop strings: what waits for one has its place all the same.
        begin: of the first one.
    """
    return list(accumulate(map(len, stream.push(tokens, last=False)), initial=begin))


def places(text: str, pieces: Iterable[str]) -> list[int]:
    """Find where pieces begin in a text, which may have other white space in front of them.

    Tokenizers put a space in front of words, and take white space away behind tags.
    """
    found, at = list[int](), 0
    for piece in pieces:
        if not text.startswith(piece, at):
            piece = piece.lstrip()
            while text[at : at + 1].isspace():
                at += 1
        found.append(at)
        at = min(at + len(piece), len(text))
    return found


_encode = json.JSONEncoder(ensure_ascii=False).encode
_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters at which some clients end a line of a stream, as ``str.splitlines`` does -> their escapes."""


def encode_json(value: object) -> str:
    """JSON on one line, whatever a client takes for the end of one."""
    return _encode(value).translate(_BREAKS)


def encode_text(text: str) -> str:
    """``encode_json`` of a text, in less time."""
    return json.encoder.encode_basestring(text).translate(_BREAKS)


class AnswerBuilder(Protocol):
    """The bodies of one answer, whole or as events.

    Attributes:
        closing: what a stream ends with behind its events.
    """

    closing: str

    def whole(self) -> dict[str, Any]:
        """The answer when all its requests have ended."""

    def first(self) -> Iterable[Mapping[str, Any]]:
        """The events that a stream begins with."""

    def frames(self) -> Mapping[int, tuple[str, str]]:
        """What is before and behind the text, as JSON, in the line of an event: of choices that are text alone."""

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterable[Mapping[str, Any]]:
        """The events of what a choice has gained."""

    def waiting(self) -> Iterable[Mapping[str, Any]]:
        """The event of a time in which nothing comes; none: a comment does."""

    def ended(self, index: int) -> Iterable[Mapping[str, Any]]:
        """The events of a choice's end.

        Raises:
            the exception that ended the request.
        """

    def last(self) -> Iterable[Mapping[str, Any]]:
        """The events that a stream ends with."""

    def failed(self, error: Exception) -> Mapping[str, Any]:
        """The event that a stream ends with in place of the last."""


_MARK = "\0"
"""The text of an event that becomes a frame."""


class CompletionBuilder:
    """Builds the bodies of one answer of a chat or a completion.

    Args:
        key: its id.
        model: its name in the answer.
        requests: one for each choice.
    """

    closing = "data: [DONE]\n\n"

    def __init__(self, key: str, model: str, choices: Choices, requests: Sequence[Request]) -> None:
        body, engine = choices.body, choices.engine
        self._body, self._requests, self._spell = body, requests, engine.inputs.token_bytes
        self._options = body.stream_options or StreamOptions()
        self._parsers = [choices.parser(number) for number, _ in enumerate(requests)]
        self._chat = not isinstance(body, CompletionRequest)
        echo = isinstance(body, CompletionRequest) and body.echo
        self._echoes = [choices.echo(number) if echo else ("", 0) for number, _ in enumerate(requests)]
        self._ends = [len(echoed) for echoed, _ in self._echoes]  # of texts, as far as their tokens have come
        self._tokenizer = tokenizer_of(engine)
        self._texts = dict[int, Detokenizer]()
        self._common = {
            "id": key,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint(engine),
        }

    def whole(self) -> dict[str, Any]:
        """Build the answer when all choices have ended."""
        return {
            **self._common,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._choice(index) for index in range(len(self._requests))],
            **self._end(),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        request, parser = self._requests[index], self._parsers[index]
        chunks = request.chunks
        scored = () if request.params.prompt_logprobs is None else (None, *request.prompt_logprobs)
        echoed = list(zip(request.ids, scored, strict=False))
        text = self._echoes[index][0] + request.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if parser is not None:
            parts = [*(part for chunk in chunks for part in parser.push(chunk)), *parser.end(request.rest)]
            message |= {"content": None if parser.calls else "", **_delta(parts)}
            for call in message.get("tool_calls", ()):
                del call["index"]  # which deltas alone have
        whole = message if self._chat else text
        reason = _finish(request.finish_reason, parser)
        return self._part(index, "message", whole, reason, self._logprobs(index, chunks, echoed))

    def _end(self) -> dict[str, Any]:
        """Build the usage and the metrics that end an answer."""
        requests = self._requests
        usage = usage_of(requests, self._body.n)
        if self._body.predicted:
            accepted = sum(agreement(request.prediction, request.output_ids) for request in requests)
            rejected = sum(len(request.prediction) for request in requests) - accepted
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            usage["completion_tokens_details"] = details
        if thoughts := [parser.tokens for parser in self._parsers if parser is not None and parser.tokens is not None]:
            usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = sum(thoughts)
        drafting = speculative_decoding([request.stats for request in requests])
        return {"usage": usage, "metrics": {"speculative_decoding": drafting}}

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the events that begin a stream."""
        for index, (echoed, _) in enumerate(self._echoes):
            if self._chat:
                yield self._piece(index, {"role": "assistant", "content": None if self._parsers[index] else ""})
            if echoed:
                yield self._piece(index, echoed)

    def frames(self) -> Mapping[int, tuple[str, str]]:
        """Of choices without thoughts, calls and log-probabilities."""
        plain = [at for at, request in enumerate(self._requests) if request.params.logprobs is None]
        frames = dict[int, tuple[str, str]]()
        for index in plain:
            if self._parsers[index] is None:
                event = self._piece(index, {"content": _MARK} if self._chat else _MARK)
                before, _, behind = f"data: {encode_json(event)}\n\n".partition(encode_text(_MARK))
                frames[index] = before, behind
        return frames

    def waiting(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def failed(self, error: Exception) -> dict[str, Any]:
        return failure(error)[1]

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterator[dict[str, Any]]:
        """Yield new tokens of a choice as one event, or as one each if the stream has a trace."""
        parser = self._parsers[index]
        for group in map(lambda chunk: [chunk], chunks) if self._options.include_trace else [chunks]:
            part: Any = "".join([chunk.text for chunk in group])
            if parser:
                part = _delta([parsed for chunk in group for parsed in parser.push(chunk)])
            if part or self._options.include_trace or any([chunk.logprobs is not None for chunk in group]):
                yield self._piece(index, {"content": part} if self._chat and not parser else part, None, group)

    def ended(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the event that ends a choice, with the text that was held back."""
        request, parser = self._requests[index], self._parsers[index]
        if request.error is not None:
            yield failure(request.error)[1]
        else:
            rest: dict[str, Any] = {"content": request.rest} if request.rest else {}
            delta = _delta(parser.end(request.rest)) if parser else rest
            yield self._piece(index, delta if self._chat else request.rest, _finish(request.finish_reason, parser))

    def last(self) -> list[dict[str, Any]]:
        """List the events that end a stream."""
        return [self._streamed([], **self._end())] if self._options.include_usage else []

    def _piece(
        self, index: int, part: Any, finish_reason: str | None = None, chunks: Sequence[Chunk] = ()
    ) -> dict[str, Any]:
        return self._streamed([self._part(index, "delta", part, finish_reason, self._logprobs(index, chunks))])

    def _part(self, index: int, name: str, part: Any, finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
        fields = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        return fields | {name if self._chat else "text": part}

    def _streamed(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._options.include_usage else {}
        return {**self._common, "object": kind, "choices": choices, **usage, **more}

    def _logprobs(self, index: int, chunks: Sequence[Chunk], echoed: Sequence[Scored] = ()) -> dict[str, Any] | None:
        """Build the log-probabilities of new tokens of a choice; None if the request has none."""
        chosen = [(chunk.token, chunk.logprobs) for chunk in chunks if chunk.logprobs is not None]
        scored = [*echoed, *chosen]
        if not scored:
            return None
        if self._chat:
            return {"content": named_logprobs(chunks, self._spell), "refusal": None}
        text, begin = self._echoes[index]
        stream = Detokenizer(self._tokenizer, skip_special_tokens=False)
        pieces = stream.push([token for token, _ in echoed[begin:]], last=False)
        before = [0] * len(echoed[:begin]) + places(text, pieces)
        *offsets, self._ends[index] = text_offsets(self._spelt(index), [t for t, _ in chosen], self._ends[index])
        return {
            "tokens": [self._named(token) for token, _ in scored],
            "token_logprobs": [one and one.token for _, one in scored],
            "top_logprobs": [one and {self._named(token): value for token, value in one.best} for _, one in scored],
            "text_offset": [*before, *offsets],
        }

    def _spelt(self, index: int) -> Detokenizer:
        """Spells the tokens of a choice."""
        if index not in self._texts:
            request, skips = self._requests[index], self._body.skip_special_tokens
            prompt = request.ids[: request.prompt_length]
            self._texts[index] = Detokenizer(self._tokenizer, prompt, skip_special_tokens=skips)
        return self._texts[index]

    def _named(self, token: int) -> str:
        """Return a token's text, or for a part of a character its bytes in OpenAI's spelling."""
        spelt = self._spell(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def _finish(reason: str | None, parser: Parser | None) -> str:
    """Translate a finish reason to OpenAI's."""
    word = "stop" if reason == "eos" else reason or "cancelled"
    return "tool_calls" if word == "stop" and parser is not None and parser.called else word


def _delta(parts: Sequence[Parsed]) -> dict[str, Any]:
    """Build a delta. The first of a call has its id and name, later ones more of its arguments."""
    content, thought, calls = "", "", dict[int, dict[str, Any]]()
    for part in parts:
        if part.thought:
            thought += part.text
        elif (call := part.call) is None:
            content += part.text
        elif part.begins:
            function = {"name": call.name, "arguments": ""}
            calls[call.index] = {"index": call.index, "id": call.key, "type": "function", "function": function}
        elif part.text:
            begun = calls.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
            begun["function"]["arguments"] += part.text
    delta: dict[str, Any] = {"reasoning_content": thought} if thought else {}
    delta |= {"content": content} if content else {}
    return delta | ({"tool_calls": list(calls.values())} if calls else {})

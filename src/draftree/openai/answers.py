"""Bodies of answers in OpenAI's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from ..request import Chunk, Logprobs, Request, Stats
from ..text.detokenizer import Detokenizer
from ..text.encoding import Tokenizer
from .bad_bodies import failure
from .request_mapping import Choices, system_fingerprint, tokenizer_of
from .schema import CompletionRequest, StreamOptions
from .tools import CallParser, Parsed

FINISH = {"eos": "stop", "stop": "stop", "criteria": "stop", "length": "length"}
"""Why a request ended -> OpenAI's word; others ("cancelled", "deadline") stay as they are."""


Scored = tuple[int, Logprobs | None]
"""A token with its log-probabilities; the first of a prompt has none."""


def speculative_decoding(stats: Sequence[Stats]) -> dict[str, object]:
    """What drafting did for an answer, by vLLM's names; positions are depths of trees."""
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
            name: {"drafted": sum(d.drafted for d in made), "accepted": sum(d.accepted for d in made)}
            for name in dict.fromkeys(name for s in stats for name in s.drafters)
            if (made := [s.drafters[name] for s in stats if name in s.drafters])
        },
        "out_of_context": {name: most for s in stats for name, most in s.out_of_context.items()},
    }


def agreement(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """Tokens of a predicted output that appear in the output, in order, and those that do not.

    In long outputs no agreement begins with a token that is more than one of a hundred: time would be quadratic.
    """
    blocks = SequenceMatcher(None, prediction, output).get_matching_blocks()
    found = sum(block.size for block in blocks)
    return found, len(prediction) - found


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer, the same on every route.

    Attributes:
        prompt: of all prompts, each counted once, however many choices it has.
        cached: of these the ones that no choice had to read: kept rows had them.
        generated: of all choices, the ones that ended them included.
        predicted: ``agreement`` of all choices; None: nothing was predicted.
    """

    prompt: int
    cached: int
    generated: int
    predicted: tuple[int, int] | None = None

    @classmethod
    def of(cls, requests: Sequence[Request], n: int = 1) -> Usage:
        return cls(
            sum(request.prompt_length for request in requests[::n]),
            sum(min(r.stats.reused for r in requests[at : at + n]) for at in range(0, len(requests), n)),
            sum(len(request.chunks) for request in requests),
        )

    @property
    def of_choices(self) -> dict[str, object]:
        found: dict[str, object] = {
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
        }
        if self.predicted is not None:
            names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
            found["completion_tokens_details"] = dict(zip(names, self.predicted, strict=True))
        return found

    @property
    def of_response(self) -> dict[str, object]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.generated,
        }


def named_logprobs(chunks: Sequence[Chunk], spell: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """Log-probabilities of tokens by their texts, and beside them the most probable ones; those that were asked for."""

    def named(token: int, value: float) -> dict[str, Any]:
        spelt = spell(token)
        return {"token": spelt.decode(errors="replace"), "logprob": value, "bytes": list(spelt)}

    return [
        {**named(chunk.token, scored.token), "top_logprobs": [named(*pair) for pair in scored.best]}
        for chunk in chunks
        if (scored := chunk.logprobs) is not None
    ]


class TextOffsets:
    """Where the tokens of a choice begin in its text, one after another; tokens inside a character: where that begins.

    Text that waits for a stop string has its place all the same.

    Args:
        echoed: the text of the prompt, if the text begins with it: its tokens come first then.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, echoed: str) -> None:
        prompt, skips = request.ids[: request.prompt_length], request.params.skip_special_tokens
        self._left = len(prompt) if echoed else 0  # tokens of the prompt that are to come
        self._next, self._begin = 0, len(echoed)
        self._echo = Detokenizer(tokenizer, skip_special_tokens=False)
        self._stream = Detokenizer(tokenizer, prompt, skip_special_tokens=skips)

    def of(self, token: int) -> int:
        stream = self._echo if self._left > 0 else self._stream
        found = self._begin if self._left == 0 else self._next
        self._left -= 1
        self._next = found + len(stream.push(token, last=False))
        return found


class CompletionBuilder:
    """The bodies of one answer of a chat or a completion.

    Args:
        key: its id.
        model: its name in the answer.
        requests: one for each choice.
    """

    def __init__(self, key: str, model: str, choices: Choices, requests: Sequence[Request]) -> None:
        self._body, self._requests, self._spell = choices.body, requests, choices.spelled
        self._options = choices.body.stream_options or StreamOptions()
        self._parsers = [None if choices.tags is None else CallParser(choices.tags) for _ in requests]
        self._chat = not isinstance(choices.body, CompletionRequest)
        self._echoed = [choices.echoed(request) for request in requests]
        tokenizer = tokenizer_of(choices.engine)
        self._offsets = [
            TextOffsets(tokenizer, request, echoed) for request, echoed in zip(requests, self._echoed, strict=True)
        ]
        self._common = {
            "id": key,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint(choices.engine),
        }

    def whole(self) -> dict[str, Any]:
        """The answer when all choices have ended."""
        return {
            **self._common,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._choice(index) for index in range(len(self._requests))],
            **self._end(),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        request, parser = self._requests[index], self._parsers[index]
        # Of a prompt alone the last logits have given a token that nobody wants.
        chunks, reason = ([], "length") if self._body.max_tokens == 0 else (request.chunks, request.finish_reason)
        echoed: list[Scored] = []
        if request.params.prompt_logprobs is not None:
            echoed = list(zip(request.ids, (None, *request.prompt_logprobs), strict=False))
        text = self._echoed[index] + "".join(chunk.text for chunk in chunks)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if parser is not None:
            for chunk in chunks:
                parser.push(chunk)
            parser.end()
            message["content"] = parser.content
            if parser.calls:
                calls = [_named_call(call.key, call.name, call.arguments) for call in parser.calls]
                message |= {"content": parser.content or None, "tool_calls": calls}
        return {
            "index": index,
            "logprobs": self._logprobs(index, chunks, echoed),
            "finish_reason": _finish(reason, parser),
            **({"message": message} if self._chat else {"text": text}),
        }

    def _end(self) -> dict[str, Any]:
        """What an answer ends with: usage, with the tokens of a predicted output, and what drafting did."""
        usage = self._usage()
        if self._body.predicted:
            pairs = [agreement(request.prediction, request.output_ids) for request in self._requests]
            usage = replace(usage, predicted=(sum(has for has, _ in pairs), sum(lacks for _, lacks in pairs)))
        return {
            "usage": usage.of_choices,
            "metrics": {"speculative_decoding": speculative_decoding([request.stats for request in self._requests])},
        }

    def _usage(self) -> Usage:
        found = Usage.of(self._requests, self._body.n)
        return replace(found, generated=0) if self._body.max_tokens == 0 else found

    def first(self) -> Iterator[dict[str, Any]]:
        """The events that a stream begins with."""
        for index, echoed in enumerate(self._echoed):
            if self._chat:
                yield self._piece(index, {"role": "assistant", "content": None if self._parsers[index] else ""})
            if echoed:
                yield self._piece(index, echoed)

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterator[dict[str, Any]]:
        """What a choice has gained, as one event; one for each token where a trace is beside them."""
        parser = self._parsers[index]
        for some in map(lambda chunk: [chunk], chunks) if self._options.include_trace else [chunks]:
            part: Any = "".join([chunk.text for chunk in some])
            if parser:
                part = _delta([parsed for chunk in some for parsed in parser.push(chunk)])
            if part or self._options.include_trace or any([chunk.logprobs is not None for chunk in some]):
                piece = self._piece(index, {"content": part} if self._chat and not parser else part, None, some)
                more = {"usage": self._usage().of_choices} if self._options.continuous_usage_stats else {}
                yield piece | more

    def ended(self, index: int) -> Iterator[dict[str, Any]]:
        """The end of a choice, with what of a call or of the text before one was held back."""
        request, parser = self._requests[index], self._parsers[index]
        if request.error is not None:
            yield failure(request.error)[1]
        else:
            rest = _delta(parser.end()) if parser else {}
            yield self._piece(index, rest if self._chat else "", _finish(request.finish_reason, parser))

    def last(self) -> list[dict[str, Any]]:
        """The events that a stream ends with."""
        return [self._streamed([], **self._end())] if self._options.include_usage else []

    def _piece(
        self, index: int, part: Any, finish_reason: str | None = None, chunks: Sequence[Chunk] = ()
    ) -> dict[str, Any]:
        choice = {"index": index, "logprobs": self._logprobs(index, chunks), "finish_reason": finish_reason}
        return self._streamed([choice | {"delta" if self._chat else "text": part}])

    def _streamed(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._options.include_usage else {}
        return {**self._common, "object": kind, "choices": choices, **usage, **more}

    def _logprobs(self, index: int, chunks: Sequence[Chunk], echoed: Sequence[Scored] = ()) -> dict[str, Any] | None:
        """Log-probabilities of the next tokens of a choice; None: they were not asked for."""
        scored = [*echoed, *((chunk.token, chunk.logprobs) for chunk in chunks if chunk.logprobs is not None)]
        if not scored:
            return None
        if self._chat:
            return {"content": named_logprobs(chunks, self._spell), "refusal": None}
        return {
            "tokens": [self._named(token) for token, _ in scored],
            "token_logprobs": [one and one.token for _, one in scored],
            "top_logprobs": [one and {self._named(token): value for token, value in one.best} for _, one in scored],
            "text_offset": [self._offsets[index].of(token) for token, _ in scored],
        }

    def _named(self, token: int) -> str:
        """A token's text, or its bytes by OpenAI's spelling of them where it is part of a character."""
        spelt = self._spell(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def _finish(reason: str | None, parser: CallParser | None) -> str:
    """OpenAI's word for the end of a request, whose text may have been parsed."""
    found = FINISH.get(reason or "", reason or "cancelled")
    return "tool_calls" if found == "stop" and parser is not None and parser.called else found


def _named_call(key: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(parts: Sequence[Parsed]) -> dict[str, Any]:
    """What a token has brought: a call's id and name first, its arguments with them or later."""
    content, calls = "", dict[int, dict[str, Any]]()
    for part in parts:
        if (call := part.call) is None:
            content += part.text
        elif part.begins:
            calls[call.index] = {"index": call.index, **_named_call(call.key, call.name, "")}
        elif part.text:
            delta = calls.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
            delta["function"]["arguments"] += part.text
    found: dict[str, Any] = {"content": content} if content else {}
    return found | ({"tool_calls": list(calls.values())} if calls else {})

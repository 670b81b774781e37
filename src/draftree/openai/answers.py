"""Bodies of responses in OpenAI's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from ..config import SamplingParams
from ..engine.engine import Generation
from ..request import Chunk, Logprobs, Request, Stats
from ..text.detokenizer import Detokenizer
from ..text.encoding import Tokenizer
from .tool_calls import CallParser, Parsed

FINISH = {"eos": "stop", "stop": "stop", "criteria": "stop", "length": "length"}
"""Why a request ended -> OpenAI's word; others ("cancelled", "deadline") stay as they are."""

Scored = Sequence[tuple[int, Logprobs | None]]
"""Tokens of a prompt with their log-probabilities; the first has none."""


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


def without_tokens(generation: Generation) -> Generation:
    """Of a prompt alone, whose last logits have given a token that nobody wants."""
    stats = replace(generation.stats, tokens=0)
    return replace(generation, text="", token_ids=[], chunks=[], finish_reason="length", stats=stats)


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


def named_logprobs(chunks: Sequence[Chunk], spell: Callable[[int], str]) -> list[dict[str, Any]]:
    """Log-probabilities of tokens by their texts, and beside them the most probable ones; those that were asked for."""

    def named(token: int, value: float) -> dict[str, Any]:
        text = spell(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return [
        {**named(chunk.token, scored.token), "top_logprobs": [named(*pair) for pair in scored.best]}
        for chunk in chunks
        if (scored := chunk.logprobs) is not None
    ]


class TextOffsets:
    """Where the tokens of a choice begin in its text, one after another; tokens inside a character: where that begins.

    Text that waits for a stop string has its place all the same.

    Args:
        prompt: the tokens before the first generated one.
        echoed: the text of the prompt, if the text begins with it: its tokens come first then.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int], echoed: str) -> None:
        self._left = len(prompt) if echoed else 0  # tokens of the prompt that are to come
        self._next, self._begin = 0, len(echoed)
        self._echo = Detokenizer(tokenizer, skip_special_tokens=False)
        self._stream = Detokenizer(tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)

    def of(self, token: int) -> int:
        stream = self._echo if self._left > 0 else self._stream
        found = self._begin if self._left == 0 else self._next
        self._left -= 1
        self._next = found + len(stream.push(token, last=False))
        return found


class CompletionBuilder:
    """The bodies of one answer.

    Args:
        key: its id.
        model: its name in the answer.
        fingerprint: of what answers.
        spell: the text of a token.
        chat: the chat endpoint's, else that of completions.
        tags: of a chat whose answers may call functions: tokens of tags that give no text (``Grammars.tags``).
        offsets: of a completion, of each choice in its text, the echoed prompt included.
    """

    def __init__(
        self,
        key: str,
        model: str,
        fingerprint: str,
        spell: Callable[[int], str],
        *,
        chat: bool,
        tags: Mapping[int, str] | None = None,
        offsets: Sequence[TextOffsets] = (),
    ) -> None:
        self._chat, self._spell, self._tags = chat, spell, tags
        self._parsers: dict[int, CallParser] = {}  # of choices that are streamed
        self._offsets = offsets
        self._common = {
            "id": key,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(
        self,
        usage: Usage,
        answers: Sequence[tuple[str, Generation]],
        echoed: Sequence[Scored] = (),
    ) -> dict[str, Any]:
        """An answer that is not streamed.

        Args:
            answers: text and generation of each choice.
            echoed: tokens of each choice's prompt, if their log-probabilities are wanted.
        """
        choices: list[dict[str, Any]] = []
        for index, (text, generation) in enumerate(answers):
            choice: dict[str, Any] = {
                "index": index,
                "logprobs": self._logprobs(index, generation.chunks, echoed[index] if echoed else ()),
                "finish_reason": finish(generation.finish_reason),
            }
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
                if self._tags is not None:
                    parser = CallParser.of(generation.chunks, self._tags)
                    choice["finish_reason"] = finish(generation.finish_reason, parser)
                    message["content"] = parser.content
                    if parser.calls:
                        message["content"] = parser.content or None
                        message["tool_calls"] = [
                            _named_call(call.key, call.name, call.arguments) for call in parser.calls
                        ]
                choice["message"] = message
            else:
                choice["text"] = text
            choices.append(choice)
        stats = [generation.stats for _, generation in answers]
        return {
            **self._common,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": choices,
            "usage": usage.of_choices,
            "metrics": {"speculative_decoding": speculative_decoding(stats)},
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """The piece that begins a choice of a chat."""
        content = "" if self._tags is None else None
        return self._piece(index, {"role": "assistant", "content": content}, None) if self._chat else None

    def token(self, index: int, chunk: Chunk, *, always: bool) -> dict[str, Any] | None:
        """A piece of what became final with a token; None: nothing did, unless ``always`` a piece is wanted."""
        part: Any = chunk.text
        if self._tags is not None:
            part = _delta(self._parsers.setdefault(index, CallParser(self._tags)).push(chunk))
        if not (part or chunk.logprobs is not None or always):
            return None
        return self._piece(index, {"content": part} if self._chat and self._tags is None else part, None, [chunk])

    def echo(self, index: int, text: str) -> dict[str, Any]:
        return self._piece(index, text, None)

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The end of a choice, and what of a call or of the text before one was held back.

        Args:
            finish_reason: the request's own.
        """
        parser = self._parsers.get(index)
        rest = {} if parser is None else _delta(parser.end())
        return self._piece(index, rest if self._chat else "", finish(finish_reason, parser))

    def _logprobs(self, index: int, chunks: Sequence[Chunk], echoed: Scored = ()) -> dict[str, Any] | None:
        """Log-probabilities of the next tokens of a choice; None: they were not asked for."""
        scored = [*echoed, *((chunk.token, chunk.logprobs) for chunk in chunks if chunk.logprobs is not None)]
        if not scored:
            return None
        if not self._chat:
            names = [self._spell(token) for token, _ in scored]
            return {
                "tokens": names,
                "token_logprobs": [one and one.token for _, one in scored],
                "top_logprobs": [one and {self._spell(token): value for token, value in one.best} for _, one in scored],
                "text_offset": [self._offsets[index].of(token) for token, _ in scored],
            }
        return {"content": named_logprobs(chunks, self._spell), "refusal": None}

    def _piece(self, index: int, part: Any, finish_reason: str | None, chunks: Sequence[Chunk] = ()) -> dict[str, Any]:
        choice = {"index": index, "logprobs": self._logprobs(index, chunks), "finish_reason": finish_reason}
        choice["delta" if self._chat else "text"] = part
        return self._streamed([choice])

    def _streamed(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A piece of a stream; ``more``: what it has beside choices."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices, **more}

    def records(self, records: Sequence[Any]) -> dict[str, Any]:
        """A piece with lines of a trace, as ``--trace`` writes them."""
        return self._streamed([], trace=records)

    def last(self, usage: Usage, requests: Sequence[Request]) -> dict[str, Any]:
        """The piece behind the last choice: usage, and what drafting did."""
        metrics = {"speculative_decoding": speculative_decoding([request.stats for request in requests])}
        return self._streamed([], usage=usage.of_choices, metrics=metrics)


def finish(reason: str, parser: CallParser | None = None) -> str:
    """OpenAI's word for the end of a request, whose text may have been parsed."""
    found = FINISH.get(reason, reason)
    return "tool_calls" if found == "stop" and parser is not None and parser.called else found


def _named_call(key: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(parsed: Parsed) -> dict[str, Any]:
    """What a token has brought: a call's id and name first, its arguments with them or later."""
    arguments = dict(parsed.arguments)
    calls = [
        {"index": call.index, **_named_call(call.key, call.name, arguments.pop(call.index, ""))}
        for call in parsed.begun
    ]
    calls += [{"index": index, "function": {"arguments": text}} for index, text in arguments.items()]
    found: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
    return found | ({"tool_calls": sorted(calls, key=lambda call: call["index"])} if calls else {})

"""A body's choices: what the engine is asked for, and the answer that they make; the same for a server and for batches.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from ..config import SamplingParams
from ..engine.engine import Engine, Generation
from ..engine.speculation import SpeculationParams
from ..errors import FieldError, PromptError
from ..request import Request
from . import answers
from .answers import CompletionBuilder, Scored, TextOffsets, Usage
from .schema import CompletionRequest, Sampled


@dataclass(frozen=True, slots=True)
class Choices:
    """What a body wants of an engine.

    Attributes:
        asked: of each choice the prompt and how it is drawn: ``n`` choices of the first prompt, then of the next.
        speculation: how they are drafted for; None: as the engine does by default.
        tags: where functions may be called: tokens of tags that give no text.
    """

    body: Sampled
    engine: Engine
    asked: list[tuple[list[int], SamplingParams]]
    speculation: SpeculationParams | None
    tags: Mapping[int, str] | None

    def usage(self, requests: Sequence[Request]) -> Usage:
        """Tokens of the answer, which may be under way."""
        found = Usage.of(requests, self.body.n)
        return replace(found, generated=0) if self.body.max_tokens == 0 else found

    def echoed(self, requests: Sequence[Request]) -> list[str]:
        """What each choice's text begins with: what is read of its prompt, where that was asked for."""
        if isinstance(self.body, CompletionRequest) and self.body.echo:
            return [decoded(self.engine, request.ids[: request.prompt_length]) for request in requests]
        return [""] * len(self.asked)

    def offsets(self, requests: Sequence[Request]) -> list[TextOffsets]:
        """Of the tokens of each choice of a completion, where their log-probabilities are wanted."""
        tokenizer = self.engine.inputs.tokenizer
        if tokenizer is None or not isinstance(self.body, CompletionRequest) or self.body.logprobs is None:
            return []
        return [
            TextOffsets(tokenizer, request.params, request.ids[: request.prompt_length], echoed)
            for request, echoed in zip(requests, self.echoed(requests), strict=True)
        ]

    def final_usage(self, requests: Sequence[Request]) -> Usage:
        """When all have ended: with the tokens of the predicted output that they have, and that they have not."""
        pairs = [answers.agreement(r.prediction, r.output_ids) for r in requests if self.body.predicted]
        agreed = (sum(has for has, _ in pairs), sum(lacks for _, lacks in pairs)) if pairs else None
        return replace(self.usage(requests), predicted=agreed)

    def whole(
        self, builder: CompletionBuilder, requests: Sequence[Request], made: Sequence[Generation]
    ) -> dict[str, object]:
        """The answer when all choices have ended."""
        if self.body.max_tokens == 0:
            made = [answers.without_tokens(generation) for generation in made]
        echoed = self.echoed(requests)
        texts = [(before + generation.text, generation) for before, generation in zip(echoed, made, strict=True)]
        wanted = any(request.params.prompt_logprobs is not None for request in requests)
        scored: list[Scored] = [list(zip(r.ids, (None, *r.prompt_logprobs), strict=False)) for r in requests if wanted]
        return builder.whole(self.final_usage(requests), texts, scored)


def find_choices(body: Sampled, engine: Engine, default: SpeculationParams) -> Choices:
    """Read what a body wants; compiles grammars, which may take long.

    Args:
        default: how requests are drafted for that do not say.

    Raises:
        InputError: a field's value does not do.
    """
    body.refuse()
    speculation = body.speculation(default)
    prompts = [engine.inputs.encode(prompt, whole=body.truncate_prompt_tokens is None) for prompt in body.prompts()]
    vocabulary = engine.target.capabilities.vocab_size
    if out := next((i for ids in prompts for i in ids if not 0 <= i < vocabulary), None):
        raise FieldError("prompt", f"prompt has token {out}: use ids from 0 to {vocabulary - 1}")
    constraint = body.constraint(engine) if body.structured else None
    asked = [
        (ids, replace(body.params(n, _room(body, ids, engine)), constraint=constraint))
        for ids in prompts
        for n in range(body.n)
    ]
    return Choices(body, engine, asked, speculation, body.tags(engine))


def _room(body: Sampled, prompt: Sequence[int], engine: Engine) -> int:
    """Tokens that the context has beside what is read of a prompt; -1 reads what leaves room for any answer."""
    last = body.truncate_prompt_tokens
    read = len(prompt) if last is None else max(0, min(last, len(prompt)))
    return engine.target.capabilities.max_length - read


def system_fingerprint(engine: Engine) -> str:
    """Of the version and the weights: with the same one a seed gives the same text."""
    return f"draftree-{version('draftree')}-{engine.target.capabilities.fingerprint}"


def decoded(engine: Engine, ids: Sequence[int]) -> str:
    """The text of token ids, special ones included.

    Raises:
        PromptError: the model has no tokenizer.
    """
    if engine.inputs.tokenizer is None:
        raise PromptError("the model has no tokenizer: it gives no text")
    return str(engine.inputs.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

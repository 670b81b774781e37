"""From a body to its choices, which the engine decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config import MAX_NODES
from ..engine.engine import Engine
from ..engine.speculation import EngineRequest, Observer, SpeculationParams
from ..errors import FieldError, PromptError
from ..sampling.constraint import Constraint
from ..sampling.grammar import Grammar
from ..sampling.thoughts import AfterThought
from ..text.encoding import THINK_TAGS, Tokenizer, template_of, template_variables
from .bad_bodies import left_out
from .reasoning import ThoughtParser
from .schema import Sampled
from .tools import CallParser


class Choices:
    """The choices that a body asks an engine for. Compiles grammars, which may take long.

    Attributes:
        asked: of each choice the prompt and how it is drawn: ``n`` choices of the first prompt, then of the next.
        speculation: how they are drafted for; None: as the engine does by default.
        tags: where functions may be called: tokens of tags that give no text.
        thoughts: where the model may think aloud: tokens of tags that give no text; None: it does not.

    Args:
        default: how requests are drafted for that do not say.
        most_nodes: of a step's tree (``Sampled.speculation``).

    Raises:
        InputError: a field's value does not do.
    """

    def __init__(self, body: Sampled, engine: Engine, default: SpeculationParams, most_nodes: int = MAX_NODES) -> None:
        body.refuse()
        self.body, self.engine, self.speculation = body, engine, body.speculation(default, most_nodes)
        self._given = given = body.prompts()
        most = engine.scheduler.most
        if len(given) * body.n > most:
            name, count = ("prompt", len(given)) if len(given) > most else ("n", body.n)
            why = f"{name} is {count}: {len(given)} prompts of {body.n} choices each, of which {most} can wait and run"
            raise FieldError(name, f"{why}: ask for fewer at a time")
        for prompt in given:
            engine.inputs.check_size(prompt)
        prompts = [engine.inputs.encode(prompt) for prompt in given]
        constraint = body.constraint(engine)
        self.tags, self.thoughts = body.tags(engine), None if body.raw else engine.inputs.thought_tags
        self._inside = [self.thoughts is not None and _thinks(engine, ids, body.begun) for ids in prompts]
        most = engine.target.capabilities.max_length
        self.asked = [
            (ids, replace(body.params(n, most - len(ids)), constraint=self._behind_thoughts(constraint, inside)))
            for ids, inside in zip(prompts, self._inside, strict=True)
            for n in range(body.n)
        ]
        _log_effort(body, engine)

    def requests(self, observers: Sequence[Observer] = ()) -> list[EngineRequest]:
        """Build a request for each choice.

        Args:
            observers: one for each, or none.

        Raises:
            InputError: a field's value does not do.
        """
        return [
            self.engine.request(
                ids,
                params,
                self.speculation,
                prediction=self.body.predicted,
                observers=observers[index : index + 1],
            )
            for index, (ids, params) in enumerate(self.asked)
        ]

    def _behind_thoughts(self, constraint: Grammar | None, inside: bool) -> Constraint | None:
        """Delay a constraint until the thought has ended."""
        if constraint is None or self.thoughts is None:
            return constraint
        return AfterThought(constraint, self.engine.grammars.thoughts, inside=inside)

    def echo(self, number: int) -> tuple[str, int]:
        """Return a choice's prompt as text, and how many of its tokens stand in front of that.

        A text is echoed as it was sent, without special tokens that begin a prompt.
        """
        prompt, (ids, _) = self._given[number // self.body.n], self.asked[number]
        return (prompt, self.engine.inputs.begun(ids)) if isinstance(prompt, str) else (decoded(self.engine, ids), 0)

    def parser(self, number: int) -> CallParser | ThoughtParser | None:
        """Return the parser of a choice's text; None: it is text alone."""
        calls = None if self.tags is None else CallParser(self.tags)
        if self.thoughts is None:
            return calls
        shown = self.thoughts if self.body.skip_special_tokens else {}
        return ThoughtParser(shown, inside=self._inside[number // self.body.n], inner=calls)


_TAIL = 16
"""Tokens of a prompt's end in which a chat template may begin a thought."""


def _thinks(engine: Engine, ids: Sequence[int], begun: str) -> bool:
    """Test whether a prompt ends within a thought, or the text that the answer continues does."""
    if begun:
        opens, closes = (decoded(engine, ids)[-len(begun) :].rfind(tag) for tag in THINK_TAGS)
        return opens > closes
    return decoded(engine, ids[-_TAIL:]).rstrip().endswith(THINK_TAGS[0])


def _log_effort(body: Sampled, engine: Engine) -> None:
    if body.effort is not None and "reasoning_effort" not in template_variables(template_of(tokenizer_of(engine))):
        left_out("reasoning_effort", "the model's chat template does not read it")


def tokenizer_of(engine: Engine) -> Tokenizer:
    """Return the model's tokenizer.

    Raises:
        PromptError: it has none.
    """
    if engine.inputs.tokenizer is None:
        raise PromptError("the model has no tokenizer: it gives no text")
    return engine.inputs.tokenizer


def decoded(engine: Engine, ids: Sequence[int]) -> str:
    """Decode token ids, special ones included."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer_of(engine).decode(list(ids), **options))

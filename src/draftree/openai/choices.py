"""From a body to its choices, which the engine decodes, and what a model's answer consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..config import MAX_NODES, SamplingParams
from ..engine.engine import Engine
from ..engine.speculation import EngineRequest, Observer, SpeculationParams
from ..errors import FieldError, PromptError
from ..sampling.channel_rules import ChannelRule
from ..sampling.constraint import Constraint
from ..sampling.thoughts import AfterThought
from ..text.encoding import THINK_TAGS, Tokenizer, template_of, template_variables
from ..text.harmony import START
from .bad_bodies import left_out
from .channels import ChannelParser
from .reasoning import ThoughtParser
from .schema import Sampled
from .tools import CallParser, Parser


class AnswerForm:
    """What an answer consists of: messages in channels; a thought, and text or calls behind it; or text alone.

    Args:
        ids: of the prompt.
        params: how the answer is drawn.
        constraint: of the answer itself, in front of which a model may think.
        raw: the prompt is a text to continue, no conversation: so is the answer.
        begun: the text of the assistant that the answer continues; empty: it begins a turn.
        tags: where functions may be called: tokens of tags that give no text.

    Attributes:
        params: how it is drawn under the constraint, and with the text that its parser reads.
    """

    def __init__(
        self,
        engine: Engine,
        ids: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None,
        *,
        raw: bool = False,
        begun: str = "",
        tags: Mapping[int, str] | None = None,
    ) -> None:
        self._engine, self._tags = engine, tags
        self._controls: Mapping[int, str] = {} if raw else engine.inputs.controls
        thoughts = None if raw or self._controls else engine.inputs.thought_tags
        self._thoughts = thoughts if thoughts is None or params.skip_special_tokens else {}
        self._inside = thoughts is not None and _thinks(engine, ids, begun)
        backwards = range(len(ids) - 1, -1, -1) if self._controls else ()
        start = next((at for at in backwards if self._controls.get(ids[at]) == START), len(ids))
        self._message = ids[start:]
        if self._controls:  # between the texts of messages, so that no stop string joins these
            params = replace(params, skip_special_tokens=False)
        if constraint is not None:
            params = replace(params, constraint=self._behind_thoughts(constraint))
        self.params = params

    def _behind_thoughts(self, constraint: Constraint) -> Constraint:
        """Delay a constraint until the thought has ended."""
        grammars = self._engine.grammars
        if self._controls and grammars.channels is not None:
            rule = constraint if isinstance(constraint, ChannelRule) else ChannelRule(grammars.channels, constraint)
            return rule.behind(self._message)
        return (
            constraint if self._thoughts is None else AfterThought(constraint, grammars.thoughts, inside=self._inside)
        )

    def parser(self) -> Parser | None:
        """Return a parser of the answer; None: it is text alone."""
        if self._controls:
            inputs, ends = self._engine.inputs, self._engine.target.capabilities.eos_ids
            shown = {token: inputs.token_bytes(token).decode(errors="replace") for token in ends} | {**self._controls}
            begun = decoded(self._engine, self._message).removeprefix(START) if self._message else None
            return ChannelParser(shown, begun=begun, functions=self._tags is not None)
        calls = None if self._tags is None else CallParser(self._tags)
        return calls if self._thoughts is None else ThoughtParser(self._thoughts, inside=self._inside, inner=calls)


class Choices:
    """The choices that a body asks an engine for. Compiles grammars, which may take long.

    Attributes:
        asked: of each choice the prompt and how it is drawn: ``n`` choices of the first prompt, then of the next.
        speculation: how they are drafted for; None: as the engine does by default.

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
        constraint, tags = body.constraint(engine), body.tags(engine)
        most = engine.target.capabilities.max_length
        drawn = [(ids, body.params(n, most - len(ids))) for ids in prompts for n in range(body.n)]
        self._forms = [
            AnswerForm(engine, ids, params, constraint, raw=body.raw, begun=body.begun, tags=tags)
            for ids, params in drawn
        ]
        self.asked = [(ids, form.params) for (ids, _), form in zip(drawn, self._forms, strict=True)]
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

    def echo(self, number: int) -> tuple[str, int]:
        """Return a choice's prompt as text, and how many of its tokens stand in front of that.

        A text is echoed as it was sent, without special tokens that begin a prompt.
        """
        prompt, (ids, _) = self._given[number // self.body.n], self.asked[number]
        return (prompt, self.engine.inputs.begun(ids)) if isinstance(prompt, str) else (decoded(self.engine, ids), 0)

    def parser(self, number: int) -> Parser | None:
        """Return the parser of a choice's text; None: it is text alone."""
        return self._forms[number].parser()


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

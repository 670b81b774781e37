"""A body's choices: what the engine is asked for; the same for a server and for batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.speculation import SpeculationParams
from ..errors import PromptError
from ..text.encoding import Tokenizer
from .schema import Sampled


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

    @property
    def options(self) -> dict[str, Any]:
        """What ``Engine.submit`` is given beside them."""
        return {"prediction": self.body.predicted, "priority": self.body.priority, "timeout": self.body.timeout}


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
    constraint = body.constraint(engine)
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


def tokenizer_of(engine: Engine) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        PromptError: it has none.
    """
    if engine.inputs.tokenizer is None:
        raise PromptError("the model has no tokenizer: it gives no text")
    return engine.inputs.tokenizer


def decoded(engine: Engine, ids: Sequence[int]) -> str:
    """The text of token ids, special ones included."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer_of(engine).decode(list(ids), **options))

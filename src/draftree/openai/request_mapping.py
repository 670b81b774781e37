"""A body's choices: what the engine is asked for; the same for a server and for batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

from ..engine.engine import Engine
from ..engine.speculation import SpeculationParams
from ..errors import PromptError
from ..text.encoding import Tokenizer
from .schema import Sampled


class Choices:
    """What a body wants of an engine; compiles grammars, which may take long.

    Attributes:
        asked: of each choice the prompt and how it is drawn: ``n`` choices of the first prompt, then of the next.
        speculation: how they are drafted for; None: as the engine does by default.
        tags: where functions may be called: tokens of tags that give no text.
        options: what ``Engine.submit`` is given beside them.

    Args:
        default: how requests are drafted for that do not say.

    Raises:
        InputError: a field's value does not do.
    """

    def __init__(self, body: Sampled, engine: Engine, default: SpeculationParams) -> None:
        body.refuse()
        self.body, self.engine, self.speculation = body, engine, body.speculation(default)
        whole = body.truncate_prompt_tokens is None
        prompts = [engine.inputs.encode(prompt, whole=whole) for prompt in body.prompts()]
        constraint = body.constraint(engine)
        self.asked = [
            (ids, replace(body.params(n, _room(body, ids, engine)), constraint=constraint))
            for ids in prompts
            for n in range(body.n)
        ]
        self.tags = body.tags(engine)
        self.options = {"prediction": body.predicted, **body.model_dump(include={"priority", "timeout"})}


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

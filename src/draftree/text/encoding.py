"""Encodes prompts: a text, a conversation or token ids becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ..errors import PromptError
from .conversation import check_text, render
from .tokenizer import Conversation, Prompt, Tokenizer


def encode(tokenizer: Tokenizer | None, prompt: Prompt, field: str = "prompt") -> list[int]:
    """Token ids of a prompt: text as it is, a conversation through the model's chat template, ids unchanged.

    Args:
        field: what it is, in errors.

    Raises:
        PromptError: the prompt is empty, no text, or not ids and there is no tokenizer or no chat template.
    """
    if isinstance(prompt, Conversation):
        if tokenizer is None:
            raise PromptError("the prompt is text but the model has no tokenizer: give token ids, or load one with it")
        return _conversation_ids(tokenizer, prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise PromptError(f"the {field} is {prompt!r}: give text, token ids or a conversation", field)
    if not prompt:
        raise PromptError(f"the {field} is empty: give it at least one token", field)
    if set(map(type, prompt)) == {int}:
        return list(cast(Sequence[int], prompt))
    if not isinstance(prompt, str) and not all(isinstance(m, Mapping) for m in prompt):
        why = f"the {field} is {prompt!r}: its token ids must be ints, the messages of a conversation dicts"
        raise PromptError(why, field)
    if tokenizer is None:
        why = f"the {field} is text but the model has no tokenizer: give token ids, or load one with it"
        raise PromptError(why, field)
    if isinstance(prompt, str):
        return _ids(tokenizer, prompt, field)
    return _conversation_ids(tokenizer, Conversation(cast(Sequence[Mapping[str, str]], prompt)))


def _conversation_ids(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    return _ids(tokenizer, render(tokenizer, conversation), "prompt", add_special_tokens=False)


def _ids(tokenizer: Tokenizer, text: str, field: str, **options: bool) -> list[int]:
    check_text(text, field)
    try:
        return tokenizer.encode(text, **options)
    except PromptError as error:
        error.rename(field)
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise what they like
        raise PromptError(f"the model's tokenizer does not take the {field} ({error}): give another", field) from None


def user(prompt: str) -> list[dict[str, str]]:
    """A conversation that consists of one question."""
    return [{"role": "user", "content": prompt}]

"""What tokenizers do, and what a prompt may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model's chat template is given.

    Attributes:
        messages: with "role" and a text "content"; of assistants also "tool_calls" ("function" with "name" and
            "arguments", an object); results of calls have the role "tool".
        tools: functions that may be called: "function" with "name", "description" and "parameters" (a JSON Schema).
        continued: the answer goes on with the last message, an assistant's, in place of beginning one.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    continued: bool = False


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Conversation
"""Text as it is, token ids, or a conversation: messages with "role" and "content" for the model's chat template."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back; transformers' tokenizers are such as they are.

    Attributes:
        chat_template: None, or empty, where a model has none; several by their names.
    """

    chat_template: str | dict[str, str] | None

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Special tokens that templates know by names, such as "bos_token"."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The ids of a text, with the special tokens that begin one; special tokens that it contains are found."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str | list[str]:
        """The text of ids (no list of texts: that is of lists of ids, which nobody gives)."""

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens."""

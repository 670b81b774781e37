"""OpenAI's Harmony format, in which gpt-oss answers: a turn is messages, in channels.

A message is ``<|start|>HEADER<|message|>TEXT<|end|>``. An assistant's header names a channel: what is in "analysis" is
thought, in "commentary" and "final" it is said; a header with a recipient, "to=functions.NAME", makes the text the
arguments of a call. ``<|return|>`` ends the last message of an answer, ``<|call|>`` a call.
"""

from __future__ import annotations

from collections.abc import Mapping

START, CHANNEL, MESSAGE, END = _NEEDED = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
"""In front of the names of functions."""
NO_TEXT = frozenset(tag.encode() for tag in (*_NEEDED, CONSTRAIN))
"""Tokens between the parts of messages, which are no text of theirs."""


def control_tokens(vocabulary: Mapping[str, int]) -> dict[int, str]:
    """The control tokens of a vocabulary that has the format, and their texts; none of another."""
    if any(tag not in vocabulary for tag in _NEEDED):
        return {}
    return {vocabulary[tag]: tag for tag in (*_NEEDED, CONSTRAIN, CALL, RETURN) if tag in vocabulary}


def last_tokens(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """The control tokens that end an answer; none of a vocabulary without the format."""
    return frozenset(token for token, tag in control_tokens(vocabulary).items() if tag in (CALL, RETURN))

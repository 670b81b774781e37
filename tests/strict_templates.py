"""Chat templates that refuse turns as published ones do, written anew in a few lines."""

from __future__ import annotations

_ANSWER = "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + _ANSWER
"""Refuses nothing."""
_ALTERNATING = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
SYSTEM_FIRST = TURNS.replace(
    "<",
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<",
    1,
)
"""As Qwen3.5's."""
SYSTEM_WITHIN = (
    "{% set system, turns = '', messages %}{% if messages[0].role == 'system' %}"
    "{% set system, turns = messages[0].content + '|', messages[1:] %}{% endif %}{% for m in turns %}"
    + _ALTERNATING
    + "<{{ m.role }}>{{ system if loop.first }}{{ m.content }}"
    + _ANSWER
)
"""As Gemma 3's: what the system says is written into the first turn of the user."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TURNS.replace("<", _ALTERNATING + "<", 1)
)
"""As Gemma 2's and those of Mistral's first models."""
STRICT = (SYSTEM_FIRST, SYSTEM_WITHIN, NO_SYSTEM)

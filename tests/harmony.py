"""What answers in Harmony's channels: a chat template, vocabularies, and a model that says what it is to say."""

from __future__ import annotations

from dataclasses import replace

from gguf import TokenType
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from draftree.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, last_tokens

from .scripted import ScriptedModel
from .tiny import bytes_tokenizer
from .tiny_gguf import Vocabulary, byte_level

CONTROLS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)
PROMPT = f"{START}assistant"
"""The end of a prompt."""
THINKS, SAYS = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
NEXT = f"{END}{PROMPT}"
TEMPLATE = (
    "{% set developer = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if developer or tools %}<|start|>developer<|message|>{{ developer }}{% for tool in tools or [] %}\n"
    "// {{ tool.function.description }}\n"
    "type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;"
    "{% endfor %}<|end|>{% endif %}{% set last = namespace(name='') %}"
    "{% for m in turns %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('<|channel|> tags in the content field') }}{% endif %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}"
    "<|end|>{% endif %}{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Of the shape of gpt-oss's own, and as strict: it was written for these tests."""


def call_of(name: str, arguments: str, *, first: bool = False) -> str:
    """A call behind ``PROMPT``.

    Args:
        first: the recipient comes before the channel, as templates write it; else behind it, as models do.
    """
    to = f" to=functions.{name}"
    if first:
        return f"{to}{CHANNEL}commentary json{MESSAGE}{arguments}{CALL}"
    return f"{CHANNEL}commentary{to} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}"


def harmony_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of all bytes and the control tokens, as transformers has that of gpt-oss."""
    tokenizer = bytes_tokenizer(None, template)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in CONTROLS])
    return tokenizer


def harmony_vocabulary(kind: TokenType = TokenType.CONTROL) -> Vocabulary:
    """The same of a GGUF file."""
    words = byte_level()
    types = (*words.types, *[kind] * len(CONTROLS))
    return replace(words, tokens=(*words.tokens, *CONTROLS), types=types)


class HarmonyModel(ScriptedModel):
    """Says a text of messages behind ``PROMPT``."""

    def __init__(self, script: str, template: str = TEMPLATE) -> None:
        super().__init__(script, tokenizer := harmony_tokenizer(template))
        ends = self.capabilities.eos_ids | last_tokens(tokenizer.get_vocab())
        self.capabilities = replace(self.capabilities, eos_ids=ends)

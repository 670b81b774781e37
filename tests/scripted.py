"""A model that says what it is to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftree.text.encoding import THINK_TAGS

from .tiny import BYTES_VOCAB, bytes_tokenizer
from .toy import ToyModel

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot: {% endif %}"
)
"""A chat template that knows nothing of thoughts."""
THINKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot: {% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% elif opened %}<think>\n{% endif %}{% endif %}"
)
"""One that writes them, and begins a thought itself where it is ``opened``."""
OPENED = THINKING.replace("elif opened", "else")


def thinking_tokenizer(template: str, special: bool | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of all bytes; the tags of thoughts are tokens, special ones if ``special``; None: they are text."""
    tokenizer = bytes_tokenizer(True, template)
    if special is not None:
        tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in THINK_TAGS])
    return tokenizer


class ScriptedModel(ToyModel):
    """Says a text, and again what it has not said when something else was drawn; then it ends.

    Args:
        script: no part of which is its beginning.
    """

    def __init__(self, script: str, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(3, max_length=1024)
        self.tokenizer, self._script = tokenizer, tokenizer.encode(script, add_special_tokens=False)
        self._end = int(tokenizer.eos_token_id)
        self.capabilities = replace(
            self.capabilities, name="tiny", vocab_size=BYTES_VOCAB, eos_ids=frozenset((self._end,))
        )

    def after(self, ids: Sequence[int]) -> Tensor:
        said = next(n for n in range(len(self._script), -1, -1) if list(ids[len(ids) - n :]) == self._script[:n])
        logits = torch.zeros(BYTES_VOCAB)
        logits[[*self._script, self._end][said]] = 40.0
        return logits

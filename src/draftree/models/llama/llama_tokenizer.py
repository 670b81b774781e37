"""Text to tokens and back by llama.cpp's own vocabulary, and conversations by the file's chat template."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from threading import Lock

from ...errors import PromptError
from ...text.detokenizer import Piece, PieceDecoder
from .library import Library

_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED, _STRIPS = 1, 2, 8, 16, 128
"""llama.cpp's attributes of tokens; the last takes white space in front of it away."""
_TOGETHER = 64
"""Special tokens of a text that llama.cpp gets at once: its time is quadratic in their number."""
_NO_TEXT = 0
"""Its type of vocabularies that are none, whose functions end the process."""
_BYTES = 64
"""Of a token's text, mostly."""

_RUN, _STACK = 4096, 1024
"""Characters without or of white space that llama.cpp's regular expressions match on any stack; bytes of stack that
they need for each of more (at most 400 were seen): beyond it the process would end."""
_LONGEST = 2**20
"""Such characters that are taken: for them a gigabyte of addresses is reserved."""
_stacks = Lock()


class LlamaTokenizer(PieceDecoder):
    """A ``draftree.text.encoding.Tokenizer`` of a GGUF file; several threads may use it at once.

    Text is encoded by llama.cpp, up to ``_TOGETHER`` special tokens a call. Tokens are decoded in Python, from their
    texts in bytes, which llama.cpp gives once for each token: its own ``detokenize`` removes spaces in front of
    punctuation for some vocabularies, and streamed text could not be taken back.

    Attributes:
        chat_template: as of ``GGUFHeader``.
    """

    def __init__(
        self, library: Library, vocab: int, chat_template: str | dict[str, str] | None, owner: object = None
    ) -> None:
        """
        Args:
            vocab: llama.cpp's pointer to the vocabulary.
            owner: what frees the vocabulary when it ends; kept.
        """
        self.chat_template = chat_template
        self._library, self._vocab, self._owner = library, vocab, owner
        super().__init__(library.vocab_n_tokens(vocab))
        self._prefixed = self.decode(bare := self._tokenize("a", special=False)).startswith(" ")
        whole = self._tokenize("a", special=True)
        begins = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), len(whole))
        self._begin, self._end = whole[:begins], whole[begins + len(bare) :]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that begin one; special tokens that it contains are found."""
        starts = [cut.start() for cut in self._cuts.finditer(text)][_TOGETHER::_TOGETHER]
        parts = (text[start:end] for start, end in pairwise([0, *starts, len(text)]))
        ids = [token for part in parts for token in self._tokenize(part, special=False)]
        return [*self._begin, *ids, *self._end] if add_special_tokens else ids

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        """Special tokens in front of which a text can be cut: they overlap with no other, and strip nothing."""
        attributes = ((token, self._library.vocab_get_attr(self._vocab, token)) for token in range(self._size))
        special = {self._text(t): a for t, a in attributes if a & (_UNKNOWN | _CONTROL | _USER_DEFINED)}
        inner, first = set("".join(text[1:] for text in special)), {text[:1] for text in special}
        texts = [t for t, a in special.items() if a & _CONTROL and not a & _STRIPS and t[:1] not in inner]
        patterns = [re.escape(t) for t in texts if first.isdisjoint(t[1:]) and not t[0].isspace()]
        return re.compile("|".join(sorted(patterns, key=len, reverse=True)) or "(?!)")

    def _tokenize(self, text: str, special: bool) -> list[int]:
        """Ids of a text, after ``special`` tokens that begin one."""
        data = text.encode()

        def call() -> list[int]:
            count = -len(data) - 8  # more than one token a byte only beside special ones
            while count < 0:
                ids = (ctypes.c_int32 * -count)()
                count = self._library.tokenize(self._vocab, data, len(data), ids, len(ids), special, True)
            return ids[:count]

        run = 0 if len(text) <= _RUN else max(map(len, re.findall(r"\S+|\s+", text)))
        if run > _LONGEST:
            raise PromptError(
                f"text has {run} characters without white space, or of it alone: give at most {_LONGEST}", "text"
            )
        return call() if run <= _RUN else _with_stack(run * _STACK, call)

    def _read(self, token: int) -> Piece:
        count = -_BYTES
        while count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = self._library.token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        special = self._library.vocab_get_attr(self._vocab, token) & (_UNKNOWN | _CONTROL)
        return Piece(buffer.raw[:count], bool(special))

    @cached_property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Special tokens that templates know by names."""
        ids = {name: getattr(self._library, f"vocab_{name}")(self._vocab) for name in ("bos", "eos")}
        return {f"{name}_token": self._text(token) for name, token in ids.items() if token >= 0}

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens, without those that only pad the vocabulary."""
        return dict(self._ids)

    @cached_property
    def _ids(self) -> dict[str, int]:
        used = (i for i in range(self._size) if not self._library.vocab_get_attr(self._vocab, i) & _UNUSED)
        return {self._text(i): i for i in used}

    def _text(self, token: int) -> str:
        text: bytes = self._library.vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")


def _with_stack(size: int, call: Callable[[], list[int]]) -> list[int]:
    """What ``call`` returns in a thread with a stack of ``size`` bytes, rounded up."""
    pool = ThreadPoolExecutor(1)
    with _stacks:
        before = threading.stack_size((size // 2**20 + 1) * 2**20)
        try:
            future = pool.submit(call)
        except RuntimeError as error:
            raise PromptError(f"the prompt needs {size} bytes of stack ({error}): break its longest word up") from None
        finally:
            threading.stack_size(before)
    with pool:
        return future.result()


def read_tokenizer(
    library: Library, vocab: int, chat_template: str | dict[str, str] | None, owner: object = None
) -> LlamaTokenizer | None:
    """The tokenizer of a vocabulary (``LlamaTokenizer`` for the arguments); None: of a model of bare token ids."""
    return LlamaTokenizer(library, vocab, chat_template, owner) if library.vocab_type(vocab) != _NO_TEXT else None

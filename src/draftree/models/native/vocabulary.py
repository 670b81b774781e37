"""The vocabulary of a GGUF file: llama.cpp's where it is installed, else as transformers reads it."""

from __future__ import annotations

from weakref import finalize

from gguf.constants import Keys

from ...text import Tokenizer
from ..llama.gguf_file import GGUFHeader, unloadable
from ..llama.library import Library, has_library, open_library
from ..llama.llama_tokenizer import read_tokenizer

_ENDS = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)


class _Vocabulary:
    """A file's vocabulary alone, in llama.cpp's memory.

    Raises:
        ModelFileError: it cannot be read.
    """

    def __init__(self, library: Library, header: GGUFHeader) -> None:
        params = library.model_default_params()
        params.vocab_only = True
        library.complaint()
        pointer = library.model_load_from_file(str(header.path).encode(), params)
        if not pointer:
            raise unloadable(library, header.path)
        finalize(self, library.model_free, pointer)
        self.pointer = library.model_get_vocab(pointer)


def read_vocabulary(header: GGUFHeader) -> tuple[Tokenizer | None, frozenset[int]]:
    """The tokenizer of a file, None of one of bare token ids; and the tokens that end a text."""
    if not has_library():
        from ..huggingface.pretrained import gguf_tokenizer

        found = (header.numbers(key) for key in _ENDS)
        return gguf_tokenizer(header.path), frozenset(ids[0] for ids in found if ids)
    library = open_library()
    vocabulary = _Vocabulary(library, header)
    count = library.vocab_n_tokens(vocabulary.pointer)
    ends = frozenset(token for token in range(count) if library.vocab_is_eog(vocabulary.pointer, token))
    return read_tokenizer(library, vocabulary.pointer, header.chat_template, vocabulary), ends

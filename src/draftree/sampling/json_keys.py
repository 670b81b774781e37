"""The keys of JSON that is being written: none comes twice in an object, also where a schema leaves it open."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from ..text.encoding import CALL_TAGS

_TAG = CALL_TAGS[0].encode()


class JsonKeys(NamedTuple):
    """The keys that the objects have which are open at one place of a text of JSON.

    Attributes:
        objects: keys of each, decoded; None: it is an array.
        string: what has come of a string, of a key alone as it is written; None: no string is open.
        escaped: a backslash is the last of it.
        is_key: this string, or the next, is a key.
        free: the end of a text before the first call of a function; None: JSON has begun.
    """

    objects: tuple[frozenset[str] | None, ...] = ()
    string: bytes | None = None
    escaped: bool = False
    is_key: bool = False
    free: bytes | None = None

    def after(self, more: bytes) -> JsonKeys | None:
        """Those after more of the text; None: an object would have a key twice."""
        if self.free is not None:
            before, tag, more = (self.free + more).partition(_TAG)
            if not tag:
                return JsonKeys(free=before[1 - len(_TAG) :])
        objects, string, escaped, is_key = list(self.objects), self.string, self.escaped, self.is_key
        for byte in (more[i : i + 1] for i in range(len(more))):
            if string is not None:
                if byte != b'"' or escaped:
                    string, escaped = string + byte if is_key else b"", byte == b"\\" and not escaped
                    continue
                if is_key:
                    key, earlier = _text_of(string), objects[-1] or frozenset()
                    if key in earlier:
                        return None
                    objects[-1], is_key = earlier | {key}, False
                string = None
            elif byte == b'"':
                string = b""
            elif byte in b"{[":
                is_key = byte == b"{"
                objects.append(frozenset() if is_key else None)
            elif byte in b"}]":
                del objects[-1:]
                is_key = False
            elif byte == b",":
                is_key = bool(objects) and objects[-1] is not None
        return JsonKeys(tuple(objects), string, escaped, is_key)


def _text_of(written: bytes) -> str:
    """A string of JSON, as it is written, without its escapes."""
    return str(json.loads(b'"%s"' % written)) if b"\\" in written else written.decode(errors="replace")


class KeyTokens:
    """Tokens that can end a key."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens
        self._ending: dict[bytes, list[int]] = {}  # by what they have of the key: those with one quotation mark
        irregular = []
        for token in range(tokens.vocab_size):
            before, mark, behind = self.spelled(token).partition(b'"')
            if mark and (b'"' in behind or b"\\" in before):
                irregular.append(token)
            elif mark:
                self._ending.setdefault(before, []).append(token)
        self._irregular = np.array(irregular, dtype=np.int64)
        # Free text holds no whole tag: the last byte of the first one is the token's own, and two keys come behind it.
        twice = [token for token in irregular if self.spelled(token).partition(_TAG[-1:])[2].count(b'"') >= 4]
        self._behind_a_tag = np.array(twice, dtype=np.int64)
        """Irregular tokens that may end a call's tag and repeat a key behind it; few vocabularies have any."""

    def spelled(self, token: int) -> bytes:
        return self._tokens.decode_bytes([token])

    def repeating(self, keys: JsonKeys, mask: NDArray[np.uint32]) -> list[int]:
        """Tokens that a mask allows and that would end a key for the second time."""
        ending: list[int] = []
        if keys.string is not None and keys.is_key:
            if b"\\" in keys.string:
                ending += (token for tokens in self._ending.values() for token in tokens)
            else:
                written = [key.encode(errors="replace") for key in keys.objects[-1] or ()]
                rests = [key[len(keys.string) :] for key in written if key.startswith(keys.string)]
                ending += (token for rest in rests for token in self._ending.get(rest, ()))
        irregular = self._irregular if keys.free is None else self._behind_a_tag
        ids = np.concatenate([irregular, np.array(ending, dtype=np.int64)])
        allowed = ids[(mask[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1 == 1].tolist()
        return [token for token in allowed if keys.after(self.spelled(token)) is None]

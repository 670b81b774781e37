"""Texts of one vocabulary read in the tokens of another, and the tokens of the one that those of the other stand for.

What chat templates write between the turns of a conversation, each model reads in its own: it is found by rendering a
conversation, without a table of templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DraftreeError
from .encoding import Conversation, Tokenizer, render
from .spelling import Spelling

_DISTINCT = 5
"""Letters from which on a mark without a special token is searched for: shorter ones may be of the text itself."""
_UNKNOWN, _NONE = -2, -1
"""In place of the target's token: it was not looked for; there is none."""

Ends = list[tuple[int, bytes]]
"""Of tokens of a text, how many of the model's lie in the text up to each, and what is spelt behind these."""


class TextReader:
    """The target's tokens as a model's own.

    Attributes:
        own, target: what their tokens spell.
        special: texts of the target's special tokens -> these.
        same: special tokens of the target's -> the model's of the same text.
        end: the special token that ends an answer by the target's template; None: there is none.
    """

    def __init__(self, own: Tokenizer, size: int, target: Tokenizer, target_size: int) -> None:
        self.own, self.target = Spelling(own, size), Spelling(target, target_size)
        self.special = {self.target.texts[token]: token for token in sorted(self.target.special)}
        ours = {self.own.texts[token]: token for token in sorted(self.own.special)}
        self.same = {token: ours[text] for text, token in self.special.items() if text in ours}
        bare = own.encode("a", add_special_tokens=False)
        whole = own.encode("a")
        begins = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        self._begin = [token for token in whole[: next(begins, 0)] if token < size]
        self._marks = dict[bytes, list[int]]()
        self.end: int | None = None
        self._read_marks(marks(target), marks(own), own)
        texts = sorted(self._marks, key=len, reverse=True)
        self._mark = re.compile(b"|".join(map(re.escape, texts)) or b"(?!)")

    def _read_marks(self, theirs: Mapping[str, str], ours: Mapping[str, str], own: Tokenizer) -> None:
        """Where the two templates have marks in the same places, the model's takes the place of the target's.

        Places whose marks the target writes alike get what stands in the first of them: before an answer, behind one.
        """
        for place in ("user>", "assistant>user", *theirs):
            text = theirs.get(place, "").encode()
            distinct = len(text.strip()) >= _DISTINCT or any(special in text for special in self.special if special)
            if place in ours and text not in self._marks and distinct:
                ids = own.encode(ours[place], add_special_tokens=False)
                self._marks[text] = [token for token in ids if token < len(self.own.texts)]
        behind = theirs.get("assistant>user", "").encode()
        self.end = next((token for text, token in self.special.items() if text and behind.startswith(text)), None)

    def of(self, token: int) -> bytes:
        """What a token of the target's spells; nothing where it only pads the output layer."""
        return self.target.texts[token] if token < len(self.target.texts) else b""

    def unread(self, left: bytes, tokens: Sequence[int]) -> Ends:
        """The ends of tokens of which nothing is read."""
        ends = Ends()
        for token in tokens:
            left += self.of(token)
            ends.append((0, left))
        return ends

    def begun(self, tokens: Sequence[int], most: int) -> tuple[list[int], Ends]:
        """As ``read``, of a text that begins: at most so many of the model's tokens, the last ones, and its first."""
        ids, ends = self.read(b"", tokens, hold=False)
        cut = max(0, len(ids) - most)
        begin = [] if ids[cut : cut + len(self._begin)] == self._begin else self._begin
        add = len(begin) - cut
        return [*begin, *ids[cut:]], [(size + add, left) if size > cut else (0, b"") for size, left in ends]

    def read(self, left: bytes, tokens: Sequence[int], hold: bool) -> tuple[list[int], Ends]:
        """The model's tokens of ``left`` and of tokens behind it, and the ends of these.

        Args:
            hold: the last one is left out, for the text goes on.
        """
        text, places, special = bytearray(left), list[int](), dict[int, tuple[int, list[int]]]()
        for token in tokens:
            start = len(text)
            text += self.of(token)
            if token in self.target.special:
                same = self.same.get(token)
                special[start] = len(text), [] if same is None else [same]
            places.append(len(text))
        parts = [*self._parts(bytes(text), special, hold)]
        ids, ends, begin, i = list[int](), Ends(), 0, 0
        for place in places:
            while i < len(parts) and parts[i][1] <= place:
                ids += parts[i][0]
                begin = parts[i][1]
                i += 1
            ends.append((len(ids), bytes(text[begin:place])))
        return ids, ends

    def _parts(
        self, text: bytes, special: Mapping[int, tuple[int, list[int]]], hold: bool
    ) -> Iterator[tuple[Sequence[int], int]]:
        """The model's tokens of a text, part by part, each with where it ends: of marks several, of some parts none."""
        known, at = {m.start(): (m.end(), self._marks[m[0]]) for m in self._mark.finditer(text)}, 0
        for start in sorted(known.keys() | special.keys()):
            end, ids = known.get(start) or special[start]
            if start >= at:
                yield from self._spelt(text[at:start], at)
                yield ids, end
                at = end
        last = [*self._spelt(text[at:], at)]
        yield from last[:-1] if hold else last

    def _spelt(self, text: bytes, start: int) -> Iterator[tuple[Sequence[int], int]]:
        for token, end in self.own.spelt(text):
            yield () if token is None else (token,), start + end


class FirstTokens:
    """The target's tokens that a model's stand for, each looked for once it is wanted.

    A token that ends the model's text stands for one that ends the target's.

    Args:
        size: of the model's vocabulary.
        own_ends, ends: tokens that end a text, the model's and the target's.
    """

    def __init__(self, text: TextReader, size: int, own_ends: Iterable[int], ends: frozenset[int]) -> None:
        self._own, self._target = text.own, text.target
        self._firsts = np.full(size, _NONE, np.int64)
        self._firsts[: len(text.own.texts)] = _UNKNOWN
        self._behind = dict[int, bytes]()
        for token in text.own.special:
            self._firsts[token] = text.special.get(text.own.texts[token], _NONE)
        end = text.end if text.end in ends else min(ends, default=_NONE)
        for token in own_ends:
            if token < size and self._firsts[token] not in ends:
                self._firsts[token] = end

    def of(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """[n] the target's tokens that some of the model's stand for; negative: none."""
        firsts: NDArray[np.int64] = self._firsts[tokens]
        if _UNKNOWN in firsts:
            for token in tokens[firsts == _UNKNOWN].tolist():
                first = self.of_text(self._own.texts[token])
                self._firsts[token] = _NONE if first is None else first[0]
                if first is not None and first[1]:
                    self._behind[token] = first[1]
            firsts = self._firsts[tokens]
        return firsts

    def of_token(self, token: int) -> int:
        """The target's token that one of the model's stands for; negative: none."""
        return int(self.of(np.array([token]))[0])

    def behind(self, token: int) -> bytes:
        """What a token spells behind the one that it stands for."""
        return self._behind.get(token, b"")

    def of_text(self, text: bytes) -> tuple[int, bytes] | None:
        """The target's first token of a text, and what lies behind it; None: none begins it."""
        token, end = next(iter(self._target.spelt(text)), (None, 0))
        return None if token is None else (token, text[end:])

    def add_up(self, probabilities: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        """[size] the probability of each of the target's tokens by those of the model's."""
        firsts = self.of(np.arange(len(self._firsts)))
        return np.bincount(firsts[firsts >= 0], probabilities[firsts >= 0], size).astype(np.float64)


_TURNS = (("system", "sysprobe"), ("user", "askprobe"), ("assistant", "ansprobe"), ("user", "askagain"))


def marks(tokenizer: Tokenizer) -> dict[str, str]:
    """Where a mark stands -> its text, such as "user>assistant", ">user" in front and "user>" before an answer.

    Without those of conversations that the template does not take, or whose contents it changes or moves.
    """
    all_marks = dict[str, str]()
    for turns in (_TURNS, _TURNS[1:]):
        try:
            text = render(tokenizer, Conversation([{"role": role, "content": content} for role, content in turns]))
        except DraftreeError:
            continue
        turn_marks, before = dict[str, str](), ""
        for role, content in turns:
            mark, said, text = text.partition(content)
            if not said:
                break
            turn_marks[f"{before}>{role}"] = mark
            before = role
        else:
            all_marks = turn_marks | {f"{before}>": text} | all_marks
    return all_marks

"""Text to tokens and back by a GGUF file's own vocabulary.

Byte pair encoding: of a word's letters, the pair that comes first among the merges becomes one, again and again
(Sennrich, Haddow & Birch, *Neural Machine Translation of Rare Words with Subword Units*, ACL 2016).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise

import regex  # type: ignore[import-untyped]
from gguf.constants import Keys, TokenType

from ...errors import PromptError
from ...text.detokenizer import BYTE_LETTERS, Piece, PieceDecoder, byte_level, fallback
from ...text.text_cache import TextCache
from ..gguf.gguf_file import GGUFHeader
from ..gguf.metadata import damaged
from .header_reader import unsupported
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_MERGES, _SCORES, _GEMMA4 = "gpt2", "llama", "gemma4"
"""Names of vocabularies: BPE by merges, SentencePiece by scores, and merges of SentencePiece's letters."""
_NO_TEXT = (None, "none", "no_vocab")
_DEFAULTS: Mapping[str, tuple[int | None, int | None]] = {_MERGES: (11, 11), _SCORES: (1, 2), _GEMMA4: (None, None)}
"""Tokens that begin and end a text where a file names none."""
_SPACE = "▁"
"""A space inside SentencePiece's tokens."""
_LONGEST = 2**20
"""Characters without or of white space that are taken: merges of more take seconds."""

_LONGEST_TOKEN = 2**10
"""Most characters of a token: finding its merges takes their square. Published vocabularies have up to some hundred."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = map(int, TokenType)
_SPECIAL = frozenset({_UNKNOWN, _CONTROL})
_FOUND = frozenset({*_SPECIAL, _USER_DEFINED})
"""Types of tokens that texts contain as they are."""
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<end_of_turn>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    *("<｜end▁of▁sentence｜>", "<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>", "[e~[", "<|ifm|im_end|>"),
)
"""Tokens that end a text wherever they exist, as llama.cpp has it; for "</s>" see ``_read_ends``."""
_FILL_IN = {
    Keys.Tokenizer.FIM_PAD_ID: ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    Keys.Tokenizer.FIM_REP_ID: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    Keys.Tokenizer.FIM_SEP_ID: ("<|file_sep|>",),
}
"""Tokens of filling in the middle that end a text, and their usual texts where the file names none."""
_AROUND = {
    (Keys.Tokenizer.FIM_PRE_ID, Keys.Tokenizer.PREFIX_ID): (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    (Keys.Tokenizer.FIM_SUF_ID, Keys.Tokenizer.SUFFIX_ID): (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    (Keys.Tokenizer.FIM_MID_ID, Keys.Tokenizer.MIDDLE_ID): (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
}
"""Tokens around what is filled in: control tokens, by their usual texts where none of the keys names one."""
_CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Tokens of gpt-oss that texts contain as they are, whatever their type; none is shown (``PieceDecoder.piece``)."""
_END = "<|end|>"
_BESIDE_END = ({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"})
"""Beside a token of each of these ``_END`` ends a message, no text (gpt-oss, Solar Open)."""
_CLOSED, _OF_GEMMA4 = "</s>", "<|tool_response>"
"""Beside the second the first is a tag of HTML."""
_RIGHT_STRIPPED = ("phi-3", "phi3")
"""In names of models whose special tokens, but for ``_UNSTRIPPED``, take white space behind them away."""
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_WHITE = frozenset(" \t\n\v\f\r")


_WORD, _KEPT = 64, 1 << 14
"""A word of at most so many letters is kept with its tokens; most words that are kept."""
_SEGMENTS, _SEGMENT = 1 << 21, 1 << 6
"""Most characters, all together, of the texts between added tokens whose ids are kept; what a shorter one counts as."""


class BytePairs:
    """Encodes words as tokens.

    Args:
        ids: of the tokens.
        ranks: of pairs of tokens: the lowest is merged first, of equal ones the first in the word.
        whole: words that are tokens, whatever merges make of them.

    Raises:
        ValueError: a pair, or what it becomes, is no token.
    """

    def __init__(
        self, ids: Mapping[str, int], ranks: Mapping[tuple[str, str], float], whole: Collection[str] = ()
    ) -> None:
        for tokens in (set(chain.from_iterable(ranks)), set(map("".join, ranks))):
            if unknown := tokens - ids.keys():
                raise ValueError(f"{min(unknown)!r} is merged but no token")
        self._ranks, self._whole = ranks, whole
        self._cached = lru_cache(_KEPT)(self._merged)

    def tokens(self, word: str) -> Sequence[str]:
        """The parts of a word; a letter that no token has is a part of its own."""
        if word in self._whole:
            return (word,)
        return self._cached(word) if len(word) <= _WORD else self._merged(word)

    def _merged(self, word: str) -> Sequence[str]:
        """Merge the first pair by (rank, place) until there is none; parts are a list linked by places."""
        ranks, parts = self._ranks, list(word)
        after, before = list(range(1, len(parts) + 1)), list(range(-1, len(parts) - 1))
        ranked = enumerate(map(ranks.get, pairwise(parts)))
        heap = [(rank, i) for i, rank in ranked if rank is not None]
        heapify(heap)
        while heap:
            rank, i = heappop(heap)
            j = after[i]
            if j == len(parts) or not parts[i] or ranks.get((parts[i], parts[j])) != rank:
                continue  # a part of it has been merged since
            parts[i], parts[j], after[i] = parts[i] + parts[j], "", after[j]
            if after[j] < len(parts):
                before[after[j]] = i
            for left in (before[i], i):
                if left >= 0 and after[left] < len(parts):
                    rank_there = ranks.get((parts[left], parts[after[left]]))
                    if rank_there is not None:
                        heappush(heap, (rank_there, left))
        return tuple(filter(None, parts))


class GGUFTokenizer(PieceDecoder):
    """A ``draftree.text.encoding.Tokenizer`` of a GGUF file; several threads may use it at once.

    Attributes:
        chat_template: as of ``GGUFHeader``.
        eos_ids: tokens that end a text.

    Raises:
        NotNativeError: the file has a vocabulary of another kind, or tokens longer than any.
        ModelFileError: its parts do not go together.
    """

    def __init__(self, header: GGUFHeader) -> None:
        metadata = header.metadata
        model = metadata.text(Keys.Tokenizer.MODEL) or ""
        if model not in _DEFAULTS:
            raise unsupported(header, f"the tokenizer {model!r}")
        self.chat_template = header.chat_template
        self._texts, self._kinds = _texts(header), _kinds(header)
        super().__init__(len(self._texts))
        self._ids = dict(zip(self._texts, range(self._size), strict=True))
        by_scores = model == _SCORES
        pre = PreTokenizer((), adds_bos=True) if by_scores else _pre_tokenizer(header, model)
        bos, eos = _DEFAULTS[model]
        self.eos_ids = self._read_ends(header, eos)
        self._named = {
            "bos": self._named_token(header, Keys.Tokenizer.BOS_ID, bos if pre.has_bos else None),
            "eos": self._named_token(header, Keys.Tokenizer.EOS_ID, eos),
        }
        self._prefixed = by_scores and metadata.flag(Keys.Tokenizer.ADD_PREFIX, True)
        self._unknown = self._named_token(header, Keys.Tokenizer.UNK_ID, 0) if by_scores else None
        self._is_byte_level = not (by_scores or pre.of_gemma4)
        ranks = _ranks_by_score(header, self._texts, self._kinds) if by_scores else _ranks(header)
        whole: Collection[str] = self._ids.keys() if pre.ignore_merges else ()
        if pre.of_gemma4:
            whole = {text for text in self._texts if not text.strip("\n")}
        self._patterns = [regex.compile(f"({pattern})") for pattern in pre.patterns]
        try:
            self._pairs = BytePairs(self._ids, ranks, whole)
        except ValueError as error:
            raise damaged(header.path, f"its merges and tokens do not go together ({error})") from None
        self._added = {t: self._ids[t] for t, kind in zip(self._texts, self._kinds, strict=True) if kind in _FOUND}
        self._lengths = sorted(set(map(len, self._added)), reverse=True)
        first = "".join(regex.escape(letter) for letter in sorted({text[0] for text in self._added}))
        self._may_begin = regex.compile(f"[{first}]" if first else "(?!)")
        name = (metadata.text(Keys.General.NAME) or "").lower()
        strips = any(part in name for part in _RIGHT_STRIPPED)
        self._strips = self._added.keys() - set(_UNSTRIPPED) if strips else frozenset()
        begins = pre.of_gemma4 or metadata.flag(Keys.Tokenizer.ADD_BOS, pre.adds_bos)
        self._segments = TextCache[Sequence[int]](_SEGMENTS, _SEGMENT)
        self._begin = self._edge("bos", begins)
        self._end = self._edge("eos", metadata.flag(Keys.Tokenizer.ADD_EOS, False))

    def _named_token(self, header: GGUFHeader, key: str, default: int | None = None) -> int | None:
        """The token under a key, or the default, where there is such a token."""
        named = header.metadata.number(key), default
        return next((token for token in named if token is not None and token < self._size), None)

    def _read_ends(self, header: GGUFHeader, default: int | None) -> frozenset[int]:
        """Tokens that end a text. Those that are known by their texts get the types that llama.cpp gives them.

        llama.cpp counts any token "</s>". Qwen's vocabularies have one that is a tag of HTML: it stays as it is.
        """
        ids, kinds = self._ids, self._kinds
        ends = {self._named_token(header, Keys.Tokenizer.EOS_ID, default)}
        ends |= {self._named_token(header, key) for key in (Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID, *_FILL_IN)}
        by_text = {ids[text] for text in _ENDS if text in ids}
        if _CLOSED in ids and kinds[ids[_CLOSED]] != _NORMAL:
            by_text.add(ids[_CLOSED])
        around = set[int]()
        for tokens, keys, texts in (
            *((by_text, (key,), texts) for key, texts in _FILL_IN.items()),
            *((around, keys, texts) for keys, texts in _AROUND.items()),
        ):
            if all(self._named_token(header, key) is None for key in keys):
                tokens.update([ids[text] for text in texts if text in ids][:1])
        for token in by_text | around:
            kinds[token] = _CONTROL
        for text in _CHANNELS:
            if text in ids:
                kinds[ids[text]] = _USER_DEFINED
        no_ends = set[int]()
        if _END in ids and all(not texts.isdisjoint(ids) for texts in _BESIDE_END):
            kinds[ids[_END]] = _USER_DEFINED
            no_ends.add(ids[_END])
        if _CLOSED in ids and _OF_GEMMA4 in ids:
            kinds[ids[_CLOSED]] = _NORMAL
            no_ends.add(ids[_CLOSED])
        return frozenset(token for token in ends | by_text if token is not None) - no_ends

    def _edge(self, name: str, added: bool) -> list[int]:
        """The token that begins or ends each text, if there is one."""
        token = self._named[name]
        return [token] if added and token is not None else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that begin one; special tokens that it contains are found.

        They are found before anything else: the first, and of those the longest. What stands between them has the same
        ids wherever it stands, so that a conversation is not encoded again at each of its turns.

        Raises:
            PromptError: more than ``_LONGEST`` characters without white space, or of it alone.
        """
        run = 0 if len(text) <= _LONGEST else max(map(len, re.findall(r"\S+|\s+", text)))
        if run > _LONGEST:
            raise PromptError(
                f"the prompt has {run} characters without white space, or of it alone: give at most {_LONGEST}"
            )
        ids, at = list[int](), 0
        for match in self._may_begin.finditer(text):
            if (start := match.start()) < at:
                continue
            token = next((t for n in self._lengths if (t := text[start : start + n]) in self._added), None)
            if token is not None:
                ids += [*self._encoded(text[at:start]), self._added[token]]
                at = start + len(token)
                while token in self._strips and text[at : at + 1] in _WHITE:
                    at += 1
        ids += self._encoded(text[at:])
        return [*self._begin, *ids, *self._end] if add_special_tokens else ids

    def _encoded(self, text: str) -> Sequence[int]:
        """The ids of a text without added tokens, which depend on nothing but the text."""
        return self._segments.get(text, lambda: tuple(self._encode(text))) if text else ()

    def _encode(self, text: str) -> Iterator[int]:
        """The ids of a text without added tokens, one by one; of BPE a byte without a token is left out."""
        words = [text if self._is_byte_level else _SPACE * self._prefixed + text.replace(" ", _SPACE)]
        for pattern in self._patterns:  # what it does not match is a word too
            order = -1 if pattern.flags & regex.REVERSE else 1
            words = [part for word in words for part in pattern.split(word)[::order] if part]
        for word in words:
            letters = "".join(map(BYTE_LETTERS.__getitem__, word.encode())) if self._is_byte_level else word
            for part in self._pairs.tokens(letters):
                if part in self._ids:
                    yield self._ids[part]
                elif not self._is_byte_level:
                    yield from self._in_bytes(part)

    def _in_bytes(self, letter: str) -> Sequence[int]:
        """The ids of a letter's bytes; where one has none, that of unknown text or, in BPE, those of the others."""
        spelt = [f"<0x{byte:02X}>" for byte in letter.encode()]
        ids = [self._ids[letter_byte] for letter_byte in spelt if letter_byte in self._ids]
        return ids if len(ids) == len(spelt) or self._unknown is None else [self._unknown]

    def _read(self, token: int) -> Piece:
        kind, text = self._kinds[token], self._texts[token]
        if kind in _FOUND:
            return Piece(text.encode(), kind in _SPECIAL)
        if kind != _NORMAL:
            return Piece((kind == _BYTE and fallback(text)) or b"", False)
        spelt = byte_level(text) if self._is_byte_level else text.replace(_SPACE, " ").encode()
        return Piece(spelt or text.encode(), False)

    @property
    def added_ids(self) -> Collection[int]:
        """The tokens that are found in texts as they are, before anything else."""
        return self._added.values()

    @cached_property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Special tokens that templates know by names."""
        return {f"{name}_token": self._texts[token] for name, token in self._named.items() if token is not None}

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens, without those that only pad the vocabulary."""
        return {
            text: token
            for token, (text, kind) in enumerate(zip(self._texts, self._kinds, strict=True))
            if kind != _UNUSED and not (kind == _CONTROL and "unused" in text)
        }


def read_vocabulary(header: GGUFHeader) -> GGUFTokenizer | None:
    """The tokenizer of a file (``GGUFTokenizer``); None: of one of bare token ids."""
    return None if header.metadata.text(Keys.Tokenizer.MODEL) in _NO_TEXT else GGUFTokenizer(header)


def _texts(header: GGUFHeader) -> list[str]:
    texts = [text.decode(errors="replace") for text in header.metadata.texts(Keys.Tokenizer.LIST)]
    if not texts:
        raise damaged(header.path, f"it has no {Keys.Tokenizer.LIST}")
    if (longest := max(map(len, texts))) > _LONGEST_TOKEN:
        raise unsupported(header, f"a token of {longest} characters")
    return [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]


def _kinds(header: GGUFHeader) -> list[int]:
    stored = header.token_types
    return [_NORMAL] * len(header.metadata.texts(Keys.Tokenizer.LIST)) if stored is None else stored.tolist()


def _pre_tokenizer(header: GGUFHeader, model: str) -> PreTokenizer:
    name = model if model == _GEMMA4 else header.metadata.text(Keys.Tokenizer.PRE) or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise unsupported(header, f"the pre-tokenizer {name!r}")
    return pre


def _ranks(header: GGUFHeader) -> dict[tuple[str, str], float]:
    """Of pairs of tokens, their first places among the merges."""
    texts = header.metadata.texts(Keys.Tokenizer.MERGES)
    parts = b" ".join(texts).decode(errors="replace").split(" ")
    if len(parts) != 2 * len(texts):
        raise damaged(header.path, f"{Keys.Tokenizer.MERGES} has entries that are no pairs")
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    return dict(zip(reversed(pairs), range(len(pairs) - 1, -1, -1), strict=True))


def _ranks_by_score(header: GGUFHeader, texts: Sequence[str], kinds: Sequence[int]) -> dict[tuple[str, str], float]:
    """Of pairs of tokens whose texts make a third, the third's score, negated.

    Texts are cut at tokens of ``_FOUND`` before anything else, so merges never make one, unless it holds a ``_SPACE``.
    """
    stored = header.token_scores
    scores = [0.0] * len(texts) if stored is None else stored.tolist()
    known = set(texts)
    return {
        (text[:at], text[at:]): -score
        for text, score, kind in zip(texts, scores, kinds, strict=True)
        if kind not in _FOUND or _SPACE in text
        for at in range(1, len(text))
        if text[:at] in known and text[at:] in known
    }

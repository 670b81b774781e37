"""Text to tokens and back by a GGUF file's own vocabulary.

Byte pair encoding: of a word's letters, the pair that comes first among the merges becomes one, again and again
(Sennrich, Haddow & Birch, *Neural Machine Translation of Rare Words with Subword Units*, ACL 2016).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, count, pairwise
from typing import NamedTuple

import regex  # type: ignore[import-untyped]
from gguf.constants import Keys, TokenType

from ...errors import PromptError
from ...text.detokenizer import BYTE_LETTERS, Piece, PieceDecoder, byte_level, fallback
from ..gguf.gguf_file import GGUFHeader
from ..gguf.metadata import damaged
from .header_reader import unsupported

_BYTE_LEVEL, _PIECES = "gpt2", "llama"
"""Names of vocabularies: byte-level BPE, and SentencePiece with byte fallback."""
_NO_TEXT = (None, "none", "no_vocab")
_DEFAULTS = {_BYTE_LEVEL: (11, 11), _PIECES: (1, 2)}
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
    *("<｜end▁of▁sentence｜>", "<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>", "[e~["),
)
"""Tokens that end a text wherever they exist, as llama.cpp has it; for "</s>" see ``_read_ends``."""
_FILL_IN = {
    Keys.Tokenizer.FIM_PAD_ID: ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    Keys.Tokenizer.FIM_REP_ID: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    Keys.Tokenizer.FIM_SEP_ID: ("<|file_sep|>",),
}
"""Tokens of filling in the middle that end a text, and their usual texts where the file names none."""
_RIGHT_STRIPPED = ("phi-3", "phi3")
"""In names of models whose special tokens, but for ``_UNSTRIPPED``, take white space behind them away."""
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OPENED = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SYMBOLS, _SPACES])
_QWEN2 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}", _SYMBOLS, _SPACES])
_TEKKEN = "|".join(
    [f"{_OPENED}{_UPPER}*{_LOWER}+", f"{_OPENED}{_UPPER}+{_LOWER}*", r"\p{N}", _PATHS, _SPACES],
)
_GPT4O = "|".join(
    [
        f"{_OPENED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        f"{_OPENED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _PATHS,
        _SPACES,
    ]
)
_SEED = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES])
_MINICPM5 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}+", _SYMBOLS, _SPACES])
_CJK = "[一-龥ࠀ-一가-퟿]+"


class PreTokenizer(NamedTuple):
    """How a text is split.

    Attributes:
        patterns: each splits the pieces of the one before; what none matches is a piece too.
        ignore_merges: a piece that is a token is that token, whatever merges make of it.
        adds_bos: a text begins with a token of its own, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "a.x-4.0", "mellum", "trillion"), PreTokenizer((_GPT2,))
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _OF_LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), PreTokenizer((_QWEN2,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    "seed-coder": PreTokenizer((_SEED,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"(?<!\s)\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}
"""By their names in GGUF files of the architectures that the engine runs (``FAMILIES``)."""


_WORD, _KEPT = 64, 1 << 14
"""A word of at most so many letters is kept with its tokens; most words that are kept."""


class BytePairs:
    """Encodes words as tokens.

    Args:
        ids: of the tokens.
        merges: pairs of tokens, those that are merged first in front.
        whole: a word that is a token is that token, whatever merges make of it.

    Raises:
        ValueError: a pair, or what it becomes, is no token.
    """

    def __init__(self, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], whole: bool = False) -> None:
        for tokens in (set(chain.from_iterable(merges)), set(map("".join, merges))):
            if unknown := tokens - ids.keys():
                raise ValueError(f"{min(unknown)!r} is merged but no token")
        self._ids, self._whole = ids, whole
        self._ranks = dict(zip(merges, count(), strict=False))
        self._kept = lru_cache(_KEPT)(self._merged)

    def tokens(self, word: str) -> Sequence[str]:
        """The parts of a word; a letter that no token has is a part of its own."""
        if self._whole and word in self._ids:
            return (word,)
        return self._kept(word) if len(word) <= _WORD else self._merged(word)

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
        chat_template: None: the file has none.
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
        self.chat_template: str | dict[str, str] | None = header.chat_template
        self._texts, self._kinds = _texts(header), _kinds(header)
        super().__init__(len(self._texts))
        self._ids = dict(zip(self._texts, range(self._size), strict=True))
        self.eos_ids = self._read_ends(header, _DEFAULTS[model][1])
        names = zip(("bos", "eos"), (Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID), _DEFAULTS[model], strict=True)
        self._named = {name: self._named_token(header, key, default) for name, key, default in names}
        self._prefixed = model == _PIECES and metadata.flag(Keys.Tokenizer.ADD_PREFIX, True)
        self._is_byte_level = model == _BYTE_LEVEL
        if self._is_byte_level:
            pre, merges = _pre_tokenizer(header), _merges(header)
        else:
            self._unknown = self._named_token(header, Keys.Tokenizer.UNK_ID, 0)
            pre, merges = PreTokenizer((), adds_bos=True), _merges_by_score(header, self._texts, self._kinds)
        self._patterns = [regex.compile(f"({pattern})") for pattern in pre.patterns]
        try:
            self._pairs = BytePairs(self._ids, merges, pre.ignore_merges)
        except ValueError as error:
            raise damaged(header.path, f"its merges and tokens do not go together ({error})") from None
        self._added = {t: self._ids[t] for t, kind in zip(self._texts, self._kinds, strict=True) if kind in _FOUND}
        self._lengths = sorted(set(map(len, self._added)), reverse=True)
        first = "".join(regex.escape(letter) for letter in sorted({text[0] for text in self._added}))
        self._may_begin = regex.compile(f"[{first}]" if first else "(?!)")
        name = (metadata.text(Keys.General.NAME) or "").lower()
        strips = any(part in name for part in _RIGHT_STRIPPED)
        self._strips = self._added.keys() - set(_UNSTRIPPED) if strips else frozenset()
        self._begin = self._edge(header, Keys.Tokenizer.ADD_BOS, "bos", pre.adds_bos)
        self._end = self._edge(header, Keys.Tokenizer.ADD_EOS, "eos", False)

    def _named_token(self, header: GGUFHeader, key: str, default: int) -> int | None:
        """The token under a key, or the default, where there is such a token."""
        named = header.metadata.number(key), default
        return next((token for token in named if token is not None and token < self._size), None)

    def _read_ends(self, header: GGUFHeader, default: int) -> frozenset[int]:
        """Tokens that end a text; those that are found by their texts become control tokens.

        llama.cpp counts any token "</s>". Qwen's vocabularies have one that is a tag of HTML: it stays as it is.
        """
        ids = self._ids
        by_text = [ids[text] for text in _ENDS if text in ids]
        if "</s>" in ids and self._kinds[ids["</s>"]] != _NORMAL:
            by_text.append(ids["</s>"])
        keys = {Keys.Tokenizer.EOS_ID: default, Keys.Tokenizer.EOT_ID: len(ids), Keys.Tokenizer.EOM_ID: len(ids)}
        ends = {self._named_token(header, key, token) for key, token in keys.items()}
        for key, texts in _FILL_IN.items():
            if header.metadata.number(key) is None:
                by_text += [ids[text] for text in texts if text in ids][:1]
            else:
                ends.add(self._named_token(header, key, len(ids)))
        for token in by_text:
            self._kinds[token] = _CONTROL
        return frozenset(token for token in ends.union(by_text) if token is not None)

    def _edge(self, header: GGUFHeader, key: str, name: str, default: bool) -> list[int]:
        """The token that begins or ends each text, if there is one."""
        token = self._named[name]
        return [token] if header.metadata.flag(key, default) and token is not None else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that begin one; special tokens that it contains are found.

        They are found before anything else: the first, and of those the longest.

        Raises:
            PromptError: more than ``_LONGEST`` characters without white space, or of it alone.
        """
        run = 0 if len(text) <= _LONGEST else max(map(len, re.findall(r"\S+|\s+", text)))
        if run > _LONGEST:
            raise PromptError(
                f"the prompt has {run} characters without white space, or of it alone: give at most {_LONGEST}"
            )
        ids, at = list[int](), 0
        for found in self._may_begin.finditer(text):
            if (start := found.start()) < at:
                continue
            token = next((t for n in self._lengths if (t := text[start : start + n]) in self._added), None)
            if token is not None:
                ids += [*self._encode(text[at:start]), self._added[token]]
                at = start + len(token)
                while token in self._strips and text[at : at + 1].isspace():
                    at += 1
        ids += self._encode(text[at:])
        return [*self._begin, *ids, *self._end] if add_special_tokens else ids

    def _encode(self, text: str) -> Iterator[int]:
        """The ids of a text without added tokens; of byte-level BPE a byte without a token is left out."""
        if not text:
            return
        if self._is_byte_level:
            words = [text]
            for pattern in self._patterns:  # what it does not match is a word too
                words = [part for word in words for part in pattern.split(word) if part]
            for word in words:
                for part in self._pairs.tokens("".join(map(BYTE_LETTERS.__getitem__, word.encode()))):
                    if part in self._ids:
                        yield self._ids[part]
            return
        for part in self._pairs.tokens(_SPACE * self._prefixed + text.replace(" ", _SPACE)):
            spelt = [part] if part in self._ids else [f"<0x{byte:02X}>" for byte in part.encode()]
            if all(each in self._ids for each in spelt):
                yield from map(self._ids.__getitem__, spelt)
            elif self._unknown is not None:
                yield self._unknown

    def _read(self, token: int) -> Piece:
        kind, text = self._kinds[token], self._texts[token]
        if kind in _FOUND:
            return Piece(text.encode(), kind in _SPECIAL)
        if kind != _NORMAL:
            return Piece((kind == _BYTE and fallback(text)) or b"", False)
        spelt = byte_level(text) if self._is_byte_level else text.replace(_SPACE, " ").encode()
        return Piece(spelt or text.encode(), False)

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
    """The type of each token (``TokenType``)."""
    stored = header.token_types
    return [_NORMAL] * len(header.metadata.texts(Keys.Tokenizer.LIST)) if stored is None else stored.tolist()


def _pre_tokenizer(header: GGUFHeader) -> PreTokenizer:
    name = header.metadata.text(Keys.Tokenizer.PRE) or "default"
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise unsupported(header, f"the pre-tokenizer {name!r}")
    return found


def _merges(header: GGUFHeader) -> list[tuple[str, str]]:
    texts = header.metadata.texts(Keys.Tokenizer.MERGES)
    parts = b" ".join(texts).decode(errors="replace").split(" ")
    if len(parts) != 2 * len(texts):
        raise damaged(header.path, f"{Keys.Tokenizer.MERGES} has entries that are no pairs")
    return list(zip(parts[::2], parts[1::2], strict=True))


def _merges_by_score(header: GGUFHeader, texts: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs of tokens whose texts make a third, the third's score falling.

    Texts are cut at tokens of ``_FOUND`` before anything else, so merges never make one, unless it holds a ``_SPACE``.

    Raises:
        NotNativeError: two have the same score. llama.cpp merges the first in the text then: no order of pairs does.
    """
    stored = header.token_scores
    scores = [0.0] * len(texts) if stored is None else stored.tolist()
    known, merges, made = set(texts), list[tuple[str, str]](), list[float]()
    for token in sorted(range(len(texts)), key=lambda token: -scores[token]):
        text = texts[token]
        if kinds[token] not in _FOUND or _SPACE in text:
            pairs = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in known and text[at:] in known]
            merges += pairs
            made += scores[token : token + bool(pairs)]
    if len(set(made)) < len(made):
        raise unsupported(header, "a vocabulary whose tokens have the same scores")
    return merges

"""How byte-level BPE splits a text before merges: ``tokenizer.ggml.pre`` of a GGUF file, as regular expressions.

The expressions are those of the models' own tokenizers. llama.cpp computes some of them on classes of ASCII: with
"tekken" and "gpt-4o" it gives other ids to capitals and marks beyond ASCII, with these and "deepseek-llm" and
"deepseek-coder" to white space beyond ASCII. Ours are those that the models were trained with.
"""

from __future__ import annotations

from typing import NamedTuple

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
_QWEN35 = "|".join(
    [_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES]
)
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
_DEEPSEEK3 = "|".join(
    [
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    ]
)
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
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    "seed-coder": PreTokenizer((_SEED,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"(?<!\s)\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
"""By their names in GGUF files."""

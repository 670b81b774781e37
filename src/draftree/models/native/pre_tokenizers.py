"""How texts are split into words before merges, by the names that GGUF files give (``tokenizer.ggml.pre``).

The rules are llama.cpp's, so that a file has the same ids whatever runs it. Some are coarser than those of the model's
own tokenizer: ``_CASED`` knows capitals of ASCII alone, and ``_MARKED`` stands for words that models split at capitals.
"""

from __future__ import annotations

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """How a text is split.

    Attributes:
        patterns: each splits the pieces of the one before; what none matches is a piece too.
        ignore_merges: a piece that is a token is that token, whatever merges make of it.
        adds_bos: a text begins with a token of its own, unless the file says otherwise.
        has_bos: there is a token that begins texts where the file names none.
        of_gemma4: letters are SentencePiece's, not those of byte-level BPE. A piece of line breaks that is a token is
            that token, and a text begins with a token of its own, whatever the file says.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    has_bos: bool = True
    of_gemma4: bool = False


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_OPENED = r"[^\r\n\p{L}\p{N}]?"
_LETTERS = rf"{_OPENED}\p{{L}}+"
_MARKED = rf"{_OPENED}[\p{{L}}\p{{M}}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_THREE = r"\p{N}{1,3}"
_NO_LOWER, _NO_UPPER = r"[^\P{L}a-z]", r"[^\P{L}A-Z]"
_CASED = (rf"{_OPENED}{_NO_LOWER}*{_NO_UPPER}+", rf"{_OPENED}{_NO_LOWER}+{_NO_UPPER}*")
_FROM_THE_RIGHT = r"(?r)\P{N}*\p{N}{1,3}"
"""Digits in threes from the last; the first have what is in front of them with them."""


def _any(*patterns: str) -> str:
    return "|".join(patterns)


_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _SPACES)
_LLAMA3 = _any(_CONTRACTION, _LETTERS, _THREE, _SYMBOLS, _LINES)
_QWEN2 = _any(_CONTRACTION, _LETTERS, r"\p{N}", _SYMBOLS, _LINES)
_QWEN35 = _any(_CONTRACTION, _MARKED, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES)
_TEKKEN = _any(*_CASED, r"\p{N}", _PATHS, _LINES)
_GPT4O = _any(*(f"{word}(?:{_CONTRACTION})?" for word in _CASED), _THREE, _PATHS, _LINES)
_K2_HORIZON = _any("'ſ", _CONTRACTION, rf"{_OPENED}[\p{{L}}\p{{M}}\u200c\u200d]+", _THREE, _SYMBOLS, _LINES)
_SEED = _any(_CONTRACTION, _LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES)
_MINICPM5 = _any(_CONTRACTION, _LETTERS, r"\p{N}+", _SYMBOLS, _LINES)
_EXAONE_MOE = _any(
    *(_CONTRACTION, rf"{_OPENED}\p{{L}}(?:\p{{M}}| ?\p{{L}})*", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),
    _LINES,
)
_JAIS2 = _any(
    *(_CONTRACTION, _LETTERS, _THREE, _SYMBOLS, r"\s*[\r\n]+"),
    *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")),
    r"\s",
)
_CODE_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+"
_SYMBOL = r"[\p{P}\p{S}]"
_DEEPSEEK3 = (_CODE_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
_HAN = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
_NO_HAN = rf"(?:(?![{_HAN}])\p{{L}})"
_KIMI = _any(f"[{_HAN}]+", rf"{_OPENED}{_NO_HAN}+(?:{_CONTRACTION})?", _THREE, _SYMBOLS, _LINES)
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_WIDE = r"(?:(?!\s)[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff])+"
_YOUNG = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f\U00010570-\U000105ff\U00010d00-\U00010dff"
    "\U00016e00-\U00016fff\U0001d400-\U0001dfff"
)
"""Letters with capitals that DeepSeek's first expression leaves out."""
_YOUTU = _any(
    "[\uac00-\ud7a3\u3131-\u318e]+",
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
    "[\u3105-\u312f]+",
    _KANA_AND_HAN,
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_OF_GPT2 = PreTokenizer((_GPT2,))
_OF_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,))
_OF_GPT4O = PreTokenizer((_GPT4O,))
_OF_DEEPSEEK3 = PreTokenizer((_THREE, _KANA_AND_HAN, _any(*_DEEPSEEK3, rf" ?{_SYMBOL}+[\r\n]*", _LINES)))

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "trillion"), _OF_GPT2),
    **dict.fromkeys(("exaone4", "granite-docling"), _OF_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _OF_DIGITS),
    **dict.fromkeys(("exaone", "mellum2"), _OF_DIGITS),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _OF_LLAMA3),
    "lfm2": _OF_LLAMA3,
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True, has_bos=False)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), has_bos=False),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "stablelm2"), _OF_QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2", "bailingmoe", "bailingmoe2", "llada-moe"), _OF_QWEN2),
    "qwen35": PreTokenizer((_QWEN35,)),
    "ufakzeka": PreTokenizer((_any(_LETTERS, r"\p{N}", _SYMBOLS, _LINES),)),
    "laguna": PreTokenizer((r"\n+", _QWEN2)),
    "k2-horizon": PreTokenizer((_K2_HORIZON,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _OF_GPT4O),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        PreTokenizer((_FROM_THE_RIGHT, _any(f"{_MARKED}(?:{_CONTRACTION})?", _THREE, _PATHS, _LINES))),
    ),
    "youtu": PreTokenizer(
        (_YOUTU, _any(f"{_MARKED}(?:{_CONTRACTION})?", r"\p{N}", _PATHS, _LINES)), ignore_merges=True
    ),
    "seed-coder": PreTokenizer((_SEED,)),
    "minicpm5": PreTokenizer((_THREE, _MINICPM5), ignore_merges=True),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _OF_DEEPSEEK3),
    "spark2_5": PreTokenizer(
        (_THREE, _KANA_AND_HAN, _any(*_DEEPSEEK3, rf" ?{_SYMBOL}+", r"[\r\n]", _SPACES), r"\p{N}")
    ),
    "afmoe": PreTokenizer((_FROM_THE_RIGHT, _ASIAN, _any(*_DEEPSEEK3, rf" ?{_SYMBOL}+[\r\n]*", _LINES))),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "deepseek-llm": PreTokenizer(
        (
            *(
                r"[\r\n]",
                rf"\s?(?:(?![{_YOUNG}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}ʕ])+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
            ),
            *(r"(?<!\s)\s+\Z", _WIDE, r"\p{N}+"),
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, r"\p{N}")),
    "chameleon": PreTokenizer(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        adds_bos=True,
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_SENTENCES,))),
    "viking": PreTokenizer((_SENTENCES, r"\p{N}")),
    "gemma4": PreTokenizer((r"\n+",), of_gemma4=True),
}
"""By their names in GGUF files: all of llama.cpp's but those of encoders ("jina-*", "roberta-bpe", ...), "superbpe" and
"sarvam-moe"."""

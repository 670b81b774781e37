"""Random texts of many scripts, and vocabularies whose merges cross every boundary that a pre-tokenizer may draw."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache

from gguf import TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ...tiny_gguf import SPECIAL, Vocabulary

_WORDS = """
the The HTTPServer iPhone naïve Straße ÉCOLE œuvre ﬁnal İstanbul ǅ ʰ ſ Привет МИР ёлка КоТ Ελλάδα ΣΊΣΥΦΟΣ Հայաստան
საქართველო ᲡᲐᲥ Ⴀⴀ 𐐀𐐨 Ꭰꭰ العربية مُحَمَّد עִבְרִית שלום فارسی اردو हिन्दी नमस्ते বাংলা தமிழ் తెలుగు සිංහල ไทย สวัสดี ລາວ မြန်မာ
ខ្មែរ བོད་ አማርኛ ᠮᠣᠩᠭᠣᠯ 中文 漢字 々〇 𠀀𪜀 豈 日本語 カタカナ ひらがな ﾊﾝｶｸ ー 한국어 ㄱㅏ 가각 ㄅㄆ
cafe\u0301 a\u0308\u0323o Å\u030a x\u20dd def return f(x): x**2 == != -> => :: // /* */ <div> </p> #include $x @y
C:\\dir https://a.b/c?d=e&f user@mail.com snake_case --flag {'a':[1]} `code` ~~ ~é ~home ^| x龥
""".split()
_NUMBERS = "1 12 123 1234 12345 3.14 1,000,000 0x1F ١٢٣٤ ४५६७ １２３４５ ๑๒ ½ Ⅷ ²³".split()
_QUOTES = "'s 'S 't 'T 're 'RE 've 'Ve 'm 'll 'LL 'd 'x ’s 'ſ ' '' n't 'tis 'Twas 'Sup".split()
_MARKS = """
. , ; : ! ? … ... ?! - – — ( ) [ ] « » “ ” ‘ ’ 、 。 ！ ・ ، ؟ । + = < > $ € ₹ % & * # @ | ^ ~ ` _ / \\ © → ∑ № ° 😀
👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 🇩🇪 👍🏽 1\ufe0f\u20e3 \u0301 \u093f \u064b \u20e3
""".split()
_SPACES = (
    *[" "] * 3,
    *(
        " " * 2,
        " " * 3,
        " " * 4,
        " " * 17,
        "\t",
        "\t\t",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        "\r\n\r\n",
        "\r",
        " \n",
        "\n ",
    ),
    *(
        "\t\n ",
        "\v",
        "\f",
        "\x85",
        "\u00a0",
        " \u00a0 ",
        "\u1680",
        "\u2003\u2009",
        "\u2028",
        "\u2029",
        "\u202f",
        "\u3000",
    ),
)
_RARE = (
    *"\0\x01\x1b\x1c\x1f\x7f\x80\x9f\u00ad\u0378\u061c\u180e\u200b\u200d\u200e\u2060\ue000\ufeff\ufffc\ufffd\ufffe\uffff",
    *"\U0001d49c\U0001f9ff\U0002f800\U00030000\U000e0041\U000f0000\U0010ffff▁",
    *("<0x0A>", "<sentinel:12>", "IMGIMGABZ"),
)
_KINDS = (_WORDS, _SPACES, _MARKS, _NUMBERS, _QUOTES, _RARE, SPECIAL)
_OFTEN = (16, 18, 6, 5, 4, 3, 1)


@cache
def texts_of_scripts(count: int) -> tuple[str, ...]:
    """Texts of 1 to 16 parts; those of a smaller number are the first of a larger one."""
    draw = random.Random(0)
    return tuple(
        "".join(draw.choice(kind) for kind in draw.choices(_KINDS, _OFTEN, k=draw.randint(1, 16))) for _ in range(count)
    )


def merged(texts: Sequence[str], merges: int) -> Vocabulary:
    """Byte-level BPE whose merges cross words, numbers and spaces alike: they are learnt on whole texts.

    Some pairs of words are tokens that no merges make.
    """
    bytes_of, letters = pre_tokenizers.ByteLevel(False, use_regex=False), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=letters, show_progress=False)
    tokens, pairs = _learn(texts, trainer, bytes_of)
    words = (one + other for one in _WORDS[:24] for other in _WORDS[:24])
    spelt = ["".join(part for part, _ in bytes_of.pre_tokenize_str(word)) for word in words]
    tokens += tuple(word for word in spelt if word not in tokens)
    types = (*[TokenType.CONTROL] * len(SPECIAL), *[TokenType.NORMAL] * len(tokens))
    return Vocabulary("gpt2", (*SPECIAL, *tokens), types, pairs)


def pieces(texts: Sequence[str], merges: int) -> tuple[Vocabulary, Vocabulary]:
    """SentencePiece whose tokens cross words, by scores, of which three tokens have the same, and by Gemma 4's merges.

    Letters that are rare in the texts have no token.
    """
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, limit_alphabet=150, show_progress=False)
    tokens, pairs = _learn([text.replace(" ", "▁") for text in texts], trainer)
    lines = tuple(token for token in ("\n" * count for count in range(1, 5)) if token not in tokens)
    control = ("<unk>", "<s>", *SPECIAL)
    whole = (*control, *(f"<0x{byte:02X}>" for byte in range(256)), *tokens, *lines)
    types = [*[TokenType.CONTROL] * len(control), *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(whole) - len(types))
    scores = tuple(-float(place // 3) for place in range(len(whole)))
    by_scores = Vocabulary("llama", whole, (TokenType.UNKNOWN, *types[1:]), scores=scores)
    return by_scores, Vocabulary("gemma4", whole, tuple(types), pairs)


def _learn(
    texts: Sequence[str], trainer: trainers.BpeTrainer, splitter: pre_tokenizers.PreTokenizer | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges."""
    tokenizer = Tokenizer(models.BPE())
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    no_pieces = re.compile("|".join(map(re.escape, (*SPECIAL, "<0x0A>"))))
    tokenizer.train_from_iterator([no_pieces.sub("", text) for text in texts], trainer)
    ids, merges = tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]["merges"]
    return tuple(sorted(ids, key=ids.__getitem__)), tuple(map(" ".join, merges))

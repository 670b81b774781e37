"""Rope frequencies of a GGUF file, as it scales them to long contexts."""

from __future__ import annotations

import numpy as np
from gguf.constants import Keys
from numpy.typing import NDArray

from ..gguf.metadata import damaged
from ..rope import frequencies, yarn, yarn_magnitude
from .header_reader import HeaderReader, unsupported

_SAME_MAGNITUDE = 1e-3
"""How far magnitudes differ that are the same, one written in a few digits."""


def scaled_frequencies(file: HeaderReader, size: int) -> tuple[NDArray[np.float64], float]:
    """Frequencies as a file scales them to long contexts, and the magnitude of rotated vectors.

    By a factor for each: Llama 3 (``rope_freqs``), LongRoPE (arXiv 2402.13753); by one for all, "linear"; YaRN (arXiv
    2309.00071, section 3.2): by one for those that turn seldom within the context that was trained on.
    """
    base = file.real(Keys.Rope.FREQ_BASE, 10000.0)
    if base <= 1:
        raise damaged(file.header.path, f"the base of its rope frequencies is {base}")
    plain, magnitude = frequencies(base, size), file.real(Keys.Rope.SCALING_ATTN_FACTOR, 1.0)
    trained = file.number(Keys.Rope.SCALING_ORIG_CTX_LEN, file.number(Keys.LLM.CONTEXT_LENGTH))
    if file.has("rope_factors_long.weight"):
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        both = [file.vector(name) for name in names]  # both count as read
        long = file.number(Keys.LLM.CONTEXT_LENGTH) > trained
        divisors = both[long]
    else:
        divisors = file.vector("rope_freqs.weight") if file.has("rope_freqs.weight") else np.ones_like(plain)
    if len(divisors) != len(plain):
        raise damaged(file.header.path, f"it has {len(divisors)} factors for {len(plain)} rope frequencies")
    plain = plain / divisors
    factor = file.real(Keys.Rope.SCALING_FACTOR, 1.0)
    kind = file.metadata.text(Keys.Rope.SCALING_TYPE)
    if kind in ("none", "longrope") or factor == 1:
        return plain, magnitude
    if kind in (None, "linear"):
        return plain / factor, magnitude
    if kind != "yarn":
        raise unsupported(file.header, f"rope scaling {kind!r}")
    betas = (file.real(Keys.Rope.SCALING_YARN_BETA_FAST, 32.0), file.real(Keys.Rope.SCALING_YARN_BETA_SLOW, 1.0))
    magnitude *= yarn_magnitude(factor) / yarn_magnitude(factor, file.real(Keys.Rope.SCALING_YARN_LOG_MUL, 0.0))
    stated = file.real(Keys.Rope.SCALING_YARN_ATTN_FACTOR, magnitude)
    if abs(stated / magnitude - 1) > _SAME_MAGNITUDE:
        raise unsupported(file.header, f"a magnitude of {stated} by YaRN")
    return yarn(plain, base, trained, factor, *betas), magnitude

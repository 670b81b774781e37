"""Do passes over trees give one-token decoding's logits to the last bit? Kernels may round by the number of tokens."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ...errors import UnsupportedModelError
from ...tree import Floats
from ..base import PROMPT, LanguageModel, Nodes, check_finite, decoded, difference, prefill

_PARENTS = (-1, -1, 0, 1, 3, 2, 3, 4)
"""Of the tree of the test. Its branches are interleaved; it is as wide as the widest kernels that are known."""
_PATH = (1, 3, 4)
"""The nodes that are compared."""
_WRONG = 1.0
"""Standard deviations of the logits: rounding makes 0.2 to 0.5, another token in sight several."""
EXACT = "yes, bit-exact: a tree gives one-token decoding's logits"


def exactness(model: LanguageModel, kinds: Collection[str], tokens: int) -> tuple[str, float]:
    """Compare nodes of a tree with one-token decoding, behind a text of ``tokens`` tokens.

    Args:
        kinds: the formats of its weights, for people.

    Returns:
        how exact they are, in words; by how much the gap between two logits may differ.

    Raises:
        ModelFileError: they are no numbers.
        UnsupportedModelError: they differ by more than rounding.
    """
    vocab = model.capabilities.vocab_size
    drafted = [(31 * i + 17) % vocab for i in range(len(_PARENTS))]
    row = prefill(model, [(PROMPT[i % len(PROMPT)] + i) % vocab for i in range(tokens)])
    branch = model.fork(row)
    alone = decoded(model, branch, [drafted[node] for node in _PATH])
    model.close(branch)
    check_finite(model.capabilities, alone)

    def found(count: int) -> Floats:
        scores = model.extend([row], [Nodes.of(drafted[:count], _PARENTS[:count])])
        model.commit(row, [])
        return scores.logits([node for node in _PATH if node < count])

    differs = [n for n in range(2, len(_PARENTS) + 1) if not np.array_equal(got := found(n), alone[: len(got)])]
    if not differs:
        model.close(row)
        return EXACT, 0.0
    worst = max(difference(got := found(n), alone[: len(got)]) for n in differs)
    gap = 2 * worst * float(alone.std())
    model.close(row)
    if worst > _WRONG:
        raise UnsupportedModelError(
            f"{model.capabilities.name} fails the tree self-test: logits differ by {worst:.2g} standard deviations "
            f"from one-token decoding's ({_WRONG:g} allowed): use backend 'transformers'"
        )
    words = (
        f"yes, with near-ties: in passes over {differs[0]} tokens and more logits differ by up to {worst:.1g} standard "
        f"deviations from one-token decoding's, since kernels for {', '.join(sorted(kinds))} round otherwise there; "
        "texts differ where two tokens are nearly as likely. Files in Q8_0, Q4_0 and Q4_1 are bit-exact on CPUs with "
        "AVX2"
    )
    return words, gap

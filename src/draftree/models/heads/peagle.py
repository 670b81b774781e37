"""P-EAGLE heads: EAGLE-3 that predicts several tokens in one pass (arXiv 2602.01469; the format of speculators).

Behind the text stand masks, each the next position: the embedding of a mask token beside fc of a trained vector in
place of the target's hidden states. Attention is causal. The last token predicts the first token after it, mask i the
one i further on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base import Capabilities, FeatureSpec, Nodes, Row
from ..huggingface.torch_scores import tensor_of
from .eagle_model import HeadModel

_CHAIN = 64
"""Of more new tokens all but the last are read by a pass of their own: it needs no mask of each token's ancestors."""


class ParallelHead:
    """A P-EAGLE head for one target (``MarginalHead``).

    Attributes:
        head: what computes, an EAGLE-3 head.
        depth: positions that it predicts: one more than there are masks.

    Args:
        mask_token: of which masks have the embedding.
        mask_hidden: [F] what they have in place of hidden states.
    """

    def __init__(self, head: HeadModel, mask_token: int, mask_hidden: Tensor, depth: int) -> None:
        self.head, self.depth = head, depth
        self._tokens = torch.full((depth - 1,), mask_token)
        self._states = head.fused(mask_hidden.to(head.nothing)).expand(depth - 1, -1)

    @property
    def capabilities(self) -> Capabilities:
        """The target's, with its own name, size and fingerprint."""
        return self.head.capabilities

    @property
    def features(self) -> FeatureSpec:
        """Which hidden states of the target it reads."""
        return self.head.features

    @property
    def vocabulary(self) -> Tensor:
        """[D] int64 the target's ids of its tokens."""
        return self.head.vocabulary

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens at once."""
        self.head.reserve(rows, tokens)

    def open(self) -> Row:
        """A new row without tokens."""
        return self.head.open()

    def close(self, row: Row) -> None:
        """Forget a row."""
        self.head.close(row)

    @torch.inference_mode()
    def marginals(self, rows: Sequence[Row], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
        """[B, depth, D] logits (``MarginalHead.marginals``)."""
        own = [self.head.own(row) for row in rows]
        if max(map(len, tokens)) > _CHAIN:
            self.head.advance(own, [new[:-1] for new in tokens], [given[:-1] for given in features])
            tokens, features = [new[-1:] for new in tokens], [given[-1:] for given in features]
        for row in own:
            self.head.commit(row, [])
        nodes = [Nodes.chain([*new.tolist(), *self._tokens.tolist()], self.depth) for new in tokens]
        states = [torch.cat([self.head.fused(given), self._states]) for given in features]
        logits = tensor_of(self.head.extend(own, nodes, states))
        for row, new in zip(own, tokens, strict=True):
            self.head.commit(row, range(len(new)))
        return logits.view(len(own), self.depth, -1)[..., : len(self.vocabulary)]

"""How the children of a draft tree's nodes come out of the draft law: its most probable tokens, or drawn from it.

Pure functions of laws and keys; knows no model. Draws are keyed by (seed, position of the step's root, node, draw
index) under a label of their own, so they are independent of the target's noise and of the verification's coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling import DRAFT_NOISE, derive_seed, gumbel_noise
from ..tree import DraftLaw


class Drawing(Enum):
    """Which k children a node gets from its draft law q."""

    COUPLED = "the k that the target will most probably draw, given the noise that it shares"
    TOP = "the k most probable"
    WITHOUT_REPLACEMENT = "k draws without replacement"
    WITH_REPLACEMENT = "k draws with replacement"
    TOP_AND_ONE = "the k - 1 most probable, then one draw from the rest of q"

    @property
    def random(self) -> bool:
        """Children are drawn."""
        return self not in (Drawing.COUPLED, Drawing.TOP)


class Drawn(NamedTuple):
    """The children of F nodes.

    Attributes:
        tokens: [F, K] int64 in draw order; only as many as were asked for mean anything.
        logprobs: [F, K] float32, what the drafter gives each of them (nats).
        laws: [F] what they were drawn from; None where nothing was drawn.
    """

    tokens: Tensor
    logprobs: Tensor
    laws: Sequence[DraftLaw | None]


class Key(NamedTuple):
    """What the noise of a node's children depends on.

    Attributes:
        seed: the request's.
        position: of the step's root: no two steps share it.
        node: number in the step's tree while it grows, ROOT for the root.
    """

    seed: int
    position: int
    node: int


def draw(logits: Tensor, counts: Sequence[int], keys: Sequence[Key], drawing: Drawing) -> Tensor:
    """Draw children by the Gumbel-max trick.

    The k largest of logits + Gumbel noise, in order, are k draws without replacement (Yellott 1977; Kool et al., ICML
    2019, "Stochastic Beams and Where to Find Them"); with replacement every draw has noise of its own.

    Args:
        logits: [F, V] of the draft laws.
        counts: [F] children of each node, at most as many as have positive probability.
        keys: [F].
        drawing: how.

    Returns:
        [F, max(counts)] int64 columns of ``logits`` in draw order; those beyond a node's count mean nothing.
    """
    width = max(counts)
    if not drawing.random:
        return logits.topk(width).indices
    if drawing is Drawing.WITHOUT_REPLACEMENT:
        return (logits + _noise(keys, [0] * len(keys), logits)).topk(width).indices
    if drawing is Drawing.TOP_AND_ONE:
        columns = logits.topk(width).indices
        last = torch.tensor(counts).to(logits.device, non_blocking=True)[:, None] - 1
        ranks = torch.arange(width, device=logits.device)
        top = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, columns, ranks < last)
        one = (logits.masked_fill(top, float("-inf")) + _noise(keys, [0] * len(keys), logits)).argmax(-1, keepdim=True)
        return torch.where(ranks < last, columns, one)
    pairs = [(f, i) for f, count in enumerate(counts) for i in range(count)]
    nodes, draws = torch.tensor(pairs).T.to(logits.device, non_blocking=True)
    noise = _noise([keys[f] for f, _ in pairs], [i for _, i in pairs], logits)
    columns = torch.zeros((len(counts), width), dtype=torch.int64, device=logits.device)
    columns[nodes, draws] = (logits[nodes] + noise).argmax(-1)
    return columns


def _noise(keys: Sequence[Key], draws: Sequence[int], logits: Tensor) -> Tensor:
    """[R, V] for each key and draw index."""
    seeds = [derive_seed(key.seed, DRAFT_NOISE, key.node, i) for key, i in zip(keys, draws, strict=True)]
    return gumbel_noise(seeds, [key.position for key in keys], logits.shape[-1], logits.device)

"""What a classifier learns from: nodes of full draft trees, each with whether the target accepted it.

The target's own responses are drafted again with trees that nothing has pruned (C2T: depth 11, 10 children of each of
a layer's 10 best nodes). With match verification the accepted path is the longest one that the text follows, so labels
are what a trace of such decoding says (``StepRecord.accepted``), and no target pass goes into a thousand drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import SamplingParams
from ..draft.base import Drafter
from ..errors import RunError
from ..models.huggingface import HFModel
from ..policies.base import GrowthPolicy
from ..policies.best_paths import Eagle2Tree
from ..policies.c2t import FEATURES, features, of_tree
from ..tree import ROOT, DraftTree
from .replay import Replay
from .responses import Response, seed_of

WIDTH, LEVELS = 10, 11
NODES = WIDTH + (LEVELS - 1) * WIDTH**2
"""Of a full tree; with its root 1011, as published."""
APART = 20
"""One prompt in so many is kept apart by default: the published split of 0.95 and 0.05."""


def full_trees() -> GrowthPolicy:
    """The trees that samples come from: within a budget of ``NODES`` nothing is pruned."""
    return Eagle2Tree(width=WIDTH, depth=LEVELS)


class Samples(NamedTuple):
    """M nodes.

    Attributes:
        features: [M, F] float32, all of ``FEATURES`` in their order.
        accepted: [M] bool, the node was on the accepted path.
        reached: [M] bool, its parent was accepted, or is the root: the target judged the node itself.
        numbers: [M] int64, of the prompt.
    """

    features: Tensor
    accepted: Tensor
    reached: Tensor
    numbers: Tensor

    def take(self, which: Tensor) -> Samples:
        """Some of them; ``which`` is [M] bool or numbers."""
        return Samples(*(column[which] for column in self))

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """One after the other."""
        none = torch.zeros(0).bool()
        empty = cls(torch.zeros(0, len(FEATURES)), none, none, torch.zeros(0).long())
        return cls(*(torch.cat(columns) for columns in zip(empty, *parts, strict=True)))

    def split(self, every: int = APART) -> tuple[Samples, Samples]:
        """Those to learn from, and those of one prompt in ``every``, which are kept apart."""
        apart = self.numbers % every == every - 1
        return self.take(~apart), self.take(apart)


def samples_of(tree: DraftTree, path: Sequence[int], number: int) -> Samples:
    """All nodes of a full tree of which the target accepted ``path``."""
    accepted = torch.zeros(len(tree) + 1, dtype=torch.bool)
    accepted[[*path, ROOT]] = True  # the root is the last
    given, numbers = features(of_tree(tree), tuple(FEATURES)), torch.full((len(tree),), number)
    return Samples(given, accepted[:-1], accepted[tree.parents], numbers)


def thinned(samples: Samples, share: float, generator: torch.Generator) -> Samples:
    """All accepted nodes, and each other one with probability ``share``."""
    kept = torch.rand(len(samples.accepted), generator=generator) < share
    return samples.take(samples.accepted | kept)


@torch.inference_mode()
def samples_along(
    drafter: Drafter, response: Response, seed: int, share: float, verifier: HFModel | None = None
) -> tuple[Samples, int]:
    """Samples from decoding a response again with full trees, and how many trees there were.

    Args:
        drafter: grows ``full_trees``.
        response: drawn with ``seed``; hidden states as the drafter reads them.
        share: of nodes that were not accepted to keep.
        verifier: makes its passes all the same, for a drafter that learns from what the target's laws say.
    """
    generator = torch.Generator().manual_seed(seed_of(response.number, seed))
    ids, start = response.tokens.tolist(), response.prompt_length
    params = SamplingParams(temperature=response.temperature, seed=seed_of(response.number, seed))
    given = response.features if response.features.shape[1] and verifier is None else None
    parts: list[Samples] = []
    with Replay(drafter, ids[:start], ids[start:], params, given, verifier) as replay:
        while replay.left:
            tree = replay.propose(NODES, len(replay.left) - 1)
            path = replay.accepted(tree)
            replay.advance(tree, path, len(path) + 1)
            if len(tree):
                parts.append(thinned(samples_of(tree, path, response.number), share, generator))
    return Samples.joined(parts), len(parts)


def check_finite(samples: Samples) -> None:
    """Make sure that all features are numbers.

    Raises:
        RunError: one is not; the message names it.
    """
    bad = ~samples.features.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise RunError(
            f"feature {list(FEATURES)[column]} of a draft for prompt {int(samples.numbers[row]) + 1} is "
            f"{float(samples.features[row, column])}: the drafter's logits are no numbers, use another drafter or dtype"
        )

"""How good a draft head is, on responses that it has not learned from; no target pass is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from ..config import SamplingParams
from ..draft.drafter import TreeDrafter
from ..draft.head import HeadSource
from ..models.eagle_model import HeadModel
from ..policies.base import GrowthPolicy
from ..policies.best_paths import OptTree
from ..policies.entropy import StaticTree
from .calibrate import TruePath, ranks_along
from .replay import Replay
from .responses import Response, seed_of

DEPTH = 5
RANKS = (1, 2, 4)
STRIDE = 4
"""Tokens from one draft to the next where acceptance is counted."""

_DELTA = 0.05
"""Least gain in E(A) for which another layer of the best tree is drafted: machines differ, these figures do not."""


def shapes() -> dict[str, tuple[GrowthPolicy, int]]:
    """The trees whose acceptance lengths are told: policy and nodes."""
    return {
        "chain of 4": (StaticTree(width=1, depth=4), 4),
        "opt-tree, 8 nodes": (OptTree(_DELTA), 8),
        "opt-tree, 16 nodes": (OptTree(_DELTA), 16),
    }


@dataclass(frozen=True, slots=True)
class Figures:
    """What was found.

    Attributes:
        responses, tokens: that were drafted along.
        trials: [DEPTH] drafts that came to each depth along the true path.
        acceptance: [DEPTH][3] share of them whose true token was among the 1, 2 and 4 most probable.
        mal: shape -> acceptance length, bonus token included.
    """

    responses: int
    tokens: int
    trials: list[int]
    acceptance: list[list[float]]
    mal: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        """For a file."""
        return asdict(self)


@torch.inference_mode()
def evaluate(head: HeadModel, responses: Sequence[Response], seed: int, tell: Callable[[int], None]) -> Figures:
    """Draft along responses: with the true token alone kept, for acceptance, and as decoding would, for its length.

    Args:
        head: the head, with the target's own output layer.
        responses: of which only those with at least two tokens count.
        seed: with which they were drawn.
        tell: called with how many of them are done.
    """
    vocabulary = head.capabilities.vocab_size
    used = [r for r in responses if r.gained > 1]
    trials, hits = [0] * DEPTH, [[0] * len(RANKS) for _ in range(DEPTH)]
    policy = TruePath()
    drafter = TreeDrafter(policy, HeadSource(head, vocabulary))
    trees = {name: (TreeDrafter(p, HeadSource(head, vocabulary)), nodes) for name, (p, nodes) in shapes().items()}
    gained, steps = 0, dict.fromkeys(trees, 0)
    for done, response in enumerate(used, start=1):
        prompt, output = response.tokens.tolist()[: response.prompt_length], response.tokens[response.prompt_length :]
        features = response.features.to(head.capabilities.device, head.capabilities.dtype)
        params = SamplingParams(temperature=response.temperature, seed=seed_of(response.number, seed))
        known = output.tolist()
        for ranks in ranks_along(drafter, policy, prompt, known, params, depth=DEPTH, stride=STRIDE, features=features):
            for d, rank in enumerate(ranks):
                trials[d] += 1
                for i, limit in enumerate(RANKS):
                    hits[d][i] += rank is not None and rank < limit
        for name, (tree, nodes) in trees.items():
            with Replay(tree, prompt, known, params, features) as replay:
                while replay.left:
                    replay.step(nodes)
                    steps[name] += 1
        gained += len(known) - 1
        tell(done)
    acceptance = [[h / max(1, n) for h in row] for n, row in zip(trials, hits, strict=True)]
    mal = {name: gained / max(1, n) for name, n in steps.items()}
    return Figures(len(used), gained, trials, acceptance, mal)

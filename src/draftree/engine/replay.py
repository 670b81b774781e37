"""Known outputs: drafting along one, as decoding would have drafted, and where two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..config import Budget, SamplingParams
from ..drafters.base import Drafter
from ..draws import Draws
from ..models.base import FINAL_STATE, FeatureSpec, LanguageModel, Nodes, Row, prefill, prefill_scored
from ..request import Outcome, Request, StepCost
from ..sampling.constraint import followed
from ..sampling.warping import gumbel_noise
from ..text.detokenizer import NoText
from ..tree import DraftTree
from .step import count

if TYPE_CHECKING:
    from torch import Tensor

UNMEASURED = StepCost(batch=1, draft=0.0, verify=0.0, other=0.0, draft_passes=0)


class Replay(AbstractContextManager["Replay"]):
    """A request that is decoded again with a drafter, without its target if need be; a context that closes it.

    Attributes:
        request: its statistics are those of decoding, at the costs that steps are given.
        left: the output that is still to come; its last token is never drafted from.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: Sequence[int],
        output: Sequence[int],
        params: SamplingParams,
        features: Tensor | None = None,
        target: LanguageModel | None = None,
        spec: FeatureSpec = FINAL_STATE,
    ) -> None:
        """
        Args:
            prompt, output: a prompt and the target's response.
            params: how it decoded; the draft distribution follows its temperature.
            features: [n, F] its hidden states at all tokens but the last, for a drafter that reads them.
            target: makes its passes all the same, instead of features.
            spec: which hidden states ``features`` are.
        """
        self.left = list(output[1:])
        self._drafter, self._features, self._target = drafter, features, target
        self.request = Request(prompt, params, len(output), frozenset(), NoText())
        self._row = Row()
        if target is not None:
            self._row = prefill(target, prompt)
        elif features is not None:
            from ..models.huggingface.cache import FeatureRow

            self._row = FeatureRow(tracked=spec)
        self.request.row = self._row
        drafter.open(self.request)
        self._gain(list(output[:1]))

    def __exit__(self, *error: object) -> None:
        self._drafter.close(self.request)
        if self._target is not None:
            self._target.close(self._row)

    def _gain(self, tokens: list[int]) -> None:
        """Take tokens of the output; the target reads what is new but the last, and nothing that was only drafted."""
        self.request.ids += tokens
        start, end = self._row.length, len(self.request.ids) - 1
        if self._target is None:
            self._row.length = end
            if self._features is not None:
                from ..models.huggingface.cache import feature_row

                feature_row(self._row).features.append(self._features[start:end])
        elif unread := self.request.ids[start:end]:
            self._target.extend([self._row], [Nodes.chain(unread, wanted=0)])
            self._target.commit(self._row, range(len(unread)))

    def propose(self, nodes: int, depth: int) -> DraftTree:
        """What it drafts here."""
        return self._drafter.propose([self.request], [Budget(nodes, depth)])[0]

    def advance(self, tree: DraftTree, path: list[int], tokens: int, cost: StepCost = UNMEASURED) -> Outcome:
        """Take the next ``tokens`` of the output, ``path`` of them drafted, in a step of this cost."""
        gained, self.left = self.left[:tokens], self.left[tokens:]
        self._gain(gained)
        outcome = Outcome(self.request, tree, path, gained, len(gained), cost)
        self._drafter.observe([outcome])
        count(outcome, self._drafter)
        return outcome

    def step(self, nodes: int) -> tuple[DraftTree, list[int]]:
        """Draft and advance as decoding with match verification does; the tree, and the path accepted of it."""
        tree = self.propose(nodes, len(self.left) - 1)  # the last token is the bonus
        path = self.accepted(tree)
        self.advance(tree, path, len(path) + 1)
        return tree, path

    def accepted(self, tree: DraftTree) -> list[int]:
        """The nodes that match verification accepts: the longest path that the output follows."""
        following = [*self.left, *[-1] * (1 + tree.depth)]
        return tree.follow([following[0], *map(following.__getitem__, tree.depths)])[0]


LARGEST_GAP = 1e-3
"""Largest gap, in logits, that the rounding of differently shaped passes can explain in float32."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two decodings first differ.

    Attributes:
        index: of the first generated token that differs.
        gap: by how much the target prefers one of the two tokens there, in (warped, noisy) logits; None: one decoding
            is the beginning of the other.
        near_tie: rounding explains the gap.
    """

    index: int
    gap: float | None
    near_tie: bool


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def first_difference(
    target: LanguageModel, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], params: SamplingParams
) -> Difference | None:
    """The first difference between two decodings of a prompt under a seed; None when they are equal."""
    shared = shared_length(a, b)
    if shared == len(a) == len(b):
        return None
    if shared in (len(a), len(b)):
        return Difference(shared, None, near_tie=False)
    seed, ids = params.seed or 0, [*prompt_ids, *a[:shared]]
    row, scores = prefill_scored(target, ids)
    state = None if params.constraint is None else followed(params.constraint.start(), a[:shared])
    draws = Draws(params, seed, ids, len(prompt_ids), state)
    logits = draws.warped(scores, 0, ()).astype(np.float64)
    target.close(row)
    if params.temperature > 0:
        logits += gumbel_noise(draws.key(0), len(logits))
    gap = abs(float(logits[a[shared]] - logits[b[shared]]))
    rounding = target.capabilities.rounding
    allowed = LARGEST_GAP if rounding is None else rounding
    return Difference(shared, gap, gap <= allowed)

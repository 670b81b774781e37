"""Every outcome of chance, with its probability: draws of children, acceptance draws and residual draws by script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import Scorer, UnscoredNode
from draftree.drafters.draft_model import candidates_of_top
from draftree.drafters.grow import grow
from draftree.policies.base import Candidates, ChildSampler, DraftDistribution, GrowthPolicy, Numbers
from draftree.request import Request
from draftree.sampling.warping import softmax
from draftree.scores import Top
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT, DraftTree
from draftree.verify.base import TargetLogits, UniformDraws, Verdict
from draftree.verify.sampled import RandomChildren, Streams, TopAndRest, WithReplacement

from ..toy import Path, ToyModel, distribution

T = TypeVar("T")
PROMPT = [1, 0, 2]
HORIZON = 3

Judge = Callable[[DraftTree, TargetLogits, UniformDraws], Verdict]


class Chance:
    """What chance decides in one run of a program: the script first, then the first possible outcome each time."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.made: list[tuple[int, int]] = []
        self.probability = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """One of the outcomes of positive weight; weights sum to 1."""
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = self._script[len(self.made)] if len(self.made) < len(self._script) else 0
        self.made.append((at, len(possible)))
        self.probability *= weights[possible[at]]
        return possible[at]

    def accepts(self, chance: float) -> bool:
        """See ``UniformDraws``."""
        return self.choose([chance, 1 - chance]) == 0

    def draw(self, logits: NDArray[np.floating], depth: int) -> int:
        """See ``UniformDraws``."""
        return self.choose(softmax(logits).tolist())


def outcomes(program: Callable[[Chance], T]) -> Iterator[tuple[T, float]]:
    """Run ``program`` once for each way that chance can go."""
    script: list[int] | None = []
    while script is not None:
        chance = Chance(script)
        yield program(chance), chance.probability
        made = chance.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        script = [at for at, _ in made[:-1]] + [made[-1][0] + 1] if made else None


class ToyScorer(Scorer):
    """A ``Scorer`` over a toy."""

    def __init__(self, model: ToyModel) -> None:
        self._model = model
        self._paths: dict[tuple[int, int], Path] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """See ``Scorer``."""
        for row, node, parent, token in nodes:
            self._paths[row, node] = () if node == ROOT else (*self._paths[row, parent], token)
        rows = torch.stack([self._after(n.request, n.node) for n in nodes])
        top = rows.topk(min(width, rows.shape[1]))
        entropies = torch.special.entr(rows.exp()).sum(-1)
        return candidates_of_top(Top(top.indices.numpy(), top.values.float().numpy(), entropies.float().numpy()))

    def _after(self, request: int, node: int) -> Tensor:
        return self._model.after([*PROMPT, *self._paths[request, node]]).double().log_softmax(-1)

    def distributions(self, nodes: Sequence[tuple[int, int]]) -> list[DraftDistribution]:
        """See ``Scorer``."""
        return [DraftDistribution(self._after(*node).numpy()) for node in nodes]


class ScriptedChildren(RandomChildren):
    """Draws children as the schemes define it, by the script."""

    def __init__(self, sampler: type[ChildSampler], chance: Chance) -> None:
        super().__init__([Request([*PROMPT], SamplingParams(temperature=1.0, seed=0), 9, frozenset(), NoText())])
        self._sampler, self._chance = sampler, chance

    def choose(self, logits: NDArray[np.floating], count: int, streams: Streams) -> Numbers:
        """See ``RandomChildren``."""
        logits, out = logits.copy(), list[int]()
        for i in range(count):
            best = self._sampler is TopAndRest and i < count - 1
            out.append(int(logits.argmax()) if best else self._chance.choose(softmax(logits).tolist()))
            if self._sampler is not WithReplacement:
                logits[out[-1]] = -np.inf
        return np.array(out)


def drawn_trees(
    drafter: ToyModel, policy: GrowthPolicy, sampler: type[ChildSampler] | None, nodes: int
) -> Iterator[tuple[DraftTree, float]]:
    """Every tree that the growth loop can draw for a request, with its probability."""
    assert sampler is not None

    def drawn(chance: Chance) -> DraftTree:
        plan = policy.plan([], [Budget(nodes)])
        return grow(ToyScorer(drafter), policy, plan, sampler=ScriptedChildren(sampler, chance))[0].tree

    return outcomes(drawn)


def verdicts_of(judge: Judge, model: ToyModel, tree: DraftTree) -> Iterator[tuple[Verdict, float]]:
    """Every verdict on one tree, with its probability."""
    return outcomes(lambda chance: judge(tree, lambda node, drawn: model.after([*PROMPT, *drawn]).numpy(), chance))


def emitted_distribution(judge: Judge, model: ToyModel, trees: Iterator[tuple[DraftTree, float]]) -> Tensor:
    """[V] * HORIZON: exact distribution of one step's tokens over all trees, completed by plain draws."""
    chances: dict[tuple[int, ...], float] = {}
    for tree, weight in trees:
        for verdict, chance in verdicts_of(judge, model, tree):
            assert verdict.tokens[:-1] == [tree.tokens[node] for node in verdict.path]
            tokens = tuple(verdict.tokens)
            chances[tokens] = chances.get(tokens, 0.0) + weight * chance
    total = torch.zeros([model.capabilities.vocab_size] * HORIZON, dtype=torch.float64)
    for tokens, chance in chances.items():
        total[tokens] += chance * distribution(model, [*PROMPT, *tokens], HORIZON - len(tokens))
    return total


def variation(judge: Judge, model: ToyModel, trees: Iterator[tuple[DraftTree, float]]) -> float:
    """Total variation between the distribution of a scheme's output and the model's own."""
    return 0.5 * float((emitted_distribution(judge, model, trees) - distribution(model, PROMPT, HORIZON)).abs().sum())
